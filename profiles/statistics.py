"""Medians with intervals, ratios of interleaved pairs, and sums of measured parts. Pure functions of samples; seeded.

    n samples    R resamples    P parts

Every interval is 95 %: the seeded bootstrap interval of the median, widened to the order-statistic (sign-test) interval
where that is wider. The bootstrap alone holds the true median too rarely for few samples (88 % of cases at n = 7),
and a benchmark that finds differences between equal things is worse than one that finds none.
Source: order statistics as in David & Nagaraja, Order Statistics, 3rd ed., section 7.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deepthin.engine.arrays import F64
from deepthin.engine.errors import UsageError
from deepthin.profiles.schema import Measured

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
NUM_COMPOSED = 99  # samples kept of a composed value; the raw ones stay with the parts


def median(samples: Sequence[float]) -> float:
    """Median of ``samples``.

    Raises:
        UsageError: there are none, or one is not finite.
    """
    return float(np.median(_checked(samples)))


def median_interval(samples: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval (low, high) of the median of ``samples``; it always holds the median itself.

    Below six samples no interval reaches 95 %; the whole range is returned, which covers 1 - 2**(1 - n) of cases.

    Raises:
        UsageError: there are no samples, or one is not finite.
    """
    values = np.sort(_checked(samples))
    n = len(values)
    rank = _sign_test_rank(n)
    medians = np.median(values[_resample_indices(n, seed)], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return min(float(low), float(values[rank])), max(float(high), float(values[n - 1 - rank]))


def measured(samples: Sequence[float], unit: str, *, seed: int = 0) -> Measured:
    """``samples`` with median and interval.

    Raises:
        UsageError: there are no samples, or one is not finite.
    """
    low, high = median_interval(samples, seed=seed)
    return Measured(median(samples), low, high, len(samples), unit, tuple(float(x) for x in samples))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Measured:
    """Median over rounds of ``numerators[i] / denominators[i]``, where both were timed in round i.

    Whatever slows both sides of a round (clock, neighbours) cancels before the median is taken.

    Raises:
        UsageError: the lengths differ, there are no pairs, or a value is not above zero.
    """
    above, below = _checked(numerators), _checked(denominators)
    if len(above) != len(below):
        raise UsageError(f"paired ratio: {len(above)} samples against {len(below)}; pairs need one of each per round")
    if (above <= 0).any() or (below <= 0).any():
        raise UsageError(
            "paired ratio: a sample is zero or negative, but times and rates are above zero; is the clock too coarse?"
        )
    return measured([float(x) for x in above / below], "ratio", seed=seed)


def composed(parts: Sequence[tuple[float, Measured]], *, seed: int = 0) -> Measured:
    """Sum over parts of weight x part, each part being known only through its samples.

    The median is the weighted sum of part medians; the interval comes from sums of resampled medians, widened by the
    parts' own intervals added in quadrature (they were measured independently). ``NUM_COMPOSED`` of the sums are
    kept as samples.

    Raises:
        UsageError: there are no parts or their units differ.
    """
    units = sorted({part.unit for _, part in parts})
    if len(units) != 1:
        raise UsageError(f"sum of measured parts: units {units or 'none'}; all parts need the same one")
    centre = math.fsum(weight * part.median for weight, part in parts)
    sums = np.full(NUM_RESAMPLES, 0.0)
    for index, (weight, part) in enumerate(parts):
        values = np.asarray(part.samples, np.float64)
        sums += weight * np.median(values[_resample_indices(len(values), seed + index)], axis=1)
    below = math.sqrt(math.fsum((weight * (part.median - part.ci_low)) ** 2 for weight, part in parts))
    above = math.sqrt(math.fsum((weight * (part.ci_high - part.median)) ** 2 for weight, part in parts))
    low, high = (float(x) for x in np.quantile(sums, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))
    kept = tuple(float(x) for x in sums[:NUM_COMPOSED])
    return Measured(centre, min(low, centre - below), max(high, centre + above), NUM_COMPOSED, units[0], kept)


def drift(samples: Sequence[float]) -> float:
    """Median of the last third over median of the first third, minus 1; 0 for fewer than six samples.

    Raises:
        UsageError: there are no samples, or one is not finite.
    """
    values = _checked(samples)
    third = len(values) // 3
    if third < 2:
        return 0.0
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    return last / first - 1 if first else 0.0


def _checked(samples: Sequence[float]) -> F64:
    values = np.asarray(samples, np.float64)
    if values.size == 0:
        raise UsageError("statistics: no samples; measure at least once")
    if not np.isfinite(values).all():
        raise UsageError("statistics: a sample is not finite; the clock or the measured function is broken")
    return values


def _resample_indices(n: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """i64 [R, n] of 0..n-1, the same for the same n and seed."""
    return np.random.Generator(np.random.PCG64([seed, n])).integers(0, n, (NUM_RESAMPLES, n))


def _sign_test_rank(n: int) -> int:
    """Largest k such that [x(k), x(n-1-k)] (0-based order statistics) holds the true median in 95 % of cases, else 0."""
    tail, k = 0.0, 0
    for below in range(n // 2):
        tail += math.comb(n, below) / (1 << n)  # of whole numbers, since neither fits a float beyond 1023 samples
        if 2 * tail > 1 - CONFIDENCE:
            break
        k = below
    return k
