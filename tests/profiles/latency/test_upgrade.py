"""Profiles from before attention by head size, starts of layers and rows, and more knots: they load and predict as they did."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepthin.engine.errors import FormatError
from deepthin.engine.shape import Shape
from deepthin.profiles.latency.model import LatencyModel, fit_model
from deepthin.profiles.latency.regression import CORNER, SHARP_CORNER, Fitted
from deepthin.profiles.latency.upgrade import upgraded
from deepthin.profiles.latency.workload import DECODE, PREFILL, Workload
from deepthin.profiles.profile import read_profile
from tests.support.probed import CURVE, Device, conditions, decode_works

STARTS = r"row|row_.*|head_call|kv_call|chunk|uneven|lone|cache_at_.*|share_at_(12|24)"
OLD = Path(__file__).parents[3] / "benchmarks" / "results" / "amd-epyc-2cpu-avx2" / "search-profile.json"


@pytest.mark.parametrize(
    ("shape", "quant", "test", "tokens", "context", "seconds", "low", "high"),
    [  # as deepthin predicted at cc1970b, which wrote the file
        ("L=12,d=256,heads=4,kv=2,ff=768,vocab=8192,tied", "q4_0", DECODE, 1, 512, 0.000465984009, 0.000354941, 0.000611767),
        ("L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied", "q8_0", DECODE, 1, 512, 0.00913611897, 0.00706483, 0.0118147),
        ("L=24,d=1024,heads=16,kv=2,ff=2816,vocab=32000,tied", "q4_0", DECODE, 1, 0, 0.012025658, 0.0092492, 0.0156356),
        ("L=30,d=576,heads=9,kv=3,ff=1536,vocab=49152,tied", "q8_0", PREFILL, 128, 0, 0.220130783, 0.134325, 0.360748),
    ],
)
def test_a_profile_of_an_earlier_version_predicts_what_it_did(
    shape: str, quant: str, test: str, tokens: int, context: int, seconds: float, low: float, high: float
) -> None:
    work = Workload(Shape.parse(shape), quant, test, tokens, context)
    predicted = read_profile(OLD).predict("deepthin", 2, work).seconds
    assert (predicted.value, predicted.low, predicted.high) == pytest.approx((seconds, low, high), rel=1e-5)


def model() -> LatencyModel:
    where = conditions()
    return fit_model(Device(where, noise=0.02).probes(decode_works(12)), where, DECODE)


def without(fitted: Fitted, pattern: str) -> Fitted:
    kept = [i for i, name in enumerate(fitted.names) if not re.fullmatch(pattern, name)]
    return replace(
        fitted,
        names=tuple(fitted.names[i] for i in kept),
        theta=fitted.theta[kept],
        covariance=fitted.covariance[np.ix_(kept, kept)],
    )


def test_a_model_that_lacks_nothing_stays_what_it_is() -> None:
    fitted = model().fitted
    assert upgraded(fitted) is fitted


def test_a_profile_from_before_rows_and_heads_predicts_what_it_did() -> None:
    """Utilisation at 12 and 24 MiB was interpolated; its values there are those that interpolation gave."""
    fitted = model().fitted
    again = upgraded(without(fitted, STARTS))
    assert set(again.names) == set(fitted.names)
    share = again.value("share_at_8")[0] ** np.log2(16 / 12) * again.value("share_at_16")[0] ** np.log2(12 / 8)
    assert again.value("share_at_12")[0] == pytest.approx(share)
    assert again.value("row")[0] < 1e-15
    assert again.value("uneven") == again.value("cache_at_32") == (1, 1, 1)


def test_new_knots_lie_between_their_neighbours_and_the_rest_is_pinned() -> None:
    fitted = model().fitted
    again = upgraded(without(fitted, rf"{STARTS}|rows_.|dim_.*|cold_.*|share_at_(64|512)"))
    assert set(again.names) == set(fitted.names)
    middle = np.sqrt(again.value("share_at_32")[0] * again.value("share_at_128")[0])
    assert again.value("share_at_64")[0] == pytest.approx(middle)
    assert again.value("share_at_512") == pytest.approx(again.value("share_at_128"))
    assert again.value("rows_3") == pytest.approx((3, 3, 3))
    assert again.value("dim_32") == again.value("cold_at_32") == (1, 1, 1)


def test_a_model_keeps_the_corner_that_it_was_fitted_with() -> None:
    """Stored models from before the corner was stored had a sharp one."""
    document = model().to_json()
    assert LatencyModel.from_json(document, CURVE).fitted.corner == CORNER
    del document["fitted"]["corner"]
    assert LatencyModel.from_json(document, CURVE).fitted.corner == SHARP_CORNER
    for damaged in (0.0, -1.5):
        document["fitted"]["corner"] = damaged
        with pytest.raises(FormatError, match=r"corner is .* at least 1"):
            LatencyModel.from_json(document, CURVE)


def test_a_model_that_lacks_anything_else_is_refused() -> None:
    document = model().to_json()
    document["fitted"] = without(model().fitted, "overhead").to_json()
    with pytest.raises(FormatError, match="its unknowns are not those of this version"):
        LatencyModel.from_json(document, CURVE)
