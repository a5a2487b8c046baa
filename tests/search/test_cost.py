from __future__ import annotations

from typing import Any

import pytest

from deepthin.engine.errors import FormatError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import Measured
from deepthin.search.cost import Cost, Timing, pooled
from tests.support.fake_costs import fake_cost

SHAPE = Shape.parse("L=3,d=64,heads=2,ff=96,vocab=100,tied")


def test_measured_costs_keep_their_samples() -> None:
    token_cost = fake_cost(SHAPE, "q4_0")
    assert isinstance(token_cost.seconds_per_token, Measured)
    cost = Cost.of(token_cost)
    assert (cost.decode.value, cost.decode.basis) == (token_cost.seconds_per_token.median, "measured")
    assert cost.decode.samples == token_cost.seconds_per_token.samples
    assert Cost.of(cost) is cost
    assert Cost.from_json(cost.to_json()) == cost
    assert cost.decode.scaled(1e3, "ms").to_json()["unit"] == "ms"


@pytest.mark.parametrize("basis", ["predicted", "published"])
def test_predicted_costs_come_back_as_predicted(basis: str) -> None:
    time = Timing(0.002, 0.001, 0.003, basis=basis)
    cost = Cost(time, 2, 512, 1000, first_token=time.scaled(100, "s"), prompt=256, flags=("extrapolated",))
    assert Cost.from_json(cost.to_json()) == cost
    assert Timing.of(time) == time
    assert set(time.to_json()) == {"value", "low", "high", "unit", "basis"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flags": "x"}, "flags is str"),
        ({"prompt": 1.5}, "prompt"),
        ({"decode": {"value": 1.0, "low": 2.0, "high": 3.0, "unit": "s", "basis": "predicted"}}, "does not hold 1.0"),
        ({"decode": {"value": 1.0, "low": 0.5, "high": 3.0, "unit": "s", "basis": "guessed"}}, "basis 'guessed' is unknown"),
    ],
)
def test_damaged_costs_are_refused(changes: dict[str, Any], message: str) -> None:
    document = Cost.of(fake_cost(SHAPE, "q4_0")).to_json() | changes
    with pytest.raises(FormatError, match=message):
        Cost.from_json(document)


def test_pooled_times_weigh_precision_and_widen_on_contradiction() -> None:
    rough, sharp = Timing(1.10, 1.0, 1.21, samples=(1.0, 1.21)), Timing(1.0, 0.99, 1.01, samples=(1.0,))
    both = pooled([rough, sharp])
    assert 1.0 < both.value < 1.01
    assert both.samples == (1.0, 1.21, 1.0)
    agreeing = pooled([sharp, sharp])
    assert agreeing.high - agreeing.low == pytest.approx(0.02 / 2**0.5, rel=0.01)
    contradicting = pooled([sharp, Timing(1.2, 1.19, 1.21)])
    assert contradicting.low < 1.01
    assert contradicting.high > 1.19
    assert Timing.from_json(both.to_json()) == both
