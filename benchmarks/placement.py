"""Which measurement to take next while the host of a virtual machine moves its CPUs about (``BarrierSentinel``)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deepthin.profiles.contention import BarrierSentinel, has_moved

AWAY_S = 0.5  # between looks whether cores are back
PATIENCE_S = 90.0  # for them, when nothing else is left to measure
Job = TypeVar("Job")


def in_turn(jobs: Mapping[str, Job], budget_s: float, reference_s: Callable[[str], float | None]) -> Iterator[tuple[str, Job]]:
    """Key and value of each of ``jobs``, as :func:`next_key` picks them, until ``budget_s`` seconds are over; says so."""
    left, start = dict(jobs), time.perf_counter()
    while left:
        spent = time.perf_counter() - start
        if spent > budget_s:
            print(f"time is up with {len(left)} to go; run again to continue", file=sys.stderr)
            return
        key = next_key(left, reference_s)
        print(f"[{spent:4.0f} s] {key}", file=sys.stderr)
        yield key, left.pop(key)


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add ``line`` to the JSON lines in ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def next_key(keys: Iterable[str], reference_s: Callable[[str], float | None]) -> str:
    """The first of ``keys`` whose cores are as far apart as they should be; without one they are waited for, and then not.

    Args:
        keys: of what is left to measure; each ends in its number of threads.
        reference_s: key -> seconds of a barrier where it belongs, None where any will do; later timings are held to it.
    """
    left = list(keys)
    end = time.perf_counter() + PATIENCE_S
    while True:
        away: dict[tuple[int, float], bool] = {}
        for key in left:
            threads, wanted = key.rpartition(" ")[2], reference_s(key)
            if wanted is None:
                return key
            place = int(threads), wanted
            if place not in away:
                away[place] = has_moved(BarrierSentinel(place[0])(), wanted)
            if not away[place]:
                BarrierSentinel.reference_s[place[0]] = wanted
                return key
        if time.perf_counter() > end:
            return left[0]
        time.sleep(AWAY_S)
