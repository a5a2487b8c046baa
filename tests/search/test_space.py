from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import InfeasibleError, UsageError
from deepthin.engine.formats import scheme_named
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape
from deepthin.engine.targets import target_verdicts
from deepthin.export.gguf_writer import write_gguf
from deepthin.search.budget import Budget
from deepthin.search.file_sizes import gguf_bytes
from deepthin.search.k_quants import k_quant_size
from deepthin.search.memory import memory
from deepthin.search.space import MAX_MLP_RATIO, Candidate, Space, infeasible
from deepthin.search.targets import TARGETS, Targets

BUDGETS = st.one_of(
    st.builds(Budget, params=st.integers(160_000, 2_000_000_000)),
    st.builds(Budget, bytes=st.integers(200_000, 2_000_000_000)),
    st.builds(Budget, params=st.integers(160_000, 300_000_000), bytes=st.integers(200_000, 300_000_000)),
    st.builds(Budget, ram=st.integers(8_000_000, 900_000_000), context=st.integers(0, 8192)),
    st.builds(Budget, bytes=st.integers(400_000, 300_000_000), targets=st.just(Targets(("hf", "gguf"), ("gguf-k-quants",)))),
    st.builds(Budget, params=st.integers(900_000, 300_000_000), targets=st.just(Targets(TARGETS))),
)


@st.composite
def spaces_and_points(draw: st.DrawFn) -> tuple[Space, dict[str, int]]:
    space = Space(
        draw(BUDGETS),
        vocabs=draw(st.sampled_from([(4096, 8192, 32768, 131072), (256,), (1, 5000), (3000,)])),
        head_dims=draw(st.sampled_from([(32, 64, 96, 128), (16,), (48, 80), (64,)])),
        quants=draw(st.sampled_from([("q4_0", "q8_0", "f16"), ("q4_1",), ("f32", "q4_1", "bf16")])),
        query_ratios=draw(st.sampled_from([(1.0,), (0.5, 1.0, 2.0), (0.4,), (1.3, 0.125)])),
        head_quants=draw(st.sampled_from([(), ("q4_0", "f16"), ("q8_0",)])),
        qk_norms=draw(st.sampled_from([(False,), (False, True)])),
        tyings=draw(st.sampled_from([(True, False), (False,)])),
    )
    point = {dimension.name: draw(st.integers(dimension.low, dimension.high)) for dimension in space.dimensions}
    return space, point


@settings(max_examples=150, derandomize=True, deadline=None)
@given(spaces_and_points())
def test_every_candidate_meets_its_budget_exactly_and_can_be_exported(drawn: tuple[Space, dict[str, int]]) -> None:
    space, point = drawn
    if not space.budget.fits(space.smallest.shape, space.smallest.quant):
        with pytest.raises(InfeasibleError):
            space.decode(point)
        return
    candidate = space.decode(point)
    shape, quant = candidate.shape, candidate.quant
    assert meets(space.budget, candidate)
    ratio = space.query_ratios[point["query_ratio"]]
    if ratio == 1 and space.query_ratios == (1.0,):
        assert shape.hidden_size == shape.num_heads * shape.head_dim
    assert shape.q_size >= min(space.query_ratios) * shape.hidden_size
    assert shape.num_heads % shape.num_kv_heads == 0
    assert shape.num_heads // shape.num_kv_heads <= max(space.kv_groups)
    assert shape.head_dim % 16 == 0
    step = 256 if "gguf-k-quants" in space.budget.targets.hard else 32
    assert shape.hidden_size % step == 0
    assert shape.intermediate_size % step == 0
    assert shape.q_size % step == 0
    assert shape.tie_word_embeddings in space.tyings
    head = scheme_named(quant).head.name
    assert head in space.head_quants if space.head_quants else quant in space.quants
    verdicts = target_verdicts(shape)
    assert all(verdicts[rule].ok for rule in ("hf", "onnx", "gguf-q4_0", *(["gguf-k-quants"] if step == 256 else [])))
    assert space.layers[0] <= shape.num_layers <= space.layers[1]
    assert shape.vocab_size in space.vocabs
    assert scheme_named(quant).body.name in space.quants
    # Nothing that could be used is left over.
    inner = shape.intermediate_size + step
    if inner <= MAX_MLP_RATIO * shape.hidden_size:
        assert not meets(space.budget, Candidate(shape.replace(intermediate_size=inner), quant))
    elif shape.num_layers < space.layers[1]:
        assert not meets(space.budget, Candidate(shape.replace(num_layers=shape.num_layers + 1), quant))


