"""The terms of a call: every unknown has a prior, and each moves the workloads that it should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.kernels import attention as kernel
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs
from deepthin.profiles.latency.regression import fit
from deepthin.profiles.latency.runtimes import COLD_MIB, RUNTIMES
from deepthin.profiles.latency.terms import LONE_TOKEN, MAX_CHUNKS, PARTS, priors, terms
from deepthin.profiles.latency.workload import DECODE, PREFILL, TESTS, Workload
from tests.support.probed import Device, conditions, decode_works

ALL_PRODUCTS = {"product": 1e-7, "attend": 1e-13, "softmax": 1e-13, "layer": 1e-9, "element": 1e-14}


def shape(layers: int = 12, heads: int = 8, kv: int = 4, head_dim: int = 64, ff: int = 1536) -> Shape:
    return Shape.parse(f"L={layers},d=512,heads={heads},kv={kv},head_dim={head_dim},ff={ff},vocab=8192,tied")


def attention(work: Workload, truth: dict[str, float], threads: int = 1) -> float:
    where = conditions("deepthin", threads)
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
    cheap = {"attend": 1e-7, "rows_1": 1.0, "rows_2": 1.0, "softmax": 1e-12}
    dear = {**cheap, "rows_2": 2.0}
    assert attention(shared, cheap) == pytest.approx(attention(alone, cheap) / 2, rel=0.02)
    assert attention(shared, dear) == pytest.approx(attention(alone, dear), rel=0.02)


def test_more_sharing_than_a_kernel_takes_together_costs_in_proportion() -> None:
    truth = {"attend": 1e-7, "softmax": 1e-12}
    four, eight = (Workload(shape(heads=heads, kv=1), "q8_0", context=1024) for heads in (4, 8))
    assert attention(eight, truth) == pytest.approx(2 * attention(four, truth), rel=0.02)


def test_small_heads_can_be_a_cliff_of_a_runtime() -> None:
    truth = {"attend": 1e-7, "softmax": 1e-12, "dim_32": 4.0}
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


def test_a_row_costs_by_itself_in_blocks_but_not_in_the_head() -> None:
    device = Device(conditions("deepthin"), {"row": 1e-5} | {f"row_cold_at_{knot}": 1.0 for knot in COLD_MIB})
    plain = Workload(shape(), "q8_0")
    more_rows = Workload(shape(ff=3072), "q8_0")
    wider_head = Workload(shape().replace(vocab_size=16384), "q8_0")
    assert device.seconds(more_rows) / device.seconds(plain) == pytest.approx(more_rows.body_rows / plain.body_rows, rel=0.02)
    assert device.seconds(wider_head) == pytest.approx(device.seconds(plain), rel=0.02)


@pytest.mark.parametrize(
    "text", ["L=12,d=512,heads=8,kv=4,ff=1536,vocab=8192,tied", "L=4,d=256,heads=4,kv=1,ff=640,vocab=512,tied,mlp=relu2"]
)
def test_rows_are_those_of_the_matrices_of_the_blocks(text: str) -> None:
    one = Shape.parse(text)
    matrices = [spec for spec in tensor_specs(one) if spec.name.startswith("blk.") and len(spec.dims) == 2]
    assert Workload(one, "q8_0").body_rows == sum(spec.dims[0] for spec in matrices)


def test_rows_cost_more_from_memory_alone() -> None:
    small, large = (Workload(shape(layers), "q8_0") for layers in (2, 60))
    plain, cold = (
        Device(conditions("deepthin"), {}),
        Device(conditions("deepthin"), {"row_cold_at_64": 200.0, "row_cold_at_128": 200.0}),
    )
    assert cold.seconds(small) == pytest.approx(plain.seconds(small))
    assert cold.seconds(large) > 1.1 * plain.seconds(large)


def test_heads_cost_at_any_context() -> None:
    few, many = (Workload(shape(heads=heads, kv=2, head_dim=512 // heads), "q8_0") for heads in (4, 16))
    assert attention(many, {"head_call": 1e-3}) == pytest.approx(4 * attention(few, {"head_call": 1e-3}), rel=0.01)
    one, two = (Workload(shape(kv=kv), "q8_0") for kv in (1, 2))
    assert attention(two, {"kv_call": 1e-3}) == pytest.approx(2 * attention(one, {"kv_call": 1e-3}), rel=0.01)


def test_chunks_are_those_of_the_kernel() -> None:
    assert RUNTIMES["deepthin"].chunk == kernel.MIN_CHUNK
    assert MAX_CHUNKS == kernel.MAX_CHUNKS
    device = {"chunk": 1e-3}
    base = attention(Workload(shape(), "q8_0", context=0), device)
    for context in (1, 63, 64, 1000, 1023, 1024, 4096):
        length = int(kernel.chunk_length(context + 1))
        chunks = -(-(context + 1) // length)
        assert attention(Workload(shape(), "q8_0", context=context), device) == pytest.approx(chunks * base, rel=0.01)


def test_one_cached_head_keeps_one_of_two_threads_busy() -> None:
    alone, even = Workload(shape(kv=1), "q8_0", context=30), Workload(shape(kv=1), "q8_0", context=100)
    waits, shares = {"uneven": np.e, "head_call": 1e-3}, {"uneven": 1.0, "head_call": 1e-3}
    assert attention(alone, waits, threads=2) == pytest.approx(2 * attention(alone, shares, threads=2), rel=0.01)
    assert attention(even, waits, threads=2) == pytest.approx(attention(even, shares, threads=2), rel=0.01)
    assert attention(alone, waits) == pytest.approx(attention(alone, shares))


def test_a_unit_can_be_that_of_a_format() -> None:
    truth = {"product": 1e-7}
    for quant, charged in (("q4_0", 32 + 3 * LONE_TOKEN), ("q8_0", 35)):
        device = Device(conditions("llama.cpp"), truth)
        many, one_pass = (device.seconds(Workload(shape(), quant, PREFILL, count)) for count in (35, 32))
        assert many / one_pass == pytest.approx(charged / 32, rel=0.03)
