"""Speed over time under steady load: what a token costs once the machine is warm, against the first seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from deepthin.engine.errors import UsageError
from deepthin.profiles.protocol import Subject
from deepthin.profiles.statistics import measured, median

SLICE_S = 0.5
THROTTLED = 0.95  # a last third slower than this share of the first is throttling, not noise
_MIN_SLICES = 6


def sustained(
    subject: Subject, seconds: float, *, clock: Callable[[], float] = time.perf_counter, reading: str = "seconds"
) -> dict[str, Any]:
    """Repeat ``subject`` for ``seconds`` without a pause and compare the last third with the first.

    Returns:
        ``wall_s``, ``slices`` (seconds per call, the median of each half second), ``factor`` (a measured ratio: speed
        of the last third over that of the first, slice by slice), ``throttles``, and ``time_to_floor_s`` (when
        speed first fell below :data:`THROTTLED`, or None).

    Raises:
        UsageError: there is no time for six slices.
    """
    if seconds < _MIN_SLICES * SLICE_S:
        raise UsageError(f"sustained speed needs at least {_MIN_SLICES * SLICE_S:g} s, not {seconds:g}")
    start = clock()
    slices: list[float] = []
    ends: list[float] = []
    while clock() - start < seconds or len(slices) < _MIN_SLICES:
        begin = clock()
        taken: list[float] = []
        while not taken or clock() - begin < SLICE_S:
            taken.append(subject()[reading])
        slices.append(median(taken))
        ends.append(clock() - start)
    third = len(slices) // 3
    first, last = slices[:third], slices[-third:]
    factor = measured([a / b for a, b in zip(first, last, strict=True)], "ratio")
    return {
        "wall_s": clock() - start,
        "slices": slices,
        "factor": factor.to_json(),
        "throttles": factor.median < THROTTLED,
        "time_to_floor_s": _first_slow(slices, ends, median(first)),
    }


def _first_slow(slices: Sequence[float], ends: Sequence[float], normal: float) -> float | None:
    """When two slices in a row were slower than throttling allows; one alone is a disturbance."""
    slow = [value > normal / THROTTLED for value in slices]
    return next((ends[i] for i in range(len(slow) - 1) if slow[i] and slow[i + 1]), None)
