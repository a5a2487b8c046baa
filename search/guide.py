"""Proposals from what is known before measuring: predicted loss is free, and time follows bytes, layers and cache closely.

Each step fits a time model to the measured candidates and proposes the point that would add most area to their front, among
those that are likely to meet the limits. What a step proposes depends on (seed, step) and the measured candidates alone, so a
resumed run goes on as an uninterrupted one.

    N candidates of the pool   F features
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.engine.arrays import F64
from deepthin.search.design import random_generator
from deepthin.search.hypervolume import corner_of, improvements, staircase
from deepthin.search.objectives import Limits, Scored
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import QualityModel
from deepthin.search.space import Candidate, Space
from deepthin.search.time_model import TimeModel, features, prompt_features

_POOL = 1536  # points drawn once for a run
_FRESH = 48  # and anew for each step
_NEIGHBOURS = 16  # of members of the front, per step
_SHORTLIST = 256  # of the pool, by the sum of features alone; only these get the correction, which costs more
_OPTIMISM = 0.5  # standard deviations that a time is taken to be shorter, so that doubtful places are visited
_SHORTLIST_OPTIMISM = 2.0
_MOST_FITTED = 512  # measured candidates, those nearest the front first: the correction costs their number cubed

Describe = Callable[[Candidate, int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A point with everything that needs no measuring."""

    point: dict[str, int]
    candidate: Candidate
    key: str
    loss: float
    per_char: float
    features: tuple[float, ...]


