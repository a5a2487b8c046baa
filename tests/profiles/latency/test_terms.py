"""The terms of a call: every unknown has a prior, and each moves the workloads that it should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.shape import Shape
from deepthin.profiles.latency.regression import fit
from deepthin.profiles.latency.runtimes import RUNTIMES
from deepthin.profiles.latency.terms import LONE_TOKEN, PARTS, priors, terms
from deepthin.profiles.latency.workload import DECODE, PREFILL, TESTS, Workload
from tests.support.probed import Device, conditions, decode_works

ALL_PRODUCTS = {"product": 1e-7, "attend": 1e-13, "softmax": 1e-13, "layer": 1e-9, "element": 1e-14}


def shape(layers: int = 12, heads: int = 8, kv: int = 4, head_dim: int = 64, ff: int = 1536) -> Shape:
    return Shape.parse(f"L={layers},d=512,heads={heads},kv={kv},head_dim={head_dim},ff={ff},vocab=8192,tied")


def attention(work: Workload, truth: dict[str, float]) -> float:
    where = conditions("deepthin")
    fitted = fit([], priors(where, work.test))
    theta = fitted.theta.copy()
    for name, value in truth.items():
        theta[fitted.index[name]] = np.log(value)
    exact = type(fitted)(fitted.names, theta, fitted.covariance, 0.0, 0.0, 0.0, (), ())
    return exact.predict(terms(work, where))[3]["attention"]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), runtime=st.sampled_from(sorted(RUNTIMES)), tokens=st.integers(1, 400))
def test_every_unknown_has_a_prior_and_every_term_a_name(seed: int, runtime: str, tokens: int) -> None:
    where = conditions(runtime)
    (work,) = decode_works(1, seed)
    for one in (work, Workload(work.shape, work.quant, PREFILL, tokens, work.context)):
        known = set(priors(where, one.test))
        found = terms(one, where)
        assert {name for term in found for factor in term.factors for name in factor.powers} <= known
        assert {term.name for term in found} == set(PARTS)


@pytest.mark.parametrize("test", TESTS)
def test_layers_cost_more_only_where_matrices_come_from_memory(test: str) -> None:
    small, large = (Workload(shape(layers), "q8_0", test, 1 if test == DECODE else 32) for layers in (2, 60))
    plain, cold = Device(conditions("deepthin"), {}), Device(conditions("deepthin"), {"cold_at_128": 30.0, "cold_at_512": 30.0})
    assert cold.seconds(small) == pytest.approx(plain.seconds(small))
    assert cold.seconds(large) > 1.1 * plain.seconds(large)


def test_heads_that_share_the_cache_cost_what_the_probes_say() -> None:
    alone, shared = (Workload(shape(kv=kv), "q8_0", context=1024) for kv in (8, 4))
    cheap = {"attend": 1e-9, "rows_1": 1.0, "rows_2": 1.0, "softmax": 1e-12}
    dear = {**cheap, "rows_2": 2.0}
    assert attention(shared, cheap) == pytest.approx(attention(alone, cheap) / 2, rel=0.02)
    assert attention(shared, dear) == pytest.approx(attention(alone, dear), rel=0.02)


def test_more_sharing_than_a_kernel_takes_together_costs_in_proportion() -> None:
    truth = {"attend": 1e-9, "softmax": 1e-12}
    four, eight = (Workload(shape(heads=heads, kv=1), "q8_0", context=1024) for heads in (4, 8))
    assert attention(eight, truth) == pytest.approx(2 * attention(four, truth), rel=0.02)


def test_small_heads_can_be_a_cliff_of_a_runtime() -> None:
    truth = {"attend": 1e-9, "softmax": 1e-12, "dim_32": 4.0}
    wide, narrow = (
        Workload(shape(heads=heads, kv=heads // 2, head_dim=size), "q8_0", context=1024) for heads, size in ((8, 64), (16, 32))
    )
    assert attention(narrow, truth) == pytest.approx(4 * attention(wide, truth), rel=0.02)


@pytest.mark.parametrize(("tokens", "charged"), [(32, 32), (33, 32 + LONE_TOKEN), (35, 32 + 3 * LONE_TOKEN), (36, 36)])
def test_tokens_that_fill_no_unit_are_multiplied_alone(tokens: int, charged: float) -> None:
    device = Device(conditions("deepthin"), ALL_PRODUCTS)
    many, one_pass = (device.seconds(Workload(shape(), "q8_0", PREFILL, count)) for count in (tokens, 32))
    assert many / one_pass == pytest.approx(charged / 32, rel=0.02)


def test_a_decoded_token_is_charged_once() -> None:
    work = Workload(shape(), "q8_0")
    seconds = ALL_PRODUCTS["product"] * RUNTIMES["deepthin"].decode.formats["q8_0"] * (work.body_products + work.head_products)
    assert Device(conditions("deepthin"), ALL_PRODUCTS).seconds(work) == pytest.approx(seconds, rel=0.05)
