from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepthin.search.config import SearchConfig
from deepthin.search.cost import Cost
from deepthin.search.objectives import Scored
from deepthin.search.picks import choose, missing
from deepthin.search.quality.model import QualityModel
from deepthin.search.sensitivity import difference, outcome, scenarios, sensitivity_lines
from deepthin.search.space import Candidate
from tests.support.fake_costs import fake_cost
from tests.support.scored_candidates import scored

CONFIG = SearchConfig(params=60_000_000)


def real(shapes: list[tuple[str, str]], model: QualityModel) -> list[Scored]:
    from deepthin.engine.shape import Shape

    found = []
    for step, (text, quant) in enumerate(shapes):
        shape = Shape.parse(text)
        found.append(Scored(step, Candidate(shape, quant), model.predict(shape, quant), Cost.of(fake_cost(shape, quant))))
    return found


SHAPES = [
    ("L=12,d=512,heads=8,kv=2,ff=1536,vocab=49152,tied", "q8_0"),
    ("L=14,d=512,heads=8,kv=2,ff=1536,vocab=32768,tied", "q8_0"),
    ("L=18,d=512,heads=8,kv=2,ff=1536,vocab=8192,tied", "q8_0"),
    ("L=18,d=512,heads=8,kv=2,ff=1536,vocab=4096,tied", "q4_0"),
]


def test_each_assumption_is_named_and_the_other_setting_of_the_vocabulary_term_is_among_them() -> None:
    usable = real(SHAPES, CONFIG.quality)
    assert [one.name for one in scenarios(CONFIG, usable)] == ["without_vocab_term", "tokens_x0.25", "tokens_x4"]
    off = replace(CONFIG, vocab_term=False)
    usable_off = real(SHAPES, off.quality)
    found = scenarios(off, usable_off)
    assert [one.name for one in found] == ["with_vocab_term", "tokens_x0.25", "tokens_x4"]
    with_term = QualityModel().predict(usable[0].candidate.shape, "q8_0").loss
    assert found[0].loss(usable_off[0]) == pytest.approx(with_term)
    edge = replace(CONFIG, tokens=2e9)
    assert [one.name for one in scenarios(edge, real(SHAPES, edge.quality))] == ["without_vocab_term", "tokens_x4"]


def test_losses_under_an_assumption_are_those_of_a_model_that_makes_it() -> None:
    usable = real(SHAPES, CONFIG.quality)
    for one, tokens in zip(scenarios(CONFIG, usable)[1:], (2.5e10, 4e11), strict=True):
        assert one.facts["tokens"] == tokens
        for candidate in usable:
            wanted = QualityModel(tokens=tokens).predict(candidate.candidate.shape, candidate.candidate.quant).loss
            assert one.loss(candidate) == wanted


def test_changes_say_which_pick_becomes_what_and_whether_it_matters() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.3, 500, vocab_nats=0.35), scored(3, 3.1, 600)]
    picks = choose(candidates)
    found = outcome(scenarios(SearchConfig(), candidates)[0], candidates, picks)
    assert found["picks"]["best_quality"]["shape"] == candidates[1].candidate.shape.text
    change = found["changes"]["best_quality"]
    assert change["nats"] == pytest.approx(2.95 - 3.0)
    assert change["time_ratio"] == pytest.approx(0.5)
    assert not change["tied"]
    assert change["how"] == "ff 32 -> 64; 0.050 nats better there, 0.50 x the time"
    document: dict[str, Any] = {"picks": picks, "sensitivity": {"without_vocab_term": found}}
    lines = sensitivity_lines(document)
    assert lines[0] == "if vocabularies are not charged (without dL_vocab): 4 of 4 picks change"
    assert "  best_quality: ff 32 -> 64; 0.050 nats better there, 0.50 x the time" in lines
    calm = outcome(scenarios(SearchConfig(), candidates[:1])[0], candidates[:1], choose(candidates[:1]))
    assert calm["changes"] == {}
    assert sensitivity_lines({"picks": picks, "sensitivity": {"x": calm}}) == [
        "if vocabularies are not charged (without dL_vocab): no pick changes"
    ]


def test_a_change_inside_the_tie_band_is_called_a_tie() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.04, 900, vocab_nats=0.05)]
    found = outcome(scenarios(SearchConfig(), candidates)[0], candidates, choose(candidates))
    assert found["changes"]["best_quality"]["how"] == "ff 32 -> 64; tied in loss there, 0.90 x the time"


def test_differences_name_every_part_of_a_shape() -> None:
    old = scored(1, 3.0, 1000).candidate
    shape = old.shape.replace(num_layers=5, tie_word_embeddings=False, qk_norm=True, layer_sharing=2, vocab_size=100)
    assert difference(old, Candidate(shape, "q8_0")) == (
        "L 4 -> 5, vocab 32768 -> 100, share 1 -> 2, head tied -> untied, qk_norm no -> yes, quant q4_0 -> q8_0"
    )


def test_a_pick_that_cannot_be_made_says_why_and_what_to_try() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.1, 700)]
    baseline = scored(9, 3.2, 500)
    why = missing(candidates, choose(candidates, baseline=baseline), ("monad", baseline))["no_slower_than_baseline"]
    assert why.startswith(
        "every shape found is slower per text than monad in q4_0: the fastest takes 700 ms per 1,000 characters"
    )
    assert "40.0% more than its 500; a smaller --params or --bytes gives faster ones" in why
    assert "could not be timed" in missing(candidates, choose(candidates), None)["no_slower_than_baseline"]
    slow = scored(9, 3.2, 5000)
    assert missing(candidates, choose(candidates, baseline=slow), ("monad", slow)) == {}
