from __future__ import annotations

import math

import numpy as np
import pytest

from deepthin.engine.formats import FORMATS
from deepthin.engine.model import Tensor
from deepthin.search.quality import accuracy, characters, kv_heads, mlp_attention, quantisation, shape_laws, vocabulary
from tests.support.shared_tables import shared_rows


def as_printed(value: float, printed: str) -> str:
    decimals = len(printed.partition(".")[2])
    return f"{value:.{decimals}f}"


def coefficients(law: str) -> dict[str, float]:
    return {row["name"]: float(row["value"]) for row in shared_rows("law_coefficients.csv") if row["law"] == law}


def guarded_f4(layers: float, width: float, body: float) -> float:
    return shape_laws.f4_loss(*shape_laws.equivalent_shape(layers, width, body), body)


def test_formulas_reproduce_every_test_vector_to_its_printed_digits() -> None:
    vocabs = {row["name"]: int(row["vocab"]) for row in shared_rows("public_models.csv")}
    hot = coefficients("gem4_hot_le100B")
    gem4_hot = shape_laws.AdditiveLaw(
        hot["e"], hot["c_d"], hot["a_d"], hot["c_w"], hot["a_w"], hot["c_t"], hot["a_t"], hot["c_p"], hot["a_p"]
    )
    rows = shared_rows("law_testvectors.csv")
    assert len(rows) == 30
    for row in rows:
        layers, width, body = int(row["n_layer"]), int(row["d_model"]), int(row["body_params"])
        vocab, tokens = vocabs[row["name"]], shape_laws.REFERENCE_TOKENS
        found = {
            "F2_cool": shape_laws.f2_loss(layers, width, body),
            "F4_cool": shape_laws.f4_loss(layers, width, body),
            "gem4_cool_native": shape_laws.gem4_loss(layers, width, body),
            "gem4_hot_native": gem4_hot.loss(layers, width, body + 2 * 50304 * width, tokens),
            "vocab_term_static": 0.051 * math.log(vocab * width / vocabulary.best_vocab_params(body)) ** 2,
            "vocab_opt_V_static": math.floor(vocabulary.best_vocab_params(body) / width),
            "vocab_term_D32": vocabulary.vocab_penalty(vocab, width, body),
            "vocab_opt_V_D32": math.floor(vocabulary.best_vocab_params(body, tokens) / width),
            "mlp_attn_factor": mlp_attention.mlp_attention_factor(float(row["mlp_attn_ratio"])),
        }
        wrong = {name: value for name, value in found.items() if as_printed(value, row[name]) != row[name]}
        assert not wrong, f"{row['name']}: {wrong} against {[row[name] for name in wrong]}"


def test_constants_are_those_of_the_coefficient_table() -> None:
    f4, f2, gem4 = coefficients("F4_cool"), coefficients("F2_cool"), coefficients("gem4_cool_end")
    ours = shape_laws.F4_COOLDOWN
    assert [
        ours.base,
        ours.depth,
        ours.a_depth,
        ours.tokens,
        ours.a_tokens,
        ours.width,
        ours.a_width,
        ours.params,
        ours.a_params,
    ] == [f4[f"p{i}"] for i in range(9)]
    second = shape_laws.F2_COOLDOWN
    assert [second.p0, second.p1, second.p2, second.p3, second.p4, second.p5, second.p6, second.p7] == [
        f2[f"p{i}"] for i in range(8)
    ]
    third = shape_laws.GEM4_COOLDOWN
    assert {"c_w": third.width, "a_w": third.a_width, "c_d": third.depth, "a_d": third.a_depth, "e": third.base} == {
        name: gem4[name] for name in ("c_w", "a_w", "c_d", "a_d", "e")
    }


@pytest.mark.parametrize(
    ("total", "best", "first", "last"),
    [(60e6, 21, 13, 37), (125e6, 26, 15, 47), (350e6, 38, 20, 72), (600e6, 48, 25, 93), (1e9, 60, 30, 120)],
)
def test_quality_is_flat_over_the_published_plateau(total: float, best: int, first: int, last: int) -> None:
    # Tied, V = 32,000, blocks of 10.67 D² (gated MLP of 8/3 D, one key/value head per three): the table's F4_e column.
    losses = {}
    for layers in range(2, 150):
        per_d2 = layers * 32 / 3
        width = (math.sqrt(32_000**2 + 4 * per_d2 * total) - 32_000) / (2 * per_d2)
        losses[layers] = guarded_f4(layers, width, per_d2 * width**2)
    lowest = min(losses, key=lambda layers: losses[layers])
    band = [layers for layers, loss in losses.items() if loss < losses[lowest] + 0.01]
    assert abs(lowest - best) <= 1
    assert abs(band[0] - first) <= 1
    assert abs(band[-1] - last) <= 1


