"""The run folder: one search, its settings, its measurements and its front. Files only; no sampling, no scoring.

    config.json          settings; a folder holds one search
    journal.log          the study (``search/study.py``), unless a database holds it
    storage.json         which database and study, without its password, if one does
    measurements.jsonl   one line per measured shape, appended and synced at once
    front.json           the result, written whole
    .lock                held by the running process; the operating system frees it however the process ends

Every file is either appended to line by line or written to a temporary name and renamed, so a kill tears one line at most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from deepthin.engine.errors import DeepthinError, FormatError, UsageError
from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost
from deepthin.search.filesystem import network_filesystem
from deepthin.search.lock_file import try_lock

CONFIG, JOURNAL, MEASUREMENTS, FRONT, LOCK = "config.json", "journal.log", "measurements.jsonl", "front.json", ".lock"
STORAGE = "storage.json"
_TEMPORARY = ".tmp"
_START_OVER = "choose another --out, or remove the folder to start over"


class RunFolder:
    """An open, locked run folder; a context manager.

    Args:
        path: created if absent; if it holds files, they must be those of the same search.
        config: the settings asked for.

    Raises:
        UsageError: the folder holds another search, or files of something else.
        DeepthinError: another process has it open, it cannot be written, or it lies on a network file system.
        FormatError: a stored line is damaged.
    """

    def __init__(self, path: Path, config: SearchConfig) -> None:
        self.path = path
        kind = network_filesystem(path)
        if kind:
            raise DeepthinError(
                f"{path}: lies on a network file system ({kind}), where journals tear and locks are not kept; "
                f"choose an --out on a local disk"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._check_owner(path)
            self._lock = _locked(path / LOCK)
        except OSError as error:
            why = error.strerror or error
            raise DeepthinError(f"{path}: the run folder cannot be used ({why}); choose another --out") from error
        try:
            self._settle(config)
            for name in (JOURNAL, MEASUREMENTS):
                _drop_torn_line(path / name)
            self._repeats: dict[tuple[str, int], Cost] = {}
            self._measured, self._failed = self._read_measurements()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    @property
    def journal(self) -> Path:
        """Where the study is kept."""
        return self.path / JOURNAL

    @property
    def num_measured(self) -> int:
        """Shapes with a stored measurement."""
        return len(self._measured)

    def measured(self, key: str) -> Cost | None:
        """The stored cost of a candidate, if there is one."""
        return self._measured.get(key)

    def failed(self, key: str) -> str | None:
        """Why measuring a candidate failed, if it did."""
        return self._failed.get(key)

    def store_measured(self, key: str, cost: Cost) -> Cost:
        """Append a cost; what is returned is what a later run will read."""
        self._append({"key": key, "cost": cost.to_json()})
        self._measured[key] = cost
        return cost

    def repeated(self, key: str, number: int) -> Cost | None:
        """The stored ``number``-th repeat (from 1) of measuring a candidate, if there is one."""
        return self._repeats.get((key, number))

    def store_repeat(self, key: str, number: int, cost: Cost) -> Cost:
        """Append the ``number``-th repeat of measuring a candidate."""
        self._append({"key": key, "repeat": number, "cost": cost.to_json()})
        self._repeats[key, number] = cost
        return cost

    def store_failed(self, key: str, why: str) -> None:
        """Append a failure, so that a resumed run does not try again."""
        self._append({"key": key, "failed": why})
        self._failed[key] = why

    def write_front(self, document: Mapping[str, Any]) -> Path:
        """Write ``front.json`` whole and return its path."""
        path = self.path / FRONT
        _write_json(path, document)
        return path

    def write_storage(self, document: Mapping[str, Any]) -> None:
        """Write ``storage.json``: where the study is kept instead of in the journal. Holds no credentials."""
        _write_json(self.path / STORAGE, document)

    def _check_owner(self, path: Path) -> None:
        names = {entry.name for entry in path.iterdir()}
        strangers = sorted(names - {LOCK, CONFIG + _TEMPORARY})
        if strangers and CONFIG not in names:
            raise UsageError(
                f"{path}: holds {strangers[0]!r} but no {CONFIG}, so it is no run folder; "
                f"choose another --out or an empty folder"
            )

    def _settle(self, config: SearchConfig) -> None:
        path, wanted = self.path / CONFIG, config.to_json()
        if not path.exists():
            _write_json(path, wanted)
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(f"{path}: is no JSON ({error}); {_START_OVER}") from error
        if not isinstance(found, dict):
            raise FormatError(f"{path}: holds no JSON object; {_START_OVER}")
        differing = [key for key in dict.fromkeys([*wanted, *found]) if found.get(key) != wanted.get(key)]
        if differing:
            parts = [f"{key} {_shown(found.get(key))}, not {_shown(wanted.get(key))}" for key in differing]
            raise UsageError(
                f"{self.path}: holds a search with other settings: {'; '.join(parts)}. "
                f"Choose another --out, or repeat the settings of {CONFIG} to resume it"
            )

    def _read_measurements(self) -> tuple[dict[str, Cost], dict[str, str]]:
        path = self.path / MEASUREMENTS
        measured: dict[str, Cost] = {}
        failed: dict[str, str] = {}
        if not path.exists():
            return measured, failed
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = json.loads(line)
                    if "failed" in record:
                        failed[str(record["key"])] = str(record["failed"])
                    elif "repeat" in record:
                        self._repeats[str(record["key"]), int(record["repeat"])] = Cost.from_json(record["cost"])
                    else:
                        measured[str(record["key"])] = Cost.from_json(record["cost"])
                except (ValueError, KeyError, TypeError, FormatError) as error:
                    raise FormatError(
                        f"{path}: line {number} is damaged ({error}); remove that line to have the shape measured again"
                    ) from error
        return measured, failed

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with (self.path / MEASUREMENTS).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = path.with_name(path.name + _TEMPORARY)
    with temporary.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of its last line; every reader wants whole lines."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)


def _locked(path: Path) -> int:
    """An open descriptor that holds the folder's lock until it is closed or the process ends."""
    descriptor = try_lock(path)
    if descriptor is None:
        raise DeepthinError(
            f"{path.parent}: another search is running in this folder; wait for it to end, or choose another --out"
        )
    return descriptor


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
