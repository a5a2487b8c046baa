from __future__ import annotations

import pytest

from deepthin.engine.accounting import count_params
from deepthin.engine.errors import UsageError
from deepthin.engine.known_shapes import known_shape
from deepthin.engine.shape import Shape
from deepthin.search.budget import Budget
from deepthin.search.quality import layer_sharing, quantisation, shape_laws, vocabulary
from deepthin.search.quality.characters import milliseconds_per_kchar
from deepthin.search.quality.model import TIE_BAND, Quality, QualityModel, check_tokens, judged_terms
from deepthin.search.quality.term import Term, strengths
from deepthin.search.space import MAX_MLP_RATIO, MLP_RATIOS, Space

SMOLLM2 = known_shape("smollm2-135m").shape


def at_fixed_bytes(megabytes: int, layers: int) -> list[Shape]:
    """One shape per MLP ratio, narrowest MLP first, all of the same depth, vocabulary and stored bytes."""
    shapes = []
    for ratio in (*MLP_RATIOS, MAX_MLP_RATIO - 0.01):
        space = Space(
            Budget(bytes=megabytes * 10**6),
            layers=(layers, layers),
            vocabs=(32768,),
            head_dims=(32,),
            kv_groups=(3,),
            mlp_ratios=(ratio,),
            tyings=(True,),
            quants=("q4_0",),
        )
        shape = space.decode({dimension.name: dimension.low for dimension in space.dimensions}).shape
        shapes.append(shape)
    return sorted(shapes, key=lambda shape: shape.intermediate_size / shape.hidden_size)


def mlp_per_attention(shape: Shape) -> float:
    params = count_params(shape)
    return params.mlp / params.attention


@pytest.mark.parametrize(("megabytes", "layers"), [(25, 8), (25, 20), (80, 16), (80, 30), (200, 24), (200, 40)])
def test_no_term_rewards_a_starved_mlp(megabytes: int, layers: int) -> None:
    # Against every wider MLP up to r = 4, the recipe F4 was fitted on; past that m_attn itself charges 0.02 nats.
    starved, *wider = at_fixed_bytes(megabytes, layers)
    own = QualityModel().predict(starved, "q4_0")
    others = [QualityModel().predict(shape, "q4_0") for shape in wider if mlp_per_attention(shape) <= 4.3]
    assert len(others) >= 3
    for other in others:
        for mine, term in zip(own.terms, other.terms, strict=True):
            assert mine.nats >= term.nats - TIE_BAND, mine.name
        for law, nats in own.terms[0].readings.items():
            assert nats >= other.terms[0].readings[law] - TIE_BAND, law
        assert own.loss >= other.loss - TIE_BAND


def test_the_check_above_would_catch_the_raw_law() -> None:
    starved, *wider = at_fixed_bytes(80, 30)
    usual = next(shape for shape in wider if 3 * shape.intermediate_size == 8 * shape.hidden_size)
    assert raw_f4(starved) < raw_f4(usual) - 1.5 * TIE_BAND


def raw_f4(shape: Shape) -> float:
    return shape_laws.f4_loss(shape.num_layers, shape.hidden_size, count_params(shape).non_embedding)


def test_prediction_of_smollm2_is_the_sum_of_its_named_terms() -> None:
    quality = QualityModel().predict(SMOLLM2, "q4_0")
    terms = {term.name: term for term in quality.terms}
    assert list(terms) == ["F4", "m_attn", "dL_vocab", "dL_kv", "dL_tie", "dL_share", "dL_quant"]
    assert quality.loss == pytest.approx(sum(term.nats for term in quality.terms))
    body = 106_168_320 + 61 * 576
    assert terms["F4"].nats == pytest.approx(shape_laws.f4_loss(*shape_laws.equivalent_shape(30, 576, body), body))
    assert terms["dL_vocab"].nats == pytest.approx(0.0005, abs=1e-4)  # the printed test vector
    assert terms["dL_kv"].nats == 0
    assert terms["dL_tie"].nats == 0.015
    assert terms["dL_quant"].nats == pytest.approx(quantisation.int4_penalty(body, 1e11, 0.5))
    assert {name for name, term in terms.items() if term.status == "judgement"} == {
        *("m_attn", "dL_kv", "dL_tie", "dL_share", "dL_quant")
    }
    assert not quality.shape_extrapolated
    assert list(quality.extrapolated) == ["dL_vocab"]  # 900 training tokens per body parameter