def meets(budget: Budget, candidate: Candidate) -> bool:
    shape, quant = candidate.shape, candidate.quant
    params = count_params(shape).total
    size = gguf_bytes(shape, quant, f"random-{shape.text}-seed0")
    if budget.targets.priced:
        size = max(size, k_quant_size(shape).bytes)
    ram = memory(shape, quant, budget.context).total
    return params <= (budget.params or params) and size <= (budget.bytes or size) and ram <= (budget.ram or ram)


def test_budget_counts_what_a_file_really_weighs(tmp_path: Path) -> None:
    space = Space(Budget(params=400_000, bytes=320_000, seed=3), vocabs=(512, 2048), head_dims=(16, 32))
    generator = np.random.default_rng(0)
    for index in range(12):
        candidate = space.decode(space.sample(generator))
        model = random_model(candidate.shape, quant=candidate.quant, seed=3)
        assert sum(int(np.prod(tensor.dims)) for tensor in model.tensors.values()) <= 400_000
        path = tmp_path / f"{index}.gguf"
        write_gguf(model, path)
        assert path.stat().st_size == space.budget.needs(candidate.shape, candidate.quant)["bytes"] <= 320_000


def test_width_is_the_largest_that_fits() -> None:
    space = Space(
        Budget(params=30_000_000), kv_groups=(1,), mlp_ratios=(2.0,), vocabs=(8192,), head_dims=(64,), quants=("f16",)
    )
    point = {dimension.name: dimension.low for dimension in space.dimensions} | {"layers": 12}
    shape = space.decode(point).shape
    wider = shape.hidden_size + 64
    heads = wider // 64
    larger = shape.replace(hidden_size=wider, num_heads=heads, num_kv_heads=heads, intermediate_size=2 * wider)
    assert count_params(larger).total > 30_000_000
    assert shape.intermediate_size >= 2 * shape.hidden_size


def test_points_without_room_move_to_cheaper_choices() -> None:
    space = Space(Budget(params=3_000_000))
    dearest = {dimension.name: dimension.high for dimension in space.dimensions}
    candidate = space.decode(dearest)
    assert count_params(candidate.shape).total <= 3_000_000
    assert candidate.shape.vocab_size < max(space.vocabs)
    assert candidate.quant == "f16"  # a dearer format does not hurt a parameter budget, so it stays


def test_dimensions_are_the_same_whatever_the_lists_hold() -> None:
    one = Space(Budget(params=10**7), vocabs=(32000,), quants=("q4_0",))
    names = [dimension.name for dimension in one.dimensions]
    assert names == [dimension.name for dimension in Space(Budget(bytes=10**8)).dimensions]
    assert [d.high for d in one.dimensions if d.name in ("vocab", "quant")] == [0, 0]


def test_samples_cover_every_choice_and_stay_inside() -> None:
    space = Space(Budget(params=10**8))
    generator = np.random.default_rng(3)
    points = [space.sample(generator) for _ in range(2000)]
    for dimension in space.dimensions:
        values = {point[dimension.name] for point in points}
        assert min(values) == dimension.low
        assert max(values) == dimension.high


def test_smallest_member_is_the_smallest() -> None:
    space = Space(Budget(params=1), layers=(3, 4), vocabs=(64, 128), quants=("f16", "q4_1", "q4_0"), head_dims=(48, 32, 64))
    smallest = space.smallest
    roomy = Space(
        Budget(params=10**9, bytes=10**9, ram=10**9, context=64),
        layers=(3, 4),
        vocabs=(64, 128),
        quants=space.quants,
        head_dims=space.head_dims,
    )
    least = roomy.budget.needs(smallest.shape, smallest.quant)
    for values in product(*(range(d.low, d.high + 1) for d in roomy.dimensions)):
        point = dict(zip((d.name for d in roomy.dimensions), values, strict=True))
        narrowest = roomy._shape(point, roomy._step(point))
        assert count_params(narrowest).total >= count_params(smallest.shape).total
        needs = roomy.budget.needs(narrowest, roomy.quants[point["quant"]])
        assert all(need >= least[name] for name, need in needs.items())


def suggestions(message: str) -> tuple[int | None, dict[str, int]]:
    way_out = message.partition("Nearest feasible: ")[2]
    vocab = re.search(r"--vocab (\d+)", way_out)
    budgets = {name: int(number) for name, number in re.findall(r"--(params|bytes|ram) (\d+)", way_out)}
    return (int(vocab[1]) if vocab else None), budgets


def feasible(budget: Budget, vocab: int) -> bool:
    try:
        Space(budget, vocabs=(vocab,)).require_feasible()
    except InfeasibleError:
        return False
    return True