def test_equivalent_shape_keeps_aspect_and_body_and_leaves_gemstones_shapes_alone() -> None:
    layers, width = shape_laws.equivalent_shape(30, 576, 106_168_320)
    assert width / layers == pytest.approx(576 / 30)
    assert 15 * layers * width**2 == pytest.approx(106_168_320)
    assert shape_laws.equivalent_shape(23, 256, 15 * 23 * 256**2) == pytest.approx((23, 256))


def test_four_bit_law_meets_the_published_damage_of_opt() -> None:
    rows = [row for row in shared_rows("quantization_ppl.csv") if row["method"] == "GPTQ per-row" and row["bits"] == "4"]
    ratios = [
        quantisation.int4_penalty(float(row["params"]), float(row["train_tokens"]), quantisation.PER_ROW)
        / float(row["delta_nats"])
        for row in rows
    ]
    assert len(ratios) == 5
    assert all(1 / 1.7 <= ratio <= 1.7 for ratio in ratios), ratios


@pytest.mark.parametrize(("body", "nats"), [(30e6, 0.138), (100e6, 0.105), (300e6, 0.082), (1e9, 0.063)])
def test_four_bit_damage_falls_with_size_as_printed(body: float, nats: float) -> None:
    assert quantisation.int4_penalty(body, 1.8e11, 1.0) == pytest.approx(nats, abs=0.0006)
    assert quantisation.int4_penalty(body, 9e12, 0.5) == pytest.approx(nats / 2, abs=0.0004)  # tokens are capped
    assert quantisation.int4_penalty(body) > quantisation.INT8_PENALTY


@pytest.mark.parametrize(
    ("vocab", "printed"),
    [
        (4096, 0.332),
        (8192, 0.299),
        (16384, 0.272),
        (32768, 0.252),
        (49152, 0.243),
        (65536, 0.237),
        (128000, 0.229),
        (262144, 0.227),
    ],
)
def test_tokens_per_character(vocab: int, printed: float) -> None:
    assert round(characters.tokens_per_char(vocab), 3) == printed


def test_tokens_per_character_stops_at_200_000() -> None:
    assert characters.tokens_per_char(200_000) == characters.tokens_per_char(1_000_000)
    assert characters.tokens_per_char(199_000) > characters.tokens_per_char(200_000)


def test_attention_factor_is_one_where_f4_was_fitted_and_clamped_outside_its_range() -> None:
    assert mlp_attention.attention_factor(4.0) == 1.0
    assert mlp_attention.attention_factor(50.0) == mlp_attention.attention_factor(5.0)
    assert mlp_attention.attention_factor(0.01) == mlp_attention.attention_factor(0.5)
    # Half of the printed cost over the optimum (r 1.03), relative to r = 4.
    assert mlp_attention.attention_factor(2.0) == pytest.approx((1 + 0.0028 / 2) / (1 + 0.0098 / 2), abs=1e-4)


def test_kv_penalty_starts_past_four_and_is_bounded() -> None:
    assert [kv_heads.kv_penalty(group) for group in (1, 3, 4)] == [0, 0, 0]
    assert kv_heads.kv_penalty(8) == pytest.approx(0.04)
    assert kv_heads.kv_penalty(16) == pytest.approx(0.08)
    assert kv_heads.kv_penalty(64) == 0.10


CITED = (  # the same goldens, a few of them, for checkouts without the tables; own computation at T = 1e11 from public shapes
    ("SmolLM2-135M", 30, 576, 106_168_320, 49_152, 2.9449, 2.9064, 2.9005, 43_802, 0.0005),
    ("MobileLLM-350M", 32, 960, 314_572_800, 32_000, 2.7577, 2.7250, 2.7179, 45_868, 0.0052),
    ("Qwen2.5-0.5B", 24, 896, 357_826_560, 151_936, 2.7392, 2.7587, 2.7571, 52_500, 0.0452),
    ("Pythia-70M", 6, 512, 18_874_368, 50_304, 3.3015, 3.2769, 3.2510, 20_325, 0.0328),
    ("Baguettotron", 80, 576, 283_115_520, 65_536, 2.7925, 2.7590, 2.7592, 72_426, 0.0004),
)