def test_laws_agree_once_the_shape_is_equivalent() -> None:
    # About 0.005 nats at 100-180M body, where raw F2 and F4 sit 0.04 apart.
    opinions = QualityModel().predict(SMOLLM2, "f16").terms[0].readings.values()
    assert max(opinions) - min(opinions) < 0.008


def test_quantisation_orders_formats_by_bits() -> None:
    damage = {q: QualityModel().predict(SMOLLM2, q).loss for q in ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_1")}
    assert damage["f32"] == damage["f16"] == damage["bf16"]
    assert damage["q8_0"] - damage["f16"] == pytest.approx(0.001)
    assert damage["q4_0"] == damage["q4_1"] > damage["q5_0"] > damage["q8_0"]
    assert QualityModel(int4_multiplier=quantisation.GROUP_WISE_QAT).predict(SMOLLM2, "q4_0").loss < damage["q4_0"]


def test_vocabulary_term_can_be_switched_off() -> None:
    heavy = SMOLLM2.replace(vocab_size=262144)
    on, off = QualityModel().predict(heavy, "f16"), QualityModel(vocab_term=False).predict(heavy, "f16")
    assert on.loss - off.loss == pytest.approx(vocabulary.vocab_penalty(262144, 576, count_params(heavy).non_embedding))
    assert on.loss - off.loss > 0.05
    assert on.without("dL_vocab") == pytest.approx(off.loss)
    assert "dL_vocab" not in [term.name for term in off.terms]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("L=2,d=1024,heads=16,kv=4,ff=2816,vocab=32768,tied", "layers 2 is below"),
        ("L=96,d=512,heads=8,kv=4,ff=1408,vocab=32768,tied", "layers 96 is above"),
        ("L=60,d=192,heads=3,kv=1,ff=512,vocab=32768,tied", "width 192 is below"),
        ("L=3,d=1024,heads=16,kv=8,ff=8192,vocab=32768,tied", "aspect ratio 341.3 is above"),
        ("L=12,d=384,heads=6,kv=2,ff=1024,vocab=16384,tied", "body parameters"),
        ("L=12,d=512,heads=8,kv=2,ff=3072,vocab=16384,tied", "MLP per attention parameter 7.2 is above"),
        ("L=10,d=512,heads=8,kv=4,ff=1024,vocab=16384,tied", "total parameters"),
    ],
)
def test_outside_the_fitted_data_is_said(text: str, reason: str) -> None:
    quality = QualityModel().predict(Shape.parse(text), "f16")
    found = [sentence for name in ("F4", "m_attn") for sentence in quality.extrapolated.get(name, ())]
    assert any(reason in sentence for sentence in found), found
    assert quality.shape_extrapolated


def test_training_tokens_outside_the_fitted_data_are_said() -> None:
    found = QualityModel(tokens=1e12).predict(SMOLLM2, "f16").extrapolated
    assert found["F4"] == ("training tokens 1e+12 is above the fitted 1e+10-3.5e+11",)


def test_every_term_says_where_it_is_extrapolated() -> None:
    shape = Shape.parse("L=30,d=512,heads=32,kv=1,ff=1408,vocab=2048,tied,share=2")
    found = QualityModel().predict(shape, "q4_0").extrapolated
    assert list(found) == ["dL_vocab", "dL_kv", "dL_tie", "dL_share", "dL_quant"]
    assert found["dL_vocab"][0].startswith("training tokens per body parameter 1,")
    assert found["dL_vocab"][0].endswith("is above the fitted 4-37")
    assert found["dL_vocab"][1] == "vocabulary 2,048 is below the fitted 4,096-9.626e+04"
    assert found["dL_kv"] == ("query heads per key/value head 32 is above the fitted 1-16",)
    assert found["dL_share"] == ("each block runs 2 times, and no law credits or charges that",)
    assert "dL_tie" not in QualityModel().predict(SMOLLM2, "f16").extrapolated


def test_few_tokens_per_parameter_are_where_the_vocabulary_term_was_fitted() -> None:
    assert "dL_vocab" not in QualityModel(tokens=3e9).predict(SMOLLM2, "f16").extrapolated


