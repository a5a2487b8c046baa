"""Proposals from what is known before measuring: predicted loss is free, and time follows bytes, layers and cache closely.

Each step fits a time model to the measured candidates and proposes the point that would add most area to their front. What a
step proposes depends on (seed, step) and the measured candidates alone, so a resumed run goes on as an uninterrupted one.

    N candidates of the pool   F features
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from deepthin.engine.accounting import count_bytes, kv_bytes_per_token
from deepthin.engine.arrays import F64
from deepthin.engine.formats import scheme_named
from deepthin.search.design import random_generator
from deepthin.search.hypervolume import improvements, staircase
from deepthin.search.objectives import Scored
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import QualityModel
from deepthin.search.space import Candidate, Space

_POOL = 1536  # points drawn once for a run
_FRESH = 48  # and anew for each step
_NEIGHBOURS = 16  # of members of the front, per step
_RIDGE = 1e-6  # of the features' own scale; some are nearly collinear
_LENGTH = 1.5  # of the correction, in standard deviations of the logarithms of the features
_NOISE = 0.01  # relative; what one measurement is uncertain by at best
_LEAST_SPREAD = 0.02
_OPTIMISM = 0.5  # standard deviations that a time is taken to be shorter, so that doubtful places are visited
_MARGIN = 0.1  # of the front's extent, beyond its ends


@dataclass(frozen=True, slots=True)
class _Known:
    """A point with everything that needs no measuring."""

    point: dict[str, int]
    candidate: Candidate
    loss: float
    features: tuple[float, ...]
    per_char: float


class Guide:
    """Proposes points for one search.

    Args:
        space: what may be proposed.
        quality: predicts the first objective.
        context: cached tokens that times are taken at.
        seed: start of every random choice.
    """

    def __init__(self, space: Space, quality: QualityModel, context: int, seed: int) -> None:
        self._space, self._quality, self._context, self._seed = space, quality, context, seed
        self._know = lru_cache(maxsize=1 << 15)(self._known)
        self._base: list[_Known] = []

    def propose(self, step: int, scored: Sequence[Scored], seen: set[str]) -> dict[str, int] | None:
        """The most promising point whose candidate is not in ``seen``, or None when the pool holds none.

        Args:
            step: which step it is for.
            scored: what was measured, at least one candidate.
            seen: keys of candidates proposed before.
        """
        pool = {known.candidate.key: known for known in self._pool(step, scored) if known.candidate.key not in seen}
        if not pool:
            return None
        members = list(pool.values())
        times = self._log_times(scored, members)
        pairs = np.stack([[known.loss for known in members], times], axis=1)
        front = [(one.loss, math.log(one.time)) for one in scored]
        gains = improvements(front, pairs, _reference([*front, *((x, y) for x, y in pairs.tolist())]))
        best = int(np.argmax(gains))
        return members[best].point if gains[best] > 0 else None

    def _pool(self, step: int, scored: Sequence[Scored]) -> Iterator[_Known]:
        if not self._base:
            generator = random_generator(self._seed, _POOL, 1)
            self._base = [self._at(self._space.sample(generator)) for _ in range(_POOL)]
        yield from self._base
        generator = random_generator(self._seed, step, 2)
        for _ in range(_FRESH):
            yield self._at(self._space.sample(generator))
        points = self._front_points(scored)
        for _ in range(_NEIGHBOURS if points else 0):
            yield self._at(self._moved(points[int(generator.integers(len(points)))], generator))

    def _front_points(self, scored: Sequence[Scored]) -> list[Mapping[str, int]]:
        """Points of the measured front, as far as this process knows them by their candidates."""
        pairs = set(staircase([(one.loss, one.time) for one in scored]))
        return [one.point for one in scored if one.point is not None and (one.loss, one.time) in pairs]

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
        return _Known(point, candidate, loss, features(candidate, self._context), tokens_per_char(candidate.shape.vocab_size))

    def _log_times(self, scored: Sequence[Scored], members: Sequence[_Known]) -> F64:
        """f64 [N]: log of the predicted milliseconds per 1,000 characters."""
        rows = np.array([features(one.candidate, self._context) for one in scored])
        seconds = np.array([one.cost.decode.value for one in scored])
        wanted = np.array([known.features for known in members])
        found, doubt = predicted_log_seconds(rows, seconds, wanted)
        return np.asarray(found - _OPTIMISM * doubt + np.log(1e6 * np.array([known.per_char for known in members])))


def features(candidate: Candidate, context: int) -> tuple[float, ...]:
    """What the time of a token is made of: a constant, layers, bytes by part, cache, and vector elements per layer."""
    shape = candidate.shape
    parts = count_bytes(shape, candidate.quant)
    head = parts.embedding if shape.tie_word_embeddings else parts.head
    body = (parts.attention + parts.mlp) * shape.layer_sharing
    wide = not scheme_named(candidate.quant).body.is_quantized
    return (
        1.0,
        float(shape.num_executed_layers),
        float(head),
        0.0 if wide else float(body),
        float(body) if wide else 0.0,
        float(context * kv_bytes_per_token(shape)),
        float(shape.num_executed_layers * (shape.hidden_size + shape.intermediate_size)),
    )


def predicted_log_seconds(rows: F64, seconds: F64, wanted: F64) -> tuple[F64, F64]:
    """Log of the seconds at ``wanted`` [N, F] from ``rows`` [M, F] measured at ``seconds`` [M], and its standard deviation.

    A non-negative sum of the features fitted in relative error, times a smooth correction: Gaussian process regression of
    what the sum leaves, since bandwidth depends on the working set and kernels on widths.
    """
    weights = _non_negative_fit(rows / seconds[:, None])
    left = np.log(seconds) - np.log(np.maximum(rows @ weights, 1e-12))
    spread = max(float(left.std()), _LEAST_SPREAD)
    centre, scale = np.log1p(rows).mean(axis=0), np.log1p(rows).std(axis=0) + 1e-9
    known, asked = ((np.log1p(x) - centre) / scale for x in (rows, wanted))
    gram = _kernel(known, known) * spread**2
    gram[np.diag_indices_from(gram)] += _NOISE**2
    factor = np.linalg.cholesky(gram)
    across = _kernel(asked, known) * spread**2
    solved = np.linalg.solve(factor, across.T)
    correction = solved.T @ np.linalg.solve(factor, left - left.mean()) + left.mean()
    doubt = np.sqrt(np.maximum(spread**2 - (solved**2).sum(axis=0), 0.0))
    return np.asarray(np.log(np.maximum(wanted @ weights, 1e-12)) + correction), np.asarray(doubt)


def _non_negative_fit(design: F64) -> F64:
    """Weights w >= 0 that bring ``design`` @ w near 1, [F]; what would turn negative is left out, worst first."""
    scale = np.maximum(np.abs(design).mean(axis=0), 1e-300)
    scaled = design / scale
    kept = list(range(design.shape[1]))
    while True:
        part = scaled[:, kept]
        gram = part.T @ part
        gram[np.diag_indices_from(gram)] += _RIDGE * len(design)
        weights = np.linalg.solve(gram, part.sum(axis=0))
        if len(kept) == 1 or weights.min() >= 0:
            break
        del kept[int(np.argmin(weights))]
    found = np.zeros(design.shape[1])
    found[kept] = np.maximum(weights, 0.0)
    return np.asarray(found / scale)


def _kernel(a: F64, b: F64) -> F64:
    """Squared-exponential similarity [N, M] of rows."""
    distance = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    return np.asarray(np.exp(-0.5 * np.maximum(distance, 0.0) / _LENGTH**2))


def _reference(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A corner a little beyond the ends of the front of ``pairs``."""
    front = staircase(pairs)
    (x_low, y_high), (x_high, y_low) = front[0], front[-1]
    return x_high + _MARGIN * (x_high - x_low or 1.0), y_high + _MARGIN * (y_high - y_low or 1.0)
