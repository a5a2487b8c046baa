"""Measurements kept across runs: one JSON object per line, appended and never changed, found again by key.

A key is a JSON object of everything that determines the result; two keys are the same when their sorted JSON texts are.
Of several lines with one key the last counts. A line torn by a kill is skipped, and the next append starts a new line.
Several processes may append to one file: each line is one write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deepthin.engine.errors import DeepthinError, FormatError

SCHEMA = "deepthin/measurement/1"


class MeasurementStore:
    """The file at ``path``; its folder is made when the first measurement is put.

    Raises:
        FormatError: the file exists but holds not one line of ours.
        DeepthinError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.damaged_lines = 0
        self._values: dict[str, Mapping[str, Any]] = {}
        self._read_to = 0
        try:
            self._refresh()
        except OSError as error:
            raise self._unusable(error) from error
        if self.damaged_lines and not self._values:
            raise FormatError(
                f"{self.path}: not one line is a deepthin measurement; name a new file or the one that an earlier run wrote"
            )

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The value last put under ``key`` by any process, or None."""
        text = _key_text(key)
        if text not in self._values:
            self._refresh()
        return self._values.get(text)

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Append ``value`` under ``key``; it is on disk when this returns.

        Raises:
            FormatError: a value that JSON cannot hold, such as NaN.
        DeepthinError: the file cannot be written.
        """
        created = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"schema": SCHEMA, "key": dict(key), "value": dict(value), "created_utc": created}
        try:
            line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
        except ValueError as error:
            raise FormatError(f"{self.path}: a measurement holds NaN or infinity and is not stored: {error}") from error
        try:
            self._append(line)
        except OSError as error:
            raise self._unusable(error) from error
        self._values[_key_text(key)] = dict(value)

    def _unusable(self, error: OSError) -> DeepthinError:
        why = error.strerror or error
        return DeepthinError(f"{self.path}: timings cannot be kept there ({why}); name another file that can be written")

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            size = os.lseek(handle, 0, os.SEEK_END)
            if size and _last_byte(handle, size) != b"\n":
                line = b"\n" + line
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _refresh(self) -> None:
        """Read the complete lines that were added since the last look."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_to)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._read_to += len(complete)
        for line in complete.splitlines():
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            if record["schema"] != SCHEMA:
                return  # another version's line is none of ours, and not damaged either
            key, value = record["key"], record["value"]
        except (ValueError, KeyError, TypeError):
            self.damaged_lines += 1
            return
        if isinstance(key, dict) and isinstance(value, dict):
            self._values[_key_text(key)] = value
        else:
            self.damaged_lines += 1


def _key_text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _last_byte(handle: int, size: int) -> bytes:
    os.lseek(handle, size - 1, os.SEEK_SET)
    return os.read(handle, 1)
