from __future__ import annotations

from dataclasses import replace

import numpy as np
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


def test_of_equal_losses_only_the_quickest_leads() -> None:
    first, second = (known_to(scored(number, 3.0, 1000), 0.05) for number in (1, 2))
    found = front_probabilities([first, second])
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert found[first.candidate.key] == pytest.approx(0.5, abs=0.04)


def test_probabilities_say_how_often_a_member_really_leads() -> None:
    """Times scatter around what was measured as their intervals say; then shares must come out as predicted."""
    draws = np.random.Generator(np.random.PCG64(8))
    predicted, happened = [], []
    for _ in range(60):
        losses = np.sort(draws.uniform(3.0, 3.2, 10))
        centres = 1000 * np.exp(-2 * (losses - 3.0) + draws.normal(0, 0.05, 10))
        spread = 0.03
        members = [
            known_to(scored(number + 1, float(loss), float(time)), float(np.expm1(1.96 * spread)))
            for number, (loss, time) in enumerate(zip(losses, centres, strict=True))
        ]
        true = centres * np.exp(spread * draws.standard_normal(10))
        chances = front_probabilities(members)
        for index, one in enumerate(members):
            predicted.append(chances[one.candidate.key])
            happened.append(bool(np.all(true[index] < true[:index])))
    found, did = np.array(predicted), np.array(happened)
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.01)):
        inside = (found >= low) & (found < high)
        assert inside.sum() >= 20
        error = 3 * np.sqrt(0.25 / inside.sum())
        assert did[inside].mean() == pytest.approx(found[inside].mean(), abs=error)
