from __future__ import annotations

import math

import numpy as np
import pytest

from deepthin.search.budget import Budget
from deepthin.search.cost import Cost
from deepthin.search.design import random_generator
from deepthin.search.guide import Guide, features, predicted_log_seconds
from deepthin.search.objectives import Scored
from deepthin.search.quality.model import QualityModel
from deepthin.search.sampler import EXHAUSTIVE, GUIDED, NSGA2, choose_sampler
from deepthin.search.space import Space
from tests.support.fake_costs import fake_cost

SPACE = Space(Budget(params=20_000_000), vocabs=(8192, 16384, 32768))
QUALITY = QualityModel()


def costed(count: int, seed: int = 0, space: Space = SPACE) -> list[Scored]:
    """Random candidates with made-up times."""
    generator, found = random_generator(seed), []
    for step in range(count):
        point = space.sample(generator)
        candidate = space.decode(point)
        cost = Cost.of(fake_cost(candidate.shape, candidate.quant))
        found.append(Scored(step, candidate, QUALITY.predict(candidate.shape, candidate.quant), cost, point))
    return found


def test_time_model_learns_from_few_measurements() -> None:
    known, unknown = costed(24), costed(60, seed=1)
    rows, wanted = (np.array([features(one.candidate, 512) for one in part]) for part in (known, unknown))
    logs, doubt = predicted_log_seconds(rows, np.array([one.cost.decode.value for one in known]), wanted)
    errors = np.abs(logs - np.log([one.cost.decode.value for one in unknown]))
    assert float(np.median(errors)) < 0.03  # the made-up times hold 1 % of noise
    assert doubt.min() >= 0
    again, certain = predicted_log_seconds(rows, np.array([one.cost.decode.value for one in known]), rows)
    assert np.abs(again - np.log([one.cost.decode.value for one in known])).max() < 0.05
    assert certain.mean() < doubt.mean()


def test_one_measurement_is_enough_to_go_on() -> None:
    (one,) = costed(1)
    row = np.array([features(one.candidate, 512)])
    logs, _ = predicted_log_seconds(row, np.array([one.cost.decode.value]), row)
    assert math.isclose(float(logs[0]), math.log(one.cost.decode.value), abs_tol=0.1)


def test_proposals_are_new_depend_on_nothing_else_and_beat_chance() -> None:
    scored = costed(20)
    seen = {one.candidate.key for one in scored}
    point = Guide(SPACE, QUALITY, 512, 0).propose(20, scored, seen)
    assert point is not None
    assert point == Guide(SPACE, QUALITY, 512, 0).propose(20, scored, seen)
    candidate = SPACE.decode(point)
    assert candidate.key not in seen
    cost = Cost.of(fake_cost(candidate.shape, candidate.quant))
    one = Scored(20, candidate, QUALITY.predict(candidate.shape, candidate.quant), cost)
    assert not any(other.loss <= one.loss and other.time <= one.time for other in scored)  # it is on the front


def test_nothing_is_proposed_when_everything_was_seen() -> None:
    space = Space(
        Budget(params=20_000_000),
        layers=(8, 9),
        vocabs=(8192,),
        head_dims=(64,),
        kv_groups=(1,),
        mlp_ratios=(2.0,),
        tyings=(True,),
        quants=("q4_0",),
    )
    scored = costed(3, space=space)
    keys = {space.decode(point).key for point in space.points()}
    assert Guide(space, QUALITY, 512, 0).propose(3, scored, keys) is None


@pytest.mark.parametrize(
    ("points", "trials", "name"),
    [(40, 48, EXHAUSTIVE), (10**6, 48, GUIDED), (10**6, 600, GUIDED), (10**6, 5000, NSGA2), (6000, 9000, NSGA2)],
)
def test_rule_by_size_and_trials(points: int, trials: int, name: str) -> None:
    choice = choose_sampler(points, trials)
    assert choice.name == name
    assert str(trials) in choice.why or f"{points}" in choice.why