def test_embedding_above_the_budget_is_said_with_true_ways_out() -> None:
    with pytest.raises(InfeasibleError) as caught:
        Space(Budget(params=100_000), vocabs=(32_000,)).require_feasible()
    message = str(caught.value)
    assert message.startswith(
        "--params 100,000 is too small for a vocabulary of 32,000: its embedding alone takes 1,024,000 parameters at the "
        "narrowest width (32,000 x 32), 924,000 more than the budget."
    )
    assert caught.value.exit_code == 3
    vocab, budgets = suggestions(message)
    assert vocab is not None
    assert set(budgets) == {"params"}
    assert feasible(Budget(params=100_000), vocab)
    assert not feasible(Budget(params=100_000), vocab + 1)
    assert feasible(Budget(params=budgets["params"]), 32_000)
    assert not feasible(Budget(params=budgets["params"] - 1), 32_000)


def test_bytes_and_parameters_both_too_small() -> None:
    budget = Budget(params=1_030_000, bytes=900_000)
    with pytest.raises(InfeasibleError) as caught:
        Space(budget, vocabs=(32_000,)).require_feasible()
    assert str(caught.value).startswith("--bytes 900,000 is too small for a vocabulary of 32,000: its embedding alone")
    vocab, budgets = suggestions(str(caught.value))
    assert vocab is not None
    assert set(budgets) == {"params", "bytes"}
    assert feasible(budget, vocab)
    assert not feasible(budget, vocab + 1)
    assert feasible(Budget(params=budgets["params"], bytes=budgets["bytes"]), 32_000)
    assert not feasible(Budget(params=budgets["params"] - 1, bytes=budgets["bytes"]), 32_000)
    assert not feasible(Budget(params=budgets["params"], bytes=budgets["bytes"] - 1), 32_000)


def test_memory_too_small_for_the_context_names_a_context_that_fits() -> None:
    budget = Budget(ram=20_000_000, context=200_000)
    with pytest.raises(InfeasibleError) as caught:
        Space(budget, vocabs=(32_000,)).require_feasible()
    message = str(caught.value)
    assert message.startswith("--ram 20,000,000 is too small: the smallest shape of this search (L=3,d=32,")
    assert "bytes of memory" in message
    context = int(re.findall(r"--context (\d+) at this budget", message)[0])
    _, budgets = suggestions(message)
    assert feasible(replace(budget, context=context), 32_000)
    assert not feasible(replace(budget, context=context + 1), 32_000)
    assert feasible(replace(budget, ram=budgets["ram"]), 32_000)
    assert not feasible(replace(budget, ram=budgets["ram"] - 1), 32_000)


def test_a_refusal_says_how_much_more_is_needed_and_which_shape_is_nearest() -> None:
    with pytest.raises(InfeasibleError) as caught:
        Space(Budget(params=1_000_000), vocabs=(32_000,)).require_feasible()
    found = re.search(r"--params (\d+) \(\+([\d.]+)%\).* The nearest shape is (L=\S+) in q4_0\.$", str(caught.value))
    assert found is not None
    assert count_params(Shape.parse(found[3])).total == int(found[1])
    assert float(found[2]) == pytest.approx((int(found[1]) / 1e6 - 1) * 100, abs=0.06)


def test_targets_take_choices_out_of_the_space() -> None:
    every = Space(Budget(params=10**7, targets=Targets(())), sharings=(1, 2), qk_norms=(False, True))
    assert (every.sharings, every.qk_norms) == ((1, 2), (False, True))
    files = Space(Budget(params=10**7), sharings=(1, 2), qk_norms=(False, True))
    assert (files.sharings, files.qk_norms) == ((1,), (False, True))
    with pytest.raises(UsageError, match=r"no sharings is left for --targets gguf \(2 by gguf: share=2"):
        Space(Budget(params=10**7, targets=Targets(("gguf",))), sharings=(2,))


def test_shared_and_normed_shapes_are_decoded_as_asked() -> None:
    space = Space(Budget(params=10**7, targets=Targets(("onnx",))), qk_norms=(True,))
    generator = np.random.default_rng(1)
    assert all(space.decode(space.sample(generator)).shape.qk_norm for _ in range(5))
    shared = Space(Budget(params=10**7, targets=Targets(())), sharings=(3,))
    assert shared.decode(shared.sample(generator)).shape.layer_sharing == 3


def test_points_are_counted_and_listed() -> None:
    space = Space(Budget(params=10**7), layers=(3, 5), vocabs=(4096, 8192), head_dims=(64,), kv_groups=(3,), mlp_ratios=(2.0,))
    points = list(space.points())
    assert space.num_points == len(points) == 3 * 2 * 2 * 3
    assert len({tuple(point.values()) for point in points}) == len(points)


