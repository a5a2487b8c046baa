from __future__ import annotations

from collections.abc import Mapping

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.search.budget import Budget
from deepthin.search.cost import Cost
from deepthin.search.design import random_generator
from deepthin.search.guide import Guide
from deepthin.search.objectives import Limits, Scored
from deepthin.search.quality.model import QualityModel
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


def test_proposals_meet_limits_that_arithmetic_or_the_time_model_can_judge() -> None:
    scored = costed(30)
    seen = {one.candidate.key for one in scored}
    caches = sorted(kv_bytes_per_token(one.candidate.shape) * 512 for one in scored)
    times = sorted(one.cost.decode.value for one in scored)
    limits = Limits(ms_per_token=1e3 * times[3], kv_bytes=caches[8], context=512)

    def worst(guide: Guide) -> list[float]:
        known, keys, found = list(scored), set(seen), []
        for step in range(30, 40):
            point = guide.propose(step, known, keys)
            assert point is not None
            known.append(cost_of(point, step))
            keys.add(known[-1].candidate.key)
            found.append(limits.violations(known[-1]))
        assert max(one["kv_bytes"] for one in found) <= 0 or guide is free
        return [max(one.values()) for one in found]

    free = Guide(SPACE, QUALITY, 512, 0)
    assert max(worst(Guide(SPACE, QUALITY, 512, 0, limits))) < 0.05  # the time model is not exact
    assert sum(excess > 0.05 for excess in worst(free)) >= 3  # without limits it goes elsewhere


def test_while_nothing_meets_the_limits_proposals_go_towards_them() -> None:
    scored = costed(12)
    quickest = min(one.cost.decode.value for one in scored)
    limits = Limits(ms_per_token=1e3 * 0.6 * quickest)
    guide, seen = Guide(SPACE, QUALITY, 512, 0, limits), {one.candidate.key for one in scored}
    for step in range(12, 18):
        point = guide.propose(step, scored, seen)
        assert point is not None
        scored.append(cost_of(point, step))
        seen.add(scored[-1].candidate.key)
    assert min(one.cost.decode.value for one in scored) < 0.9 * quickest


def test_what_can_add_nothing_is_still_a_proposal_near_the_front() -> None:
    space = Space(Budget(params=4_000_000), vocabs=(4096,), head_dims=(64,), kv_groups=(1,), tyings=(True,), quants=("q4_0",))
    every = {}
    for point in space.points():
        candidate = space.decode(point)
        cost = Cost.of(fake_cost(candidate.shape, candidate.quant))
        quality = QUALITY.predict(candidate.shape, candidate.quant)
        every[candidate.key] = Scored(0, candidate, quality, cost, point)
    pairs = sorted((one.loss, one.time) for one in every.values())
    front = {pair for index, pair in enumerate(pairs) if all(pair[1] < time for _, time in pairs[:index])}
    scored = [one for one in every.values() if (one.loss, one.time) in front]
    proposed = Guide(space, QUALITY, 512, 0).propose(50, scored, {one.candidate.key for one in scored})
    assert proposed is not None
    behind = sorted(min(one.time / t for loss, t in front if loss <= one.loss) for one in every.values())
    found = every[space.decode(proposed).key]
    assert min(found.time / t for loss, t in front if loss <= found.loss) <= behind[len(behind) // 3]


def cost_of(point: Mapping[str, int], step: int) -> Scored:
    """What a point is worth with made-up times."""
    candidate = SPACE.decode(point)
    cost = Cost.of(fake_cost(candidate.shape, candidate.quant))
    return Scored(step, candidate, QUALITY.predict(candidate.shape, candidate.quant), cost, dict(point))
