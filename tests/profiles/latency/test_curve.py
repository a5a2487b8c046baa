import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import FormatError, UsageError
from deepthin.profiles.latency.curve import BandwidthCurve, BandwidthPoint, flat_curve, hats, interpolate

CURVE = BandwidthCurve((BandwidthPoint(1, 1 << 20, 6e10), BandwidthPoint(1, 1 << 24, 2e10), BandwidthPoint(2, 1 << 20, 9e10)))


def test_rates_are_exact_at_measured_sizes_and_log_linear_between() -> None:
    assert CURVE.rate(1, 1 << 20) == pytest.approx(6e10)
    assert CURVE.rate(1, 1 << 22) == pytest.approx((6e10 * 2e10) ** 0.5)


def test_beyond_the_ends_the_nearest_rate_holds() -> None:
    assert CURVE.rate(1, 1) == pytest.approx(6e10)
    assert CURVE.rate(1, 1 << 40) == pytest.approx(2e10)
    assert flat_curve(1e10).rate(1, 123) == pytest.approx(1e10)


def test_a_thread_count_without_points_is_refused() -> None:
    with pytest.raises(UsageError, match="at 4 threads was not measured; known thread counts are 1, 2"):
        CURVE.rate(4, 1000)


def test_json_round_trip() -> None:
    assert BandwidthCurve.from_json(CURVE.to_json()) == CURVE


@pytest.mark.parametrize("bad", [{"threads": 0}, {"num_bytes": 0}, {"bytes_per_s": 0.0}, {"bytes_per_s": float("inf")}])
def test_damaged_points_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(FormatError, match="must be positive"):
        BandwidthCurve.from_json([{"threads": 1, "num_bytes": 8, "bytes_per_s": 1.0, **bad}])


def test_no_list_is_refused() -> None:
    with pytest.raises(FormatError, match="a list of points is needed"):
        BandwidthCurve.from_json({"threads": 1})


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.floats(-3, 12), st.lists(st.floats(0, 9), min_size=1, max_size=6, unique=True))
def test_hats_add_up_to_one_and_interpolate(x: float, knots: list[float]) -> None:
    knots = sorted(knots)
    weights = hats(x, knots)
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) >= 0
    values = [k * k for k in knots]
    assert sum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx(interpolate(x, knots, values))
