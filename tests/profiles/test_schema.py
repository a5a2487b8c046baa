from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepthin.engine.errors import FormatError
from deepthin.profiles.schema import Measured, TokenCost


def seconds(value: float = 1e-3) -> Measured:
    return Measured(value, value * 0.99, value * 1.01, 2, "s", (value * 0.99, value * 1.01))


def cost(**changes: Any) -> TokenCost:
    fields: dict[str, Any] = {
        "seconds_per_token": seconds(4e-3),
        "block_s": seconds(1e-4),
        "head_s": seconds(),
        "embed_s": seconds(1e-6),
        "overhead_s": seconds(1e-5),
        "bytes_per_token": 90_000_000,
        "threads": 2,
        "context": 512,
        "quant": "q4_0",
        "measured_now": True,
        "flags": ("wide-interval",),
    }
    return TokenCost(**(fields | changes))


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9))
def test_measured_survives_json_bit_for_bit(samples: list[float]) -> None:
    measured = Measured(sorted(samples)[len(samples) // 2], min(samples), max(samples), len(samples), "s", tuple(samples))
    assert Measured.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_token_cost_survives_json() -> None:
    assert TokenCost.from_json(json.loads(json.dumps(cost().to_json()))) == cost()


def test_relative_width() -> None:
    assert Measured(100.0, 99.0, 102.0, 1, "s", (100.0,)).relative_width == pytest.approx(0.03)
    assert Measured(0.0, 0.0, 0.0, 1, "s", (0.0,)).relative_width == 0.0
    assert Measured(0.0, 0.0, 1.0, 1, "s", (0.0,)).relative_width == math.inf


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((math.nan, 0.0, 1.0, 1, "s", (1.0,)), "not finite"),
        ((1.0, 0.5, 1.5, 1, "s", (math.inf,)), "not finite"),
        ((2.0, 0.5, 1.5, 1, "s", (1.0,)), "does not hold the median"),
        ((1.0, 0.5, 1.5, 2, "s", (1.0,)), "n is 2 but 1 samples"),
        ((1.0, 0.5, 1.5, 0, "s", ()), "at least one"),
    ],
)
def test_measured_refuses_contradictions(fields: tuple[Any, ...], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        Measured(*fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"median": "1"}, "median is '1', but a number"),
        ({"median": True}, "a number"),
        ({"n": 2.0}, "an integer"),
        ({"unit": 3}, "a text"),
        ({"samples": 3}, "a list of numbers"),
        ({"samples": ["x", 1.0]}, "a number"),
        ({"colour": 1}, "'colour' is unknown"),
    ],
)
def test_measured_from_json_is_strict(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        Measured.from_json(seconds().to_json() | change)


def test_from_json_names_what_is_missing() -> None:
    document = seconds().to_json()
    del document["ci_low"]
    with pytest.raises(FormatError, match="'ci_low' is missing"):
        Measured.from_json(document)
    with pytest.raises(FormatError, match="found list"):
        Measured.from_json([1.0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"measured_now": 1}, "true or false"),
        ({"flags": "drift"}, "a list of texts"),
        ({"flags": [1]}, "a text"),
        ({"threads": 1.5}, "an integer"),
        ({"block_s": 1e-3}, "JSON object"),
        ({"quant": None}, "a text"),
    ],
)
def test_token_cost_from_json_is_strict(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        TokenCost.from_json(cost().to_json() | change)


def test_token_cost_refuses_other_units_and_negative_counts() -> None:
    with pytest.raises(FormatError, match="block_s is in 'ms'"):
        cost(block_s=Measured(1.0, 1.0, 1.0, 1, "ms", (1.0,)))
    with pytest.raises(FormatError, match="bytes_per_token is -1"):
        cost(bytes_per_token=-1)
