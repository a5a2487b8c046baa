"""What is known of builds of llama.cpp that do not work; said inside the child process that loads one, before it can crash."""

from __future__ import annotations

import sys

REINSTALL = (
    "CFLAGS=-U__AMX_INT8__ CXXFLAGS=-U__AMX_INT8__ pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python"
)


def warn_of_amx(system_info: str) -> None:
    """Print to standard error what a crash would mean, if the library was built with AMX.

    GCC's ``_tile_loadconfig`` (amxtileintrin.h of 12.2) declares that it reads 8 bytes of the 64 of a tile configuration, so
    the optimizer leaves out writing the others, and the processor refuses what remains: the first prompt over quantised weights
    ends the process. A parent quotes the last line that speaks of failure (:class:`deepthin.engine.child.Child`).

    Args:
        system_info: from ``llama_print_system_info``.
    """
    if "AMX_INT8 = 1" in system_info:
        text = f"a crash may come from its AMX code, which fails where GCC 12 compiled it; reinstall it without: {REINSTALL}"
        print(text, file=sys.stderr, flush=True)
