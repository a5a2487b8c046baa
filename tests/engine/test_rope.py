"""Rotary scaling against the published formulas of transformers, written out apart from the product, and its text forms."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.errors import ShapeError
from deepthin.engine.rope import rope_factors, rope_magnitude, rope_rates, rope_tables, scaling_of_factors
from deepthin.engine.rope_scaling import RopeScaling
from deepthin.engine.shape import Shape


def llama3_by_cases(dim: int, base: float, factor: float, low: float, high: float, context: int) -> list[float]:
    """The three cases of transformers' llama3 function, one pair at a time."""
    out = []
    for i in range(0, dim, 2):
        rate = 1 / base ** (i / dim)
        wavelength = 2 * math.pi / rate
        if wavelength < context / high:
            out.append(rate)
        elif wavelength > context / low:
            out.append(rate / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            out.append((1 - smooth) * rate / factor + smooth * rate)
    return out


def yarn_by_pairs(dim: int, base: float, factor: float, fast: float, slow: float, context: int) -> list[float]:
    """The correction range and ramp of transformers' YaRN function, one pair at a time."""

    def correction(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), dim - 1)
    out = []
    for i in range(dim // 2):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        rate = base ** (-2 * i / dim)
        out.append(rate / factor * ramp + rate * (1 - ramp))
    return out


@pytest.mark.parametrize(("dim", "base", "factor", "context"), [(64, 500000.0, 32.0, 8192), (128, 10000.0, 8.0, 2048)])
def test_llama3_rates_are_those_of_its_three_cases(dim: int, base: float, factor: float, context: int) -> None:
    found = rope_rates(dim, base, RopeScaling("llama3", factor, context))
    np.testing.assert_allclose(found, llama3_by_cases(dim, base, factor, 1.0, 4.0, context), rtol=1e-12)
    assert found[0] == 1.0 and found[-1] == pytest.approx(base ** -(1 - 2 / dim) / factor)


@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_rates_are_those_of_the_published_ramp(fast: float, slow: float) -> None:
    scaling = RopeScaling("yarn", 4.0, 32768, slow, fast)
    np.testing.assert_allclose(rope_rates(128, 1e6, scaling), yarn_by_pairs(128, 1e6, 4.0, fast, slow, 32768), rtol=1e-12)


def test_yarn_multiplies_cosines_and_sines() -> None:
    assert rope_magnitude(RopeScaling("yarn", 4.0, 32)) == pytest.approx(1.1386294361119891)
    assert rope_magnitude(RopeScaling("yarn", 4.0, 32, attention_factor=1.5)) == 1.5
    assert rope_magnitude(RopeScaling("linear", 4.0)) == rope_magnitude(None) == 1.0
    cosine, sine = rope_tables(16, 1e4, RopeScaling("yarn", 4.0, 32, attention_factor=1.5), 3)
    np.testing.assert_allclose(np.hypot(cosine, sine), 1.5, rtol=1e-6)


def test_linear_scaling_divides_positions() -> None:
    plain, slow = rope_tables(16, 1e4, None, 9), rope_tables(16, 1e4, RopeScaling("linear", 4.0), 36)
    np.testing.assert_allclose(slow[0][::4], plain[0], atol=1e-6)


TEXTS = [
    "linear_4",
    "linear_2.5",
    "llama3_8_8192",
    "llama3_8_8192_0.5_4",
    "yarn_4_32768",
    "yarn_4_32768_1.5",
    "yarn_4_32768_1.5_2_16",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_json_read_back(text: str) -> None:
    scaling = RopeScaling.parse(text)
    assert scaling.text == text and RopeScaling.from_json(asdict(scaling)) == scaling
    shape = Shape.parse(f"L=2,d=64,heads=4,ff=64,vocab=10,qkv_bias,nope=4,rope={text}")
    assert Shape.parse(shape.text) == shape == Shape.from_json(shape.to_json())
    assert shape.text.endswith(f"tied,qkv_bias,rope={text},nope=4")


def test_a_shape_without_them_says_nothing_of_later_fields() -> None:
    document = Shape.parse("L=2,d=64,heads=4,ff=64,vocab=10").to_json()
    assert not {"qkv_bias", "nope_every", "rope_scaling"} & set(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rope=longrope_4", "rope='longrope_4' is not understood; the forms are linear_FACTOR"),
        ("rope=linear", "is not understood"),
        ("rope=linear_4_5", "is not understood"),
        ("rope=llama3_8", "is not understood"),
        ("rope=llama3_8_8192_2", "is not understood"),
        ("rope=yarn_4_x", "is not understood"),
        ("rope=linear_0.5", "factor=0.5, outside its range"),
        ("rope=linear_nan", "factor=nan, outside its range"),
        ("rope=yarn_4_0", "original_context=0, but a positive whole number"),
        ("rope=llama3_8_8192_4_4", "low=4 not below high=4"),
        ("nope=1", "nope=1, but 0"),
        ("nope=-2", "nope=-2, but 0"),
    ],
)
def test_wrong_forms_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ShapeError) as caught:
        Shape.parse(f"L=2,d=64,heads=4,ff=64,vocab=10,{text}")
    assert words in str(caught.value)


def test_wrong_records_are_refused_in_words() -> None:
    base = Shape.parse("L=2,d=64,heads=4,ff=64,vocab=10").to_json()
    for value, words in (
        ({"kind": "ntk", "factor": 2.0}, "rotary scaling 'ntk' is unknown"),
        ({"kind": "linear", "factor": 2.0, "x": 1}, "rope_scaling"),
        ({"kind": "linear"}, "rope_scaling"),
        ({"kind": "linear", "factor": 2.0, "original_context": 8}, "original_context=8, but 0 is needed"),
        ("linear_4", "a RopeScaling is needed"),
    ):
        with pytest.raises(ShapeError, match=words):
            Shape.from_json({**base, "rope_scaling": value})


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1e4, 5e5, 1e6]),
    st.sampled_from([2.0, 8.0, 32.0]),
    st.sampled_from([(1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (2.0, 8.0)]),
    st.sampled_from([32, 512, 4096, 8192]),
)
def test_factors_of_llama3_give_back_a_scaling_that_makes_them(
    dim: int, theta: float, factor: float, bounds: tuple[float, float], context: int
) -> None:
    factors = rope_factors(dim, theta, RopeScaling("llama3", factor, context, *bounds))
    again = scaling_of_factors(factors, theta)
    assert again is not None
    np.testing.assert_allclose(rope_factors(dim, theta, again), factors, rtol=2e-6)


def test_the_factors_of_llama_3_2_are_recognised() -> None:
    made = RopeScaling("llama3", 32.0, 8192)
    assert scaling_of_factors(rope_factors(64, 5e5, made), 5e5) == made


@pytest.mark.parametrize("factors", [[1.0, 3.0, 2.0, 8.0], [np.nan, 1, 1, 8], [-1.0, 1, 1, 8], [8.0, 4.0, 2.0, 1.0]])
def test_other_factors_are_refused(factors: list[float]) -> None:
    with pytest.raises(ShapeError, match="rotary factors that are not"):
        scaling_of_factors(np.array(factors, np.float32), 1e4)


def test_factors_of_one_are_no_scaling() -> None:
    assert scaling_of_factors(np.ones(8, np.float32), 1e4) is None
