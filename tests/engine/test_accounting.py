"""Shape accounting: the worked figures every user can redo on paper, and agreement with tensors as stored."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.engine.accounting import (
    BlockRecipe,
    LatencyTerms,
    analytic_latency,
    bytes_read_per_token,
    count_bytes,
    count_params,
    fallback_matrices,
    flops_per_token,
    iso_parameter_curve,
    kv_bytes_per_token,
    shape_flags,
    vocabulary_table,
)
from deepthin.engine.errors import UsageError
from deepthin.engine.formats import BODY_QUANTS
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.model import random_model
from deepthin.engine.shape import Shape

SMOLLM2 = known_shape("smollm2-135m").shape


def gpt2_like(layers: int, width: int) -> Shape:
    return Shape(
        num_layers=layers,
        hidden_size=width,
        num_heads=width // 64,
        intermediate_size=4 * width,
        vocab_size=50257,
        mlp="gelu",
    )


def test_one_block_of_width_768_holds_7077888_matrix_parameters() -> None:
    assert count_params(gpt2_like(1, 768)).block_matrices == 7_077_888


@pytest.mark.parametrize(("layers", "width", "millions"), [(12, 768, 85), (24, 768, 170), (12, 1536, 340)])
def test_depth_doubles_and_width_quadruples_parameters(layers: int, width: int, millions: int) -> None:
    assert round(count_params(gpt2_like(layers, width)).non_embedding / 1e6) == millions


def test_three_shapes_at_7_25_billion_are_equal() -> None:
    sizes = {count_params(gpt2_like(layers, width)).block_matrices for layers, width in ((64, 3072), (36, 4096), (16, 6144))}
    assert sizes == {7_247_757_312}


def test_iso_parameter_curve_finds_those_three_shapes() -> None:
    curve = iso_parameter_curve(7_247_757_312, BlockRecipe(), [64, 36, 16])
    assert [(point.num_layers, point.hidden_size) for point in curve] == [(64, 3072), (36, 4096), (16, 6144)]
    assert {point.params for point in curve} == {7_247_757_312}
    assert [point.aspect_ratio for point in curve] == [48, 4096 / 36, 384]


def test_curve_of_a_grouped_gated_shape_passes_through_it() -> None:
    recipe = BlockRecipe.of(SMOLLM2)
    assert recipe.params_per_d2 == pytest.approx(2 + 2 / 3 + 3 * 1536 / 576)
    (point,) = iso_parameter_curve(count_params(SMOLLM2).block_matrices, recipe, [30])
    assert (point.hidden_size, point.params) == (576, count_params(SMOLLM2).block_matrices)


def test_curve_leaves_out_depths_without_a_width_and_refuses_nonsense() -> None:
    assert iso_parameter_curve(100_000, BlockRecipe(), [1, 4000]) == iso_parameter_curve(100_000, BlockRecipe(), [1])
    for body, layers in ((0, [1]), (1e6, [0])):
        with pytest.raises(UsageError, match="positive budget and layer counts from 1"):
            iso_parameter_curve(body, BlockRecipe(), layers)


def test_kv_cache_of_8_heads_of_128_is_4_kib_per_token_and_layer() -> None:
    def shape(layers: int) -> Shape:
        return Shape(
            num_layers=layers, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336, vocab_size=32000
        )

    assert kv_bytes_per_token(shape(1)) == 4096
    assert kv_bytes_per_token(shape(64)) == 4 * kv_bytes_per_token(shape(16))
    assert kv_bytes_per_token(shape(16), element_bytes=4) == 2 * kv_bytes_per_token(shape(16))


def test_shared_layers_cache_and_read_again_but_count_once() -> None:
    once, twice = SMOLLM2, SMOLLM2.replace(layer_sharing=2)
    assert count_params(once) == count_params(twice)
    assert kv_bytes_per_token(twice) == 2 * kv_bytes_per_token(once)
    blocks = count_bytes(once, "q4_0").non_embedding - 4 * once.hidden_size
    assert bytes_read_per_token(twice, "q4_0") - bytes_read_per_token(once, "q4_0") == blocks


def test_40_us_a_layer_cost_four_times_more_at_64_layers_than_at_16() -> None:
    deep = analytic_latency(0, 15.1e12, 64, 40e-6)
    shallow = analytic_latency(0, 15.1e12, 16, 40e-6)
    assert deep.total_s == pytest.approx(2.56e-3)
    assert shallow.total_s == pytest.approx(0.64e-3)


def test_with_the_weight_read_the_ratio_is_2_2() -> None:
    deep = analytic_latency(14.5e9, 15.1e12, 64, 40e-6)
    shallow = analytic_latency(14.5e9, 15.1e12, 16, 40e-6)
    assert deep.weight_read_s == shallow.weight_read_s == pytest.approx(0.96e-3, rel=1e-3)
    assert deep.total_s / shallow.total_s == pytest.approx(2.2, abs=0.005)
    assert deep == LatencyTerms(deep.weight_read_s, 64 * 40e-6)


def test_latency_model_refuses_a_zero_bandwidth() -> None:
    with pytest.raises(UsageError, match="positive bandwidth"):
        analytic_latency(1, 0, 1, 0)


def test_what_vocabularies_leave_at_125_million() -> None:
    rows = {(row.vocab_size, row.tied): row for row in vocabulary_table(SMOLLM2, 125_000_000)}
    left = {key: row.left_params for key, row in rows.items()}
    assert left == {
        (32_000, True): 125_000_000 - 32_000 * 576 - 576,
        (32_000, False): 125_000_000 - 64_000 * 576 - 576,
        (49_152, True): 96_687_872,
        (49_152, False): 68_376_320,
        (128_256, True): 51_123_968,
        (128_256, False): -22_751_488,
        (262_144, True): -25_995_520,
        (262_144, False): -176_990_464,
    }
    layers = {key: row.num_layers for key, row in rows.items()}
    assert [layers[32_000, True], layers[32_000, False]] == [30, 24]
    assert [layers[49_152, True], layers[49_152, False]] == [27, 19]
    assert [layers[128_256, True], layers[128_256, False]] == [14, 0]
    assert [layers[262_144, True], layers[262_144, False]] == [0, 0]


@pytest.mark.parametrize("row", vocabulary_table(SMOLLM2, 125_000_000), ids=lambda row: f"{row.vocab_size}-{row.tied}")
def test_the_layers_of_a_vocabulary_row_fit_and_one_more_does_not(row) -> None:  # type: ignore[no-untyped-def]
    if row.num_layers:
        shape = SMOLLM2.replace(num_layers=row.num_layers, vocab_size=row.vocab_size, tie_word_embeddings=row.tied)
        assert count_params(shape).total <= 125_000_000 < count_params(shape.replace(num_layers=row.num_layers + 1)).total
    else:
        shape = SMOLLM2.replace(num_layers=1, vocab_size=row.vocab_size, tie_word_embeddings=row.tied)
        assert count_params(shape).total > 125_000_000


shapes = st.builds(
    lambda layers, heads, group, half_dim, ff, vocab, tied, mlp, qk_norm: Shape(
        num_layers=layers,
        hidden_size=heads * group * half_dim * 2,
        num_heads=heads * group,
        num_kv_heads=heads,
        intermediate_size=ff,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        mlp=mlp,
        qk_norm=qk_norm,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 24),
    st.integers(1, 130),
    st.integers(1, 200),
    st.booleans(),
    st.sampled_from(["swiglu", "gelu", "relu2"]),
    st.booleans(),
)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(shapes, st.sampled_from(BODY_QUANTS))
def test_counts_equal_those_of_a_model_in_memory(shape: Shape, quant: str) -> None:
    model = random_model(shape, quant=quant)
    values = [tensor.dims[0] * (tensor.dims[1] if len(tensor.dims) == 2 else 1) for tensor in model.tensors.values()]
    assert count_params(shape).total == sum(values)
    assert count_bytes(shape, quant).total == model.num_bytes


@settings(max_examples=40, derandomize=True, deadline=None)
@given(shapes, st.sampled_from(["num_layers", "intermediate_size", "vocab_size"]))
def test_every_cost_grows_with_every_dimension(shape: Shape, name: str) -> None:
    bigger = shape.replace(**{name: getattr(shape, name) + 1})
    assert count_params(bigger).total > count_params(shape).total
    assert count_bytes(bigger, "f16").total > count_bytes(shape, "f16").total
    assert flops_per_token(bigger) > flops_per_token(shape)
    assert bytes_read_per_token(bigger, "f16", context=10) > bytes_read_per_token(shape, "f16", context=10)


def test_flops_of_a_hand_counted_model() -> None:
    shape = Shape(num_layers=2, hidden_size=8, num_heads=2, intermediate_size=16, vocab_size=10)
    matrices = 2 * (4 * 8 * 8 + 3 * 8 * 16) + 8 * 10
    assert flops_per_token(shape) == 2 * matrices
    assert flops_per_token(shape, context=5) == 2 * matrices + 2 * 5 * (2 * 8 + 2 * 8)


def test_bytes_read_are_all_weights_when_tied_and_skip_the_table_when_not() -> None:
    tied, untied = SMOLLM2, SMOLLM2.replace(tie_word_embeddings=False)
    row = count_bytes(tied, "q8_0").embedding // tied.vocab_size
    assert bytes_read_per_token(tied, "q8_0") == count_bytes(tied, "q8_0").total + row
    assert bytes_read_per_token(untied, "q8_0") == bytes_read_per_token(tied, "q8_0")
    assert bytes_read_per_token(tied, "q8_0", context=7) == bytes_read_per_token(tied, "q8_0") + 7 * kv_bytes_per_token(tied)


def test_rows_that_no_block_divides_are_named_and_kept_in_f16() -> None:
    odd = SMOLLM2.replace(intermediate_size=1500)
    assert fallback_matrices(odd, "q4_0") == ["ffn_down"]
    assert fallback_matrices(odd, "f16") == []
    assert any("ffn_down" in flag["text"] and flag["flag"] == "block_fallback" for flag in shape_flags(odd))


@pytest.mark.parametrize(
    ("changes", "flag", "suffers"),
    [
        ({"num_layers": 30}, "aspect_low", "Time per token suffers"),
        ({"num_layers": 3}, "aspect_high", "Quality suffers"),
        ({"num_layers": 6, "vocab_size": 262_144}, "vocabulary_heavy", "layers get the smaller part"),
        ({"num_layers": 6, "num_kv_heads": 1}, "few_kv_heads", "9 query heads share one"),
    ],
)
def test_each_flag_says_what_suffers(changes: dict[str, int], flag: str, suffers: str) -> None:
    texts = {item["flag"]: item["text"] for item in shape_flags(SMOLLM2.replace(**changes))}
    assert suffers in texts[flag]


def test_a_shape_inside_the_band_has_no_aspect_flag() -> None:
    assert not [item for item in shape_flags(SMOLLM2.replace(num_layers=6)) if item["flag"].startswith("aspect")]


@pytest.mark.parametrize("quant", ["q4_0", "f16"])
def test_a_model_for_timing_repeats_rows_and_is_like_any_other(quant: str) -> None:
    shape = Shape.parse("L=1,d=64,heads=2,ff=96,vocab=70,tied")
    whole, repeated = random_model(shape, quant=quant), random_model(shape, quant=quant, distinct_rows=32)
    for name, tensor in whole.tensors.items():
        other = repeated.tensors[name]
        assert (other.dims, other.format, other.stored.shape) == (tensor.dims, tensor.format, tensor.stored.shape)
        assert other.stored.ctypes.data % 8 == 0 and other.stored.flags.c_contiguous
        if len(tensor.dims) == 2:
            rows = np.arange(tensor.dims[0])
            np.testing.assert_array_equal(other.stored, other.stored[rows % 32])
            assert len(np.unique(other.stored, axis=0)) == 32
