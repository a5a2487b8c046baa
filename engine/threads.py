"""How many threads decode a plan fastest here: measured once on the plan itself, remembered, and told.

Counts go up to the big cores (``engine/cores.py``). More is not always faster: beyond what the memory can feed, each thread
adds only waiting. A measurement that other work disturbed decides for now but is not remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPIRY_S = 30 * 86400.0
BUDGET_S = 0.25  # no further round begins after this
ROUNDS = 5
TIE = 1.03  # a count that is this close to the fastest and smaller is taken
STEADY = 1.15  # the two fastest rounds of a count lie within this factor unless something disturbed it
_SCHEMA = "deepthin/threads/1"


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads and why.

    Attributes:
        threads: the number.
        basis: ``given`` by the caller, ``only`` one possible, ``measured`` now, or ``stored`` from an earlier measurement.
        seconds: of one token by number of threads, where measured.
        disturbed: whether other work ran beside the measurement, so that it was not stored.
    """

    threads: int
    basis: str
    seconds: Mapping[int, float] = field(default_factory=dict)
    disturbed: bool = False

    @property
    def text(self) -> str:
        """Such as ``2 threads (measured: 1: 5.1 ms, 2: 3.4 ms)``."""
        noun = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if not self.seconds:
            return noun
        times = ", ".join(f"{count}: {seconds * 1e3:.1f} ms" for count, seconds in sorted(self.seconds.items()))
        how = {"stored": "measured before"}.get(self.basis, "measured beside other work" if self.disturbed else "measured")
        return f"{noun} ({how}: {times})"

    def to_json(self) -> dict[str, Any]:
        """For documents: ``threads``, ``basis``, ``disturbed``, and ``ms_per_token`` by number of threads."""
        times = {str(count): seconds * 1e3 for count, seconds in sorted(self.seconds.items())}
        return {"threads": self.threads, "basis": self.basis, "disturbed": self.disturbed, "ms_per_token": times}


@dataclass(frozen=True, slots=True)
class Step:
    """One token: its seconds, and whether a thread was seen to lose its core meanwhile."""

    seconds: float
    lost: bool = False


def candidates(most: int) -> list[int]:
    """Counts to try up to ``most``: 1, 2, 3, 4, 6, 8, 12, 16 ... and ``most`` itself."""
    found = {1, most}
    power = 2
    while power <= most:
        found |= {power, power * 3 // 2}
        power *= 2
    return sorted(count for count in found if count <= most)


def measure(step: Callable[[int], Step], counts: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> ThreadChoice:
    """Run tokens on each of ``counts`` threads in turns and choose: the fastest, and among near ties the fewest.

    The fastest token of each count is compared: what disturbs a token only makes it slower. In each turn the first of two
    tokens wakes the threads and is dropped, unless tokens are long. Where other work disturbed the times they say little of
    what will be fastest once it is gone, so then the largest count is taken; ``engine/pace.py`` uses fewer meanwhile.
    """
    start = clock()
    samples: dict[int, list[float]] = {count: [] for count in counts}
    lost = False
    for round_ in range(ROUNDS):
        for count in counts:
            steps = [step(count)]
            if steps[0].seconds < BUDGET_S / 10:
                steps.append(step(count))
            samples[count].append(steps[-1].seconds)
            lost = lost or any(one.lost for one in steps)
        if round_ and clock() - start > BUDGET_S:
            break
    best = {count: min(times) for count, times in samples.items()}
    fastest = min(best.values())
    chosen = min(count for count, seconds in best.items() if seconds <= TIE * fastest)
    disturbed = lost or any(sorted(times)[1] > STEADY * min(times) for times in samples.values() if len(times) > 1)
    return ThreadChoice(max(counts) if disturbed else chosen, "measured", best, disturbed)


def remembered(folder: Path, key: Sequence[Any], most: int, now: float | None = None) -> ThreadChoice | None:
    """The choice stored for ``key``; None where there is none, it is too old, unreadable, or over ``most`` threads."""
    try:
        found = json.loads(_path(folder, key).read_text(encoding="utf-8"))
        age = (time.time() if now is None else now) - float(found["stored_unix_s"])
        seconds = {int(count): float(value) for count, value in found["seconds"].items()}
        threads = int(found["threads"])
        fits = found["schema"] == _SCHEMA and 0 <= age <= EXPIRY_S and 1 <= threads <= most and threads in seconds
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return ThreadChoice(threads, "stored", seconds) if fits else None


def remember(folder: Path, key: Sequence[Any], choice: ThreadChoice, now: float | None = None) -> None:
    """Store ``choice`` for ``key``, whole or not at all, and drop what is too old; a folder that cannot be written is left."""
    now = time.time() if now is None else now
    path = _path(folder, key)
    text = json.dumps({"schema": _SCHEMA, "stored_unix_s": now, "threads": choice.threads, "seconds": dict(choice.seconds)})
    unfinished = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
        for other in folder.iterdir():
            if now - other.stat().st_mtime > EXPIRY_S and other != path:
                other.unlink()


def _path(folder: Path, key: Sequence[Any]) -> Path:
    return folder / f"{hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:20]}.json"
