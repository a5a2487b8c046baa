"""Writing to the standard streams, which may be closed, full, or read by someone who has seen enough."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

from deepthin.engine.errors import DeepthinError


def prepare_streams() -> None:
    """Put an empty stream where the shell closed one (``>&-``), and let any text be printed in any encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, open as long as the process
    with contextlib.suppress(AttributeError, ValueError, io.UnsupportedOperation):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def write_out(text: str, end: str = "\n") -> None:
    """Print on standard output, at once.

    Raises:
        BrokenPipeError: the reader has left.
        DeepthinError: it cannot be written, for instance to a full disk.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise DeepthinError(
            f"standard output cannot be written ({error.strerror or error}); make room there or send it elsewhere"
        ) from error


def write_error(text: str) -> None:
    """Print on standard error; where that cannot be written there is nobody left to tell."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send what ``stream`` still holds, and all that follows, nowhere; else Python complains about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        empty = os.open(os.devnull, os.O_WRONLY)
        os.dup2(empty, stream.fileno())
        os.close(empty)