def shape_part(f4: float, f2: float, gem4: float) -> Term:
    return Term("F4", {"F4": f4, "F2": f2, "gem4": gem4}, "own fit", "")


def test_spread_is_the_disagreement_of_differences() -> None:
    reference, other = Quality((shape_part(3.0, 3.1, 2.9),)), Quality((shape_part(3.2, 3.25, 3.16),))
    gap = other.difference(reference)  # by law: 0.20, 0.15, 0.26
    assert gap["value"] == pytest.approx(0.2)
    assert gap["low"] == pytest.approx(0.15 - 0.02)
    assert gap["high"] == pytest.approx(0.26 + 0.02)
    shown = other.to_json(reference, doubt=0.03)
    assert shown == {
        "value": pytest.approx(3.2),
        "low": pytest.approx(3.1),
        "high": pytest.approx(3.31),
        "unit": "nats/token",
        "basis": "predicted",
    }
    same = reference.difference(reference)
    assert (same["low"], same["value"], same["high"]) == (-0.02, 0, 0.02)


def test_one_unknown_strength_counts_for_both_shapes() -> None:
    def quality(nats: float) -> Quality:
        return Quality((shape_part(3.0, 3.0, 3.0), Term("dL_quant", strengths(nats, nats / 2, 2 * nats), "judgement", "")))

    equal = quality(0.05).difference(quality(0.05))
    assert (equal["low"], equal["high"]) == (-0.02, 0.02)
    against_lossless = quality(0.05).difference(quality(0.0))
    assert against_lossless["low"] == pytest.approx(0.025 - 0.02)
    assert against_lossless["high"] == pytest.approx(0.1 + 0.02)


def test_a_term_only_one_side_has_counts_as_nothing_on_the_other() -> None:
    whole, without = QualityModel().predict(SMOLLM2, "f16"), QualityModel(vocab_term=False).predict(SMOLLM2, "f16")
    gap = whole.difference(without)
    assert gap["value"] == pytest.approx(whole.loss - without.loss)
    assert gap["low"] <= gap["value"] - 0.02 + 1e-12


def test_interval_of_a_shape_alone_holds_every_reading() -> None:
    quality = QualityModel().predict(SMOLLM2, "q4_0")
    assert quality.low < quality.loss < quality.high
    damage = next(term for term in quality.terms if term.name == "dL_quant")
    assert (damage.low, damage.high) == pytest.approx((damage.nats / 2, damage.nats * 2))
    assert quality.high - quality.low > damage.high - damage.low + 0.04


def test_judgement_terms_are_named_once_and_only_when_they_count() -> None:
    model = QualityModel()
    plain = SMOLLM2.replace(tie_word_embeddings=False)
    assert judged_terms([model.predict(plain, "f16")]) == ["m_attn"]
    assert judged_terms([model.predict(plain, "f16"), model.predict(SMOLLM2, "q4_0")]) == ["m_attn", "dL_tie", "dL_quant"]


def test_shared_layers_get_no_credit_and_say_what_was_published() -> None:
    shared = QualityModel().predict(SMOLLM2.replace(layer_sharing=2), "f16")
    term = next(term for term in shared.terms if term.name == "dL_share")
    assert (term.nats, term.low) == (0.0, -layer_sharing.PUBLISHED_GAIN)
    assert "0.7-0.8 accuracy points" in term.source
    assert judged_terms([shared])[-1] == "dL_share"
    assert QualityModel().predict(SMOLLM2.replace(layer_sharing=2), "f16").loss == QualityModel().predict(SMOLLM2, "f16").loss


def test_time_per_text_falls_with_the_vocabulary() -> None:
    assert milliseconds_per_kchar(0.004, 32768) == pytest.approx(4 * 0.252 * 1000, rel=2e-3)
    assert milliseconds_per_kchar(0.004, 4096) / milliseconds_per_kchar(0.004, 32768) == pytest.approx(1.32, abs=0.005)


@pytest.mark.parametrize("tokens", [0, -1e11, 1e20, float("nan")])
def test_token_counts_without_meaning_are_refused(tokens: float) -> None:
    with pytest.raises(UsageError, match="1e9 to 1e14"):
        check_tokens(tokens)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="q9_9"):
        QualityModel().predict(SMOLLM2, "q9_9")