class Guide:
    """Proposes points for one search.

    Args:
        space: what may be proposed.
        quality: predicts the first objective.
        context: cached tokens that times are taken at.
        seed: start of every random choice.
        limits: that candidates should meet; none by default.
    """

    def __init__(self, space: Space, quality: QualityModel, context: int, seed: int, limits: Limits | None = None) -> None:
        self._space, self._quality, self._context, self._seed = space, quality, context, seed
        self._limits = limits or Limits()
        self._know = lru_cache(maxsize=1 << 15)(self._known)
        self._base: list[_Known] = []

    def propose(self, step: int, scored: Sequence[Scored], seen: set[str]) -> dict[str, int] | None:
        """The most promising point whose candidate is not in ``seen``, or None when the pool holds none.

        While nothing measured meets the limits, that is the point predicted to exceed them least; afterwards the one that
        would add most area to the front of those that do, and if none would, the one predicted to lie least behind it.

        Args:
            step: which step it is for.
            scored: what was measured, at least one candidate.
            seen: keys of candidates proposed before.
        """
        met = [one for one in scored if self._limits.met(one)]
        pool = {known.key: known for known in self._pool(step, met) if known.key not in seen}
        members = list(pool.values())
        if not members:
            return None
        excess = self._excesses(scored, members)
        if not met:
            return members[int(np.argmin(excess))].point
        usable = np.flatnonzero(excess <= 0)
        if not len(usable):
            return members[int(np.argmin(excess))].point
        return self._best([members[int(index)] for index in usable], scored, met)

    def _best(self, members: Sequence[_Known], scored: Sequence[Scored], met: Sequence[Scored]) -> dict[str, int]:
        """The point of ``members`` that is predicted to add most, or to lie least behind the front."""
        front = [(one.loss, math.log(one.time)) for one in met]
        model = self._model(self._nearest_front(scored, front), features, lambda one: one.cost.decode.value)
        rows = np.array([known.features for known in members])
        losses = np.array([known.loss for known in members])
        per_kchar = np.log(1e6 * np.array([known.per_char for known in members]))

        def gains(times: F64, of: Any) -> F64:
            pairs = np.stack([losses[of], times], axis=1)
            return improvements(front, pairs, corner_of([*front, *((x, y) for x, y in pairs.tolist())]))

        summed = model.summed(rows) + per_kchar
        rough = gains(summed - _SHORTLIST_OPTIMISM * model.spread, slice(None))
        short = np.sort(np.lexsort((_behind(front, losses, summed), -rough))[:_SHORTLIST])
        found, doubt = model.predict(rows[short])
        times = found - _OPTIMISM * doubt + per_kchar[short]
        fine = gains(times, short)
        best = np.argmax(fine) if fine.max() > 0 else np.argmin(_behind(front, losses[short], times))
        return members[int(short[int(best)])].point

    def _excesses(self, scored: Sequence[Scored], members: Sequence[_Known]) -> F64:
        """f64 [N]: predicted relative excess over the limit that is exceeded most; 0 or less where all are met."""
        limits, worst = self._limits, np.full(len(members), -1.0)
        if limits.kv_bytes is not None:
            cache = np.array([limits.context * kv_bytes_per_token(known.candidate.shape) for known in members])
            worst = np.maximum(worst, cache / limits.kv_bytes - 1)
        timed: list[tuple[float | None, Describe, Callable[[Scored], float]]] = [
            (limits.ms_per_token, features, lambda one: one.cost.decode.value),
            (limits.ttft_ms, prompt_features, lambda one: one.cost.first_token.value if one.cost.first_token else math.nan),
        ]
        for limit, describe, seconds in timed:
            if limit is not None:
                rows = np.array([describe(known.candidate, self._context) for known in members])
                found, doubt = self._model(scored[-_MOST_FITTED:], describe, seconds).predict(rows)
                worst = np.maximum(worst, 1e3 * np.exp(found - _OPTIMISM * doubt) / limit - 1)
        return worst

    def _model(
        self,
        scored: Sequence[Scored],
        describe: Describe,
        seconds: Callable[[Scored], float],
    ) -> TimeModel:
        rows = np.array([describe(one.candidate, self._context) for one in scored])
        return TimeModel(rows, np.array([seconds(one) for one in scored]))

    def _nearest_front(self, scored: Sequence[Scored], front: Sequence[tuple[float, float]]) -> Sequence[Scored]:
        """At most :data:`_MOST_FITTED` of ``scored``: those that lie least behind the front in time."""
        if len(scored) <= _MOST_FITTED:
            return scored
        behind = _behind(front, np.array([one.loss for one in scored]), np.log([one.time for one in scored]))
        return [scored[int(index)] for index in np.sort(np.argsort(behind, kind="stable")[:_MOST_FITTED])]

    def _pool(self, step: int, met: Sequence[Scored]) -> Iterator[_Known]:
        if not self._base:
            generator = random_generator(self._seed, _POOL, 1)
            self._base = [self._at(self._space.sample(generator)) for _ in range(_POOL)]
        yield from self._base
        generator = random_generator(self._seed, step, 2)
        for _ in range(_FRESH):
            yield self._at(self._space.sample(generator))
        points = self._front_points(met)
        for _ in range(_NEIGHBOURS if points else 0):
            yield self._at(self._moved(points[int(generator.integers(len(points)))], generator))

    def _front_points(self, met: Sequence[Scored]) -> list[Mapping[str, int]]:
        """Points of the measured front, as far as this process knows them by their candidates."""
        pairs = set(staircase([(one.loss, one.time) for one in met]))
        return [one.point for one in met if one.point is not None and (one.loss, one.time) in pairs]

    def _moved(self, point: Mapping[str, int], generator: np.random.Generator) -> dict[str, int]:
        """``point`` with one or two dimensions a step aside."""
        moved = dict(point)
        free = [dimension for dimension in self._space.dimensions if dimension.high > dimension.low]
        for _ in range(1 + int(generator.integers(2))):
            dimension = free[int(generator.integers(len(free)))]
            stride = max(1, round(moved[dimension.name] * 0.1)) if dimension.log else 1
            step = stride if generator.random() < 0.5 else -stride
            moved[dimension.name] = min(max(moved[dimension.name] + step, dimension.low), dimension.high)
        return moved

    def _at(self, point: Mapping[str, int]) -> _Known:
        return self._know(tuple(point.items()))

    def _known(self, items: tuple[tuple[str, int], ...]) -> _Known:
        point = dict(items)
        candidate = self._space.decode(point)
        loss = self._quality.predict(candidate.shape, candidate.quant).loss
        per_char = tokens_per_char(candidate.shape.vocab_size)
        return _Known(point, candidate, candidate.key, loss, per_char, features(candidate, self._context))


def _behind(front: Sequence[tuple[float, float]], losses: F64, times: F64) -> F64:
    """f64 [N]: how much longer each takes than the quickest of ``front`` with no more loss, as a difference of logarithms."""
    steps = np.array(staircase(front))
    at = np.clip(np.searchsorted(steps[:, 0], losses, side="right") - 1, 0, None)
    return np.asarray(times - steps[at, 1])
