from __future__ import annotations

from dataclasses import replace

import pytest

from deepthin.engine.errors import UsageError
from deepthin.search.objectives import Limits, Scored, pareto_front
from deepthin.search.picks import choose, indistinguishable, reason, tied
from deepthin.search.quality.characters import tokens_per_char
from tests.support.scored_candidates import VOCAB, scored


def names(found: list[Scored]) -> list[int]:
    return [one.step for one in found]


def test_front_keeps_what_nothing_beats_in_both() -> None:
    values = [(3.0, 900), (3.1, 700), (3.05, 950), (3.2, 700), (3.3, 100), (3.0, 990)]
    candidates = [scored(name, loss, time) for name, (loss, time) in enumerate(values, 1)]
    assert names(pareto_front(candidates)) == [1, 2, 5]
    assert names(pareto_front(candidates[::-1])) == [1, 2, 5]
    assert pareto_front([]) == []


def test_times_are_per_text_with_their_interval() -> None:
    one = scored(1, 3.0, 800)
    assert one.time == pytest.approx(800)
    assert one.ms_per_kchar.value == one.time
    assert one.ms_per_kchar.low < 800 < one.ms_per_kchar.high
    assert one.ms_per_kchar.unit == one.ms_per_token.unit == "ms"
    assert one.ms_per_token.value * tokens_per_char(VOCAB) * 1000 == pytest.approx(800)
    assert len(one.ms_per_token.samples) == len(one.cost.decode.samples) == 3


def test_picks_are_best_fastest_tied_and_knee() -> None:
    candidates = [
        scored(1, 3.000, 1000),
        scored(2, 3.015, 800),  # within 0.02 of the best, fastest there
        scored(3, 3.018, 850),
        scored(4, 3.021, 500),  # just outside the band; the front turns here
        scored(5, 3.400, 450),
    ]
    picks = choose(candidates)
    assert {name: one.step for name, one in picks.items()} == {
        "best_quality": 1,
        "fastest_tied": 2,
        "knee": 4,
        "smallest_kv": 2,  # all caches are equal here, so the fastest
    }
    assert names(tied(candidates)) == [1, 2, 3]


def test_equal_losses_go_to_the_faster_one_and_equal_twins_to_one_of_them_always() -> None:
    slow, fast = scored(1, 3.0, 900), scored(2, 3.0, 800)
    assert choose([slow, fast])["best_quality"] is fast
    twins = [scored(1, 3.0, 900), scored(2, 3.0, 900)]
    assert choose(twins)["best_quality"].step == choose(twins[::-1])["best_quality"].step


def test_short_fronts_have_their_best_as_knee() -> None:
    assert choose([scored(1, 3.0, 900), scored(2, 3.5, 100)])["knee"].step == 1
    assert choose([scored(7, 3.0, 900)])["knee"].step == 7


def test_picks_can_be_repeated_without_a_doubtful_term() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.3, 500, vocab_nats=0.35), scored(3, 3.1, 600)]
    without = choose(candidates, lambda one: one.quality.without("dL_vocab"))
    assert choose(candidates)["best_quality"].step == 1
    assert {name: one.step for name, one in without.items()} == {
        "best_quality": 2,
        "fastest_tied": 2,
        "knee": 2,
        "smallest_kv": 2,
    }


def test_pick_against_a_baseline_is_the_best_that_is_no_slower() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.1, 700), scored(3, 3.05, 790), scored(4, 3.3, 300)]
    baseline = scored(9, 3.2, 800)
    picks = choose(candidates, baseline=baseline)
    assert picks["no_slower_than_baseline"].step == 3
    assert "no_slower_than_baseline" not in choose(candidates, baseline=scored(9, 3.2, 200))
    text = reason("no_slower_than_baseline", picks["no_slower_than_baseline"], candidates, ("smollm2-135m", baseline))
    assert text.startswith("of all that take no longer per text than smollm2-135m in q4_0 (800.0 ms per 1,000 characters)")


def test_smallest_cache_inside_the_tie_band_wins() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.01, 1200), scored(3, 3.5, 100)]
    shape = candidates[1].candidate.shape.replace(num_layers=2)
    candidates[1] = replace(candidates[1], candidate=replace(candidates[1].candidate, shape=shape))
    picks = choose(candidates)
    assert picks["smallest_kv"].step == 2
    assert reason("smallest_kv", picks["smallest_kv"], candidates).startswith(
        "its cache of 256 bytes a token is the smallest of the 2 that prediction cannot tell from the best, which takes 512"
    )


def test_reasons_hold_the_figures_they_argue_with() -> None:
    candidates = [scored(1, 3.0, 1000), scored(2, 3.015, 800), scored(3, 3.4, 100), scored(4, 3.2, 300)]
    picks = choose(candidates)
    texts = {name: reason(name, pick, candidates) for name, pick in picks.items()}
    assert texts["best_quality"] == "its predicted loss of 3.000 nats is the lowest of 4; 1 more are tied with it"
    assert texts["fastest_tied"].startswith("at 800.0 ms per 1,000 characters it is the fastest of the 2")
    assert texts["fastest_tied"].endswith("20% faster than that one")
    assert "0.30 x its time" in texts["knee"]


def test_ties_are_close_in_loss_and_overlap_in_time() -> None:
    pick = scored(1, 3.0, 800)
    others = [scored(2, 3.01, 810), scored(3, 3.01, 900), scored(4, 3.03, 800), scored(5, 2.99, 795)]
    assert names(indistinguishable(pick, [pick, *others])) == [5, 2]


def test_limits_are_relative_and_filter() -> None:
    one = scored(1, 3.0, 800)
    per_token = one.ms_per_token.value
    limits = Limits(ms_per_token=per_token / 2, kv_bytes=4 * 2 * 32 * 2 * 100, context=100)
    violations = limits.violations(one)
    assert violations["ms_per_token"] == pytest.approx(1.0)
    assert violations["kv_bytes"] == pytest.approx(0.0)
    assert not limits.met(one)
    assert Limits(ms_per_token=per_token, context=100).met(one)
    assert Limits().violations(one) == {}


@pytest.mark.parametrize("bad", [{"ms_per_token": 0.0}, {"kv_bytes": -1}, {"ms_per_token": float("nan")}])
def test_limits_nothing_can_meet_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        Limits(**bad)  # type: ignore[arg-type]
