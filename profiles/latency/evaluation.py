"""How far predictions are off from what was measured: relative errors, ranks, and whether intervals hold what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepthin.engine.arrays import F64
from deepthin.engine.errors import UsageError
from deepthin.profiles.latency.model import LatencyModel
from deepthin.profiles.latency.probe import Probe
from deepthin.profiles.latency.workload import Workload
from deepthin.profiles.schema import Predicted

REGIMES = ("cache", "edge", "memory")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One held-out workload: what a model that never saw it says, and what was measured.

    Attributes:
        probe: the measurement.
        predicted: seconds with their interval.
        is_extrapolated: whether the model says it lies outside its probes.
    """

    probe: Probe
    predicted: Predicted
    is_extrapolated: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted.value / self.probe.seconds.median - 1.0

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.predicted.low <= self.probe.seconds.median <= self.predicted.high


def compare(model: LatencyModel, held_out: Sequence[Probe]) -> list[Comparison]:
    """``model`` against those of ``held_out`` that are of its runtime, threads and test."""
    where = model.conditions
    found = []
    for probe in held_out:
        if (probe.runtime, probe.threads, probe.work.test) == (where.runtime.name, where.threads, model.test):
            prediction = model.predict(probe.work)
            found.append(Comparison(probe, prediction.seconds, bool(prediction.extrapolated)))
    return found


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Figures of merit of many comparisons.

    Returns:
        ``n``, relative errors ``median``, ``p90``, ``max``, ``bias`` (signed median), shares ``within_10`` and ``within_15``,
        ``spearman`` (None for fewer than three), ``coverage`` of the 90 % intervals, ``extrapolated``.

    Raises:
        UsageError: there is nothing to summarise.
    """
    if not comparisons:
        raise UsageError("prediction errors: nothing was compared; measure some held-out shapes first")
    signed = np.array([one.error for one in comparisons], np.float64)
    errors = np.abs(signed)
    return {
        "n": len(errors),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "max": float(errors.max()),
        "bias": float(np.median(signed)),
        "within_10": float((errors <= 0.10).mean()),
        "within_15": float((errors <= 0.15).mean()),
        "spearman": spearman([one.predicted.value for one in comparisons], [one.probe.seconds.median for one in comparisons]),
        "coverage": float(np.mean([one.is_inside for one in comparisons])),
        "extrapolated": sum(one.is_extrapolated for one in comparisons),
    }


def noise_floor(first: Sequence[Probe], second: Sequence[Probe]) -> dict[str, float] | None:
    """Relative change of what was measured twice, minutes apart: no prediction can be judged more finely.

    Returns:
        ``n``, ``median``, ``p90`` and ``max`` of |second / first - 1|, or None when nothing was measured twice.
    """
    before = {_key(probe): probe.seconds.median for probe in first}
    changes = [abs(probe.seconds.median / before[_key(probe)] - 1) for probe in second if _key(probe) in before]
    if not changes:
        return None
    return {
        "n": len(changes),
        "median": float(np.median(changes)),
        "p90": float(np.quantile(changes, 0.9)),
        "max": float(max(changes)),
    }


def regime(work: Workload, cache_bytes: int) -> str:
    """Where a working set lies: well inside the last-level cache, around it, or beyond three times it."""
    held = work.body_bytes + work.head_bytes
    if held < cache_bytes / 2:
        return REGIMES[0]
    return REGIMES[1] if held < 3 * cache_bytes else REGIMES[2]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, ties sharing their mean rank; None for fewer than three pairs or when one side is constant."""
    if len(a) < 3:
        return None
    ranks = [_ranks(values) for values in (a, b)]
    if min(float(np.ptp(one)) for one in ranks) == 0:
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Sequence[float]) -> F64:
    array = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means = (ends - counts + ends - 1) / 2
    ranks: F64 = means[inverse]
    return ranks


def _key(probe: Probe) -> tuple[str, int, Workload]:
    return probe.runtime, probe.threads, probe.work