@pytest.mark.parametrize(("name", "layers", "width", "body", "vocab", "f2", "f4", "gem4", "best_vocab", "penalty"), CITED)
def test_formulas_at_public_shapes(
    name: str,
    layers: int,
    width: int,
    body: int,
    vocab: int,
    f2: float,
    f4: float,
    gem4: float,
    best_vocab: int,
    penalty: float,
) -> None:
    assert round(shape_laws.f2_loss(layers, width, body), 4) == f2
    assert round(shape_laws.f4_loss(layers, width, body), 4) == f4
    assert round(shape_laws.gem4_loss(layers, width, body), 4) == gem4
    assert math.floor(vocabulary.best_vocab_params(body, 1e11) / width) == best_vocab
    assert round(vocabulary.vocab_penalty(vocab, width, body), 4) == penalty


@pytest.mark.parametrize(("ratio", "percent"), [(1.5, 0.10), (2, 0.28), (3, 0.66), (4, 0.98), (8, 1.9)])
def test_mlp_attention_curve_costs_what_its_paper_implies(ratio: float, percent: float) -> None:
    assert 100 * (mlp_attention.mlp_attention_factor(ratio) - 1) == pytest.approx(percent, abs=0.01 if ratio < 8 else 0.05)


def test_mlp_attention_effect_was_halved_because_the_measured_one_was_smaller() -> None:
    # Llama-3.2-1B (r 4.8) against Panda-1B: 2.803 and 2.782, a gap of 0.75 %; the whole curve predicts at least 1.2 %.
    assert mlp_attention.mlp_attention_factor(4.8) - 1 > 0.012 > 2.803 / 2.782 - 1


@pytest.mark.parametrize(
    ("layers", "width", "body", "drift", "best"),
    [(30, 576, 106_168_320, 13_535, 43_802), (32, 960, 314_572_800, 20_065, 45_868)],
)
def test_best_vocabulary_drifts_with_tokens(layers: int, width: int, body: int, drift: int, best: int) -> None:
    assert int(vocabulary.best_vocab_params(body) / width) == drift
    assert int(vocabulary.best_vocab_params(body, 1e11) / width) == best
    by_compute = vocabulary.best_vocab_params(body, 1e11, vocabulary.DRIFT_BY_COMPUTE)
    assert by_compute > vocabulary.best_vocab_params(body, 1e11)


@pytest.mark.parametrize(("loss", "share"), [(3.1, 0.379), (2.9, 0.402), (2.7, 0.436)])
def test_accuracy_read_out(loss: float, share: float) -> None:
    assert round(accuracy.accuracy(loss), 3) == share


def test_the_tie_band_is_a_fraction_of_an_accuracy_point() -> None:
    assert 0.1 < accuracy.points_lost(30, 576, 106_168_320, 1e11, 0.02) < 0.5


def test_five_and_six_bits_lie_between_eight_and_four() -> None:
    shares = [quantisation.rounding_share(name) for name in ("q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k")]
    assert shares[:3] == [1.0, 1.0, 1.0]
    assert shares[2:] == sorted(shares[2:], reverse=True)
    damage = {q: quantisation.quantisation_term(q, 10**8, 1e11, 0.5).nats for q in ("q4_0", "q5_0", "q5_1", "q6_k", "q8_0")}
    assert damage["q4_0"] > damage["q5_0"] > damage["q5_1"] > damage["q6_k"] > damage["q8_0"] == 0.001


@pytest.mark.parametrize(
    ("quant", "published", "factor"), [("q4_k", 0.035431, 1.4), ("q5_k", 0.00714, 1.1), ("q6_k", 0.001053, 1.8)]
)
def test_damage_by_format_meets_the_published_card_of_salamandra_2b(quant: str, published: float, factor: float) -> None:
    # robbiemu/salamandra-2b-instruct quanization_results.md: Q4_K_S, Q5_K_S, Q6_K
    predicted = quantisation.quantisation_term(quant, 1_730_000_000, 1.8e11, quantisation.GROUP_WISE).nats
    assert 1 / factor <= predicted / published <= factor


def test_committed_rounding_errors_are_those_of_our_own_quantiser_where_it_has_one() -> None:
    weights = np.random.Generator(np.random.PCG64(1)).standard_normal((256, 1024), np.float32)
    for name in ("q5_0", "q5_1"):
        error = Tensor.from_values(weights, FORMATS[name]).dequantize() - weights
        assert float((error**2).mean() / (weights**2).mean()) == pytest.approx(quantisation.ROUNDING_ERROR[name], rel=0.03)
