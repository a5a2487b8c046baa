"""Progress on standard error: one line rewritten on a terminal, otherwise a line every few seconds. Never on standard output.

Nothing appears for work shorter than two seconds off a terminal, and no colour or cursor codes are used anywhere, so
``NO_COLOR`` is honoured by construction. A small thread repeats the last message with the time passed, since one step
(compiling, measuring) can itself take long.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Self, TextIO

FIRST_LINE_S = 2.0
LINE_EVERY_S = 5.0
REDRAW_EVERY_S = 1.0


class Progress:
    """Callable ``progress(message, done, total)``; a context manager that clears its line at the end.

    Args:
        stream: where to write; standard error when absent.
        enabled: False keeps it silent.
    """

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled
        self._is_terminal = self._stream.isatty()
        self._start = self._last = time.monotonic()
        self._text = ""
        self._shown = 0  # characters of the line on the terminal
        self._printed = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None:
        """Say what is going on now, with ``done`` of ``total`` steps when known."""
        if not self._enabled:
            return
        steps = "" if done is None else f" {done}" if total is None else f" {done}/{total}"
        with self._lock:
            self._text = message + steps
            if self._is_terminal:
                self._draw()
        if self._thread is None:
            self._thread = threading.Thread(target=self._tick, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, and clear the line on a terminal."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick(self) -> None:
        pause = REDRAW_EVERY_S if self._is_terminal else FIRST_LINE_S
        while not self._stop.wait(pause):
            with self._lock:
                if self._is_terminal:
                    self._draw()
                elif self._text != self._printed or time.monotonic() - self._last >= 4 * LINE_EVERY_S:
                    self._write(f"{self._line()}\n")
                    self._printed, self._last = self._text, time.monotonic()
            pause = REDRAW_EVERY_S if self._is_terminal else LINE_EVERY_S

    def _draw(self) -> None:
        line = self._line()[:100]
        self._write("\r" + line.ljust(self._shown))
        self._shown = len(line)

    def _line(self) -> str:
        return f"[{time.monotonic() - self._start:3.0f} s] {self._text}"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a closed standard error is no reason to stop working
            self._enabled = False
            self._stop.set()
