"""What every refusal of a bad file must be: the right error, one clear line, at once, and without memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepthin.engine.errors import DeepthinError, FormatError

MAX_SECONDS = 1.0  # of processor time, so that a busy machine fails nothing
MAX_BYTES = 4 << 20


def assert_refused(
    call: Callable[[Path], Any], path: Path, match: str, *, error: type[DeepthinError] = FormatError, max_bytes: int = MAX_BYTES
) -> str:
    """``call(path)`` raises exactly ``error``, with one line that names the path and matches; returns the line."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(DeepthinError, match=match) as caught:
            call(path)
        seconds = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {message}"
    assert_one_line(message)
    assert path.name in message, message
    assert seconds < MAX_SECONDS, f"{seconds:.2f} s: {message}"
    assert peak < max_bytes, f"{peak} bytes: {message}"
    return message


def assert_one_line(message: str) -> None:
    """A message fit to be printed: one line, printable, not endless."""
    assert message and message.isprintable() and len(message) < 800, ascii(message)[:1000]
