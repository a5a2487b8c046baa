from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import UsageError
from deepthin.profiles.statistics import composed, drift, measured, median, median_interval, paired_ratio

SAMPLES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(SAMPLES)
def test_interval_holds_the_median_and_stays_inside_the_range(samples: list[float]) -> None:
    low, high = median_interval(samples)
    assert min(samples) <= low <= median(samples) <= high <= max(samples)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(SAMPLES, st.permutations(range(30)))
def test_interval_ignores_the_order_of_samples(samples: list[float], order: list[int]) -> None:
    shuffled = [samples[i] for i in order if i < len(samples)]
    assert median_interval(shuffled) == median_interval(samples)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(SAMPLES, st.sampled_from([0.25, 2.0, 1024.0]))
def test_interval_scales_with_the_unit(samples: list[float], factor: float) -> None:
    low, high = median_interval(samples)
    assert median_interval([x * factor for x in samples]) == (low * factor, high * factor)


def test_same_seed_same_interval() -> None:
    samples = [float(x) for x in np.random.Generator(np.random.PCG64(3)).gamma(2.0, size=25)]
    assert measured(samples, "s", seed=1) == measured(samples, "s", seed=1)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 11, 15, 21])
def test_interval_covers_the_true_median_often_enough(n: int) -> None:
    rng = np.random.Generator(np.random.PCG64([7, n]))
    trials = 400
    hits = 0
    for _ in range(trials):
        low, high = median_interval([float(x) for x in np.exp(rng.standard_normal(n))])  # true median 1, skewed
        hits += low <= 1.0 <= high
    assert hits / trials >= 0.93  # 95 % less three standard errors of the trial count


def test_few_samples_give_their_whole_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([5.0]) == (5.0, 5.0)


def test_one_outlier_among_eleven_does_not_widen_the_interval() -> None:
    steady = [1.0 + i * 1e-3 for i in range(10)]
    assert median_interval([*steady, 50.0])[1] < 1.02


def test_equal_things_rarely_differ_and_common_noise_cancels() -> None:
    rng = np.random.Generator(np.random.PCG64(11))
    trials, significant = 300, 0
    for _ in range(trials):
        machine = np.exp(np.cumsum(rng.normal(0, 0.1, 11)))  # a machine that wanders far more than the sides differ
        left = machine * np.exp(rng.normal(0, 0.01, 11))
        right = machine * np.exp(rng.normal(0, 0.01, 11))
        ratio = paired_ratio(list(left), list(right))
        significant += not ratio.ci_low <= 1.0 <= ratio.ci_high
        assert ratio.relative_width < 0.06
    assert significant / trials <= 0.05


def test_paired_ratio_by_hand() -> None:
    ratio = paired_ratio([2.0, 6.0, 8.0], [1.0, 2.0, 2.0])
    assert (ratio.median, ratio.ci_low, ratio.ci_high, ratio.unit) == (3.0, 2.0, 4.0, "ratio")
    assert ratio.samples == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [([1.0], [1.0, 2.0], "1 samples against 2"), ([0.0], [1.0], "zero or negative"), ([], [], "no samples")],
)
def test_paired_ratio_refuses_what_is_no_pair(left: list[float], right: list[float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        paired_ratio(left, right)


def test_median_refuses_nan() -> None:
    with pytest.raises(UsageError, match="not finite"):
        median([1.0, float("nan")])


@settings(max_examples=40, derandomize=True, deadline=None)
@given(SAMPLES, SAMPLES, st.integers(1, 60))
def test_composed_is_the_weighted_sum_of_medians(block: list[float], head: list[float], layers: int) -> None:
    parts = [(float(layers), measured(block, "s")), (1.0, measured(head, "s"))]
    total = composed(parts)
    assert total.median == pytest.approx(layers * median(block) + median(head), rel=1e-12)
    slack = 1 + 1e-12
    assert total.ci_low * slack >= layers * min(block) + min(head) - 1e-9 * total.median
    assert total.ci_high <= (layers * max(block) + max(head)) * slack
    assert total == composed(parts)


def test_composed_interval_grows_with_the_weight_of_an_uncertain_part() -> None:
    sure = measured([1.0] * 9, "s")
    unsure = measured([1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.01, 0.99], "s")
    widths = [(lambda m: m.ci_high - m.ci_low)(composed([(1.0, sure), (weight, unsure)])) for weight in (1.0, 10.0)]
    assert widths[1] == pytest.approx(10 * widths[0])


def test_composed_refuses_mixed_units() -> None:
    with pytest.raises(UsageError, match="same one"):
        composed([(1.0, measured([1.0], "s")), (1.0, measured([1.0], "tok/s"))])
    with pytest.raises(UsageError, match="none"):
        composed([])


def test_drift_compares_thirds() -> None:
    assert drift([1.0, 1.0, 5.0, 0.0, 1.1, 1.1]) == pytest.approx(0.1)
    assert drift([1.0, 2.0, 3.0]) == 0.0
    assert drift([0.0] * 9) == 0.0


@pytest.mark.parametrize("n", [1023, 1024, 1100, 3000])
def test_long_sessions_have_intervals_too(n: int) -> None:
    low, high = median_interval([float(x) for x in range(n)])
    assert low < (n - 1) / 2 < high
    assert high - low == pytest.approx(1.96 * math.sqrt(n), rel=0.1)  # sd of the rank of the median is sqrt(n) / 2
