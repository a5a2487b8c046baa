from __future__ import annotations

from dataclasses import replace

import pytest

from deepthin.search.membership import front_probabilities
from deepthin.search.objectives import Scored
from tests.support.scored_candidates import scored


def known_to(one: Scored, share: float) -> Scored:
    """``one`` with an interval of ``share`` of its time to each side."""
    time = one.cost.decode
    interval = replace(time, low=time.value / (1 + share), high=time.value * (1 + share))
    return replace(one, cost=replace(one.cost, decode=interval))


def test_clear_leaders_and_clear_losers() -> None:
    candidates = [
        known_to(scored(1, 3.0, 1000), 0.01),
        known_to(scored(2, 3.1, 500), 0.01),
        known_to(scored(3, 3.2, 900), 0.01),
    ]
    found = front_probabilities(candidates)
    assert [found[one.candidate.key] for one in candidates] == [1.0, 1.0, 0.0]
    assert front_probabilities(candidates[::-1]) == found


def test_equal_times_are_decided_by_half_and_precision_sharpens() -> None:
    first = known_to(scored(1, 3.0, 1000), 0.05)
    even = known_to(scored(2, 3.1, 1000), 0.05)
    assert front_probabilities([first, even])[even.candidate.key] == pytest.approx(0.5, abs=0.04)
    nearly = scored(3, 3.1, 980)
    rough, sharp = (front_probabilities([known_to(first, s), known_to(nearly, s)])[nearly.candidate.key] for s in (0.05, 0.005))
    assert 0.5 < rough < 0.9 < sharp


def test_the_best_loss_is_always_on_the_front() -> None:
    best = known_to(scored(1, 3.0, 1000), 0.5)
    assert front_probabilities([best, known_to(scored(2, 3.3, 1), 0.5)])[best.candidate.key] == 1.0