def test_body_above_the_budget_leaves_no_vocabulary() -> None:
    with pytest.raises(InfeasibleError) as caught:
        Space(Budget(params=5_000), vocabs=(100,)).require_feasible()
    assert "the smallest shape of this search (L=3,d=32" in str(caught.value)
    vocab, budgets = suggestions(str(caught.value))
    assert vocab is None
    assert feasible(Budget(params=budgets["params"]), 100)
    assert not feasible(Budget(params=budgets["params"] - 1), 100)


def test_smallest_shape_just_above_the_budget() -> None:
    need = count_params(Space(Budget(params=1), vocabs=(1000,)).smallest.shape).total
    with pytest.raises(InfeasibleError, match=rf"takes {need:,} parameters, 1 more than the budget"):
        Space(Budget(params=need - 1), vocabs=(1000,)).require_feasible()
    Space(Budget(params=need), vocabs=(1000,)).require_feasible()


def test_asking_why_a_feasible_budget_fails_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="Bug"):
        infeasible(Space(Budget(params=10**8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabs": ()}, "vocabs is empty"),
        ({"quants": ()}, "quants is empty"),
        ({"head_dims": (40,)}, "40 is no multiple of 16"),
        ({"vocabs": (0,)}, "vocabs holds 0"),
        ({"kv_groups": (0,)}, "kv_groups holds 0"),
        ({"mlp_ratios": (float("nan"),)}, "mlp_ratios holds nan"),
        ({"mlp_ratios": (7.0,)}, r"mlp_ratios holds 7.0, but values are from 0.125 to 6.0"),
        ({"query_ratios": (0.0,)}, "query_ratios holds 0.0, but values are from 0.125 to 8.0"),
        ({"query_ratios": ()}, "query_ratios is empty"),
        ({"tyings": ()}, "tyings is empty"),
        ({"head_quants": ("q9",)}, "'q9' is unknown"),
        ({"head_quants": ("q6_k",)}, "'q6_k' is only read"),
        ({"layers": (5, 3)}, "layers 5 to 3"),
        ({"quants": ("q9",)}, "'q9' is unknown"),
    ],
)
def test_lists_that_describe_no_decoder_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Space(Budget(params=10**7), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{}, {"params": 0}, {"bytes": -5}, {"params": 1.5}, {"params": True}])
def test_budgets_that_limit_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="budget"):
        Budget(**limits)


def test_query_width_and_head_format_are_axes_of_their_own() -> None:
    lists: dict[str, Any] = {"query_ratios": (0.5, 1.0, 2.0), "head_quants": ("f16", "q4_0"), "quants": ("q4_0",)}
    space = Space(Budget(params=20_000_000), layers=(6, 20), head_dims=(64,), vocabs=(8192,), **lists)
    assert space.query_ratios == (0.5, 1.0, 2.0)
    assert space.head_quants == ("q4_0", "f16")  # cheapest first
    generator = np.random.default_rng(4)
    found = [space.decode(space.sample(generator)) for _ in range(60)]
    assert {one.quant for one in found} == {"q4_0-head_q4_0", "q4_0-head_f16"}
    ratios = {round(one.shape.q_size / one.shape.hidden_size, 2) for one in found}
    assert min(ratios) < 0.8 and 1.0 in ratios and max(ratios) == 2.0
    assert all(one.shape.hidden_size % one.shape.num_heads == 0 for one in found)
    assert any("head_dim=64" in one.shape.text for one in found)


def test_a_finer_head_leaves_less_for_the_body_of_a_byte_budget() -> None:
    bodies = {}
    for head in ("q4_0", "q8_0", "f16"):
        space = Space(Budget(bytes=12_000_000), layers=(10, 10), vocabs=(8192,), quants=("q4_0",), head_quants=(head,))
        point = {dimension.name: dimension.low for dimension in space.dimensions}
        bodies[head] = count_params(space.decode(point).shape).non_embedding
    assert bodies["q4_0"] > bodies["q8_0"] > bodies["f16"]


def test_shared_blocks_weigh_what_a_priced_gguf_writes(tmp_path: Path) -> None:
    targets = Targets(("onnx",), ("gguf",))
    space = Space(Budget(bytes=400_000, targets=targets), layers=(2, 8), vocabs=(512,), head_dims=(32,), sharings=(3,))
    candidate = space.decode(space.sample(np.random.default_rng(0)))
    path = tmp_path / "m.gguf"
    write_gguf(random_model(candidate.shape, quant=candidate.quant).unrolled(), path)
    assert path.stat().st_size == space.budget.needs(candidate.shape, candidate.quant)["bytes"] <= 400_000


def test_keys_tell_candidates_apart() -> None:
    shape = Shape.parse("L=3,d=64,heads=2,ff=96,vocab=100,tied")
    assert Candidate(shape, "f16").key != Candidate(shape, "q8_0").key
    assert Candidate(shape, "f16").key != Candidate(shape.replace(tie_word_embeddings=False), "f16").key
