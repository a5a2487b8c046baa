from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

from deepthin.search import laws
from tests.support.shared_tables import shared_rows


def as_printed(value: float, printed: str) -> str:
    decimals = len(printed.partition(".")[2])
    return f"{value:.{decimals}f}"


def coefficients(law: str) -> dict[str, float]:
    return {row["name"]: float(row["value"]) for row in shared_rows("law_coefficients.csv") if row["law"] == law}


def guarded_f4(layers: float, width: float, body: float) -> float:
    return laws.f4_loss(*laws.equivalent_shape(layers, width, body), body)


def test_formulas_reproduce_every_test_vector_to_its_printed_digits() -> None:
    vocabs = {row["name"]: int(row["vocab"]) for row in shared_rows("public_models.csv")}
    hot = coefficients("gem4_hot_le100B")
    gem4_hot = laws.AdditiveLaw(
        hot["e"], hot["c_d"], hot["a_d"], hot["c_w"], hot["a_w"], hot["c_t"], hot["a_t"], hot["c_p"], hot["a_p"]
    )
    rows = shared_rows("law_testvectors.csv")
    assert len(rows) == 30
    for row in rows:
        layers, width, body = int(row["n_layer"]), int(row["d_model"]), int(row["body_params"])
        vocab, tokens = vocabs[row["name"]], laws.REFERENCE_TOKENS
        found = {
            "F2_cool": laws.f2_loss(layers, width, body),
            "F4_cool": laws.f4_loss(layers, width, body),
            "gem4_cool_native": laws.gem4_loss(layers, width, body),
            "gem4_hot_native": gem4_hot.loss(layers, width, body + 2 * 50304 * width, tokens),
            "vocab_term_static": 0.051 * math.log(vocab * width / laws.best_vocab_params(body)) ** 2,
            "vocab_opt_V_static": math.floor(laws.best_vocab_params(body) / width),
            "vocab_term_D32": laws.vocab_penalty(vocab, width, body),
            "vocab_opt_V_D32": math.floor(laws.best_vocab_params(body, tokens) / width),
            "mlp_attn_factor": laws.mlp_attention_factor(float(row["mlp_attn_ratio"])),
        }
        wrong = {name: value for name, value in found.items() if as_printed(value, row[name]) != row[name]}
        assert not wrong, f"{row['name']}: {wrong} against {[row[name] for name in wrong]}"


def test_constants_are_those_of_the_coefficient_table() -> None:
    f4, f2, gem4 = coefficients("F4_cool"), coefficients("F2_cool"), coefficients("gem4_cool_end")
    ours = laws.F4_COOLDOWN
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
    second = laws.F2_COOLDOWN
    assert [second.p0, second.p1, second.p2, second.p3, second.p4, second.p5, second.p6, second.p7] == [
        f2[f"p{i}"] for i in range(8)
    ]
    third = laws.GEM4_COOLDOWN
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
    layers, width = laws.equivalent_shape(30, 576, 106_168_320)
    assert width / layers == pytest.approx(576 / 30)
    assert 15 * layers * width**2 == pytest.approx(106_168_320)
    assert laws.equivalent_shape(23, 256, 15 * 23 * 256**2) == pytest.approx((23, 256))


def test_four_bit_law_meets_the_published_damage_of_opt() -> None:
    rows = [row for row in shared_rows("quantization_ppl.csv") if row["method"] == "GPTQ per-row" and row["bits"] == "4"]
    ratios = [
        laws.int4_penalty(float(row["params"]), float(row["train_tokens"]), laws.PER_ROW) / float(row["delta_nats"])
        for row in rows
    ]
    assert len(ratios) == 5
    assert all(1 / 1.7 <= ratio <= 1.7 for ratio in ratios), ratios


@pytest.mark.parametrize(("body", "nats"), [(30e6, 0.138), (100e6, 0.105), (300e6, 0.082), (1e9, 0.063)])
def test_four_bit_damage_falls_with_size_as_printed(body: float, nats: float) -> None:
    assert laws.int4_penalty(body, 1.8e11, 1.0) == pytest.approx(nats, abs=0.0006)
    assert laws.int4_penalty(body, 9e12, 0.5) == pytest.approx(nats / 2, abs=0.0004)  # tokens are capped
    assert laws.int4_penalty(body) > laws.INT8_PENALTY


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
    assert round(laws.tokens_per_char(vocab), 3) == printed


def test_tokens_per_character_stops_at_200_000() -> None:
    assert laws.tokens_per_char(200_000) == laws.tokens_per_char(1_000_000)
    assert laws.tokens_per_char(199_000) > laws.tokens_per_char(200_000)


def test_attention_factor_is_one_where_f4_was_fitted_and_clamped_outside_its_range() -> None:
    assert laws.attention_factor(4.0) == 1.0
    assert laws.attention_factor(50.0) == laws.attention_factor(5.0)
    assert laws.attention_factor(0.01) == laws.attention_factor(0.5)
    # Half of the printed cost over the optimum (r 1.03), relative to r = 4.
    assert laws.attention_factor(2.0) == pytest.approx((1 + 0.0028 / 2) / (1 + 0.0098 / 2), abs=1e-4)


def test_kv_penalty_starts_past_four_and_is_bounded() -> None:
    assert [laws.kv_penalty(group) for group in (1, 3, 4)] == [0, 0, 0]
    assert laws.kv_penalty(8) == pytest.approx(0.04)
    assert laws.kv_penalty(16) == pytest.approx(0.08)
    assert laws.kv_penalty(64) == 0.10


def test_guarded_f4_ranks_depth_as_mobilellm_measured_it() -> None:
    rows = []
    for row in shared_rows("mobilellm_depth_width.csv"):
        layers, width = int(row["n_layer"]), int(row["d_model"])
        body = layers * (4 * width**2 + 3 * width * round(8 * width / 3 / 64) * 64)
        rows.append((row["budget"], guarded_f4(layers, width, body), float(row["acc_cr8"])))
    pairs = [(a, b) for a, b in combinations(rows, 2) if a[0] == b[0] and a[2] != b[2]]
    right = [(a[1] < b[1]) == (a[2] > b[2]) for a, b in pairs]
    clear = [ok for ok, (a, b) in zip(right, pairs, strict=True) if abs(a[2] - b[2]) >= 0.3 - 1e-9]
    assert (len(pairs), len(clear)) == (29, 24)
    assert sum(right) >= 0.85 * 29
    assert sum(clear) >= 22


def test_guarded_f4_ranks_the_held_out_morph_rows() -> None:
    groups = defaultdict(list)
    for row in shared_rows("morph_shape_loss.csv"):
        if row["in_paper_fit"] == "0":
            shape = int(row["depth"]), int(row["width"]), float(row["params_nonemb"])
            groups[row["model"].split("_")[0], row["tokens_mult"]].append((guarded_f4(*shape), float(row["train_loss"])))
    usable = [group for group in groups.values() if len(group) >= 3]
    correlations = [spearman([p for p, _ in group], [m for _, m in group]) for group in usable]
    regrets = [min(group)[1] - min(measured for _, measured in group) for group in usable]
    assert len(usable) >= 5
    assert sum(correlations) / len(correlations) >= 0.9
    assert sum(regrets) / len(regrets) <= 0.01


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    return statistics.correlation(*ranks)
