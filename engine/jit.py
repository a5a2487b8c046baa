"""The door to Numba: one decorator for every kernel, and where compiled kernels are kept.

Numba's cache notices edits to a function's own file only, so compiled code lives in a folder named by a digest of all
kernel sources, the Numba and LLVM versions, and the CPU compiled for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core import event

from deepthin.engine.cpu import codegen_cpu, simd_target

F = TypeVar("F", bound=Callable[..., Any])

# contract: fuse a*b+c where written apart; nothing that reorders, so lanes fix the order of every sum
FASTMATH = {"contract"}


def user_cache_dir() -> Path:
    """Folder for compiled kernels and measurements: ``DEEPTHIN_CACHE_DIR``, else the platform's cache folder."""
    if forced := os.environ.get("DEEPTHIN_CACHE_DIR"):
        return Path(forced)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "deepthin"


@functools.cache
def source_digest() -> str:
    """Hex digest that changes whenever a compiled kernel could: kernel sources, compiler versions, CPU, target."""
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted([here / "jit.py", *(here / "simd").glob("*.py"), *(here / "kernels").glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    cpu = codegen_cpu()
    for part in (numba.__version__, llvmlite.__version__, cpu.name, *sorted(cpu.features), simd_target(), sys.version):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:20]


@functools.cache
def kernel_cache_dir() -> Path | None:
    """Where this process keeps compiled kernels; None where that cannot be written."""
    folder = user_cache_dir() / "kernels" / source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def kernel(function: F) -> F:
    """Compile ``function`` without the GIL, bounds checks, reordering or reference counts; keep the result across processes.

    Kernels allocate nothing and their callers hold every array, so counting references is of no use; but the counters are
    atomic and shared, and each call of one kernel by another touched one per array (half the time of a small block).
    Where the cache folder cannot be written the kernel is compiled anew in each process.
    """
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "fastmath": FASTMATH, "error_model": "numpy", "_nrt": False}
    folder = kernel_cache_dir()
    if folder is None:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read when the decorator builds its cache, then put back for other users of Numba
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    finally:
        numba.config.CACHE_DIR = previous


class _Counter(event.Listener):  # type: ignore[misc]
    """Counts what Numba has finished compiling."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report, self._count = report, 0

    def on_start(self, event: Any) -> None:
        """Nothing is done yet."""

    def on_end(self, event: Any) -> None:
        """One more is."""
        self._count += 1
        self._report(self._count)


@contextlib.contextmanager
def compilations(report: Callable[[int], None]) -> Iterator[None]:
    """Tell ``report`` how many functions have been compiled so far, whenever one more is; what the cache holds is not counted.

    It is called on the thread that compiles.
    """
    with event.install_listener("numba:compile", _Counter(report)):
        yield


def assembly(function: Callable[..., Any]) -> str:
    """Machine code text of every compiled version of a kernel, for tests that look for an instruction."""
    return "\n".join(function.inspect_asm().values())  # type: ignore[attr-defined]
