"""The first candidates of a search, chosen by arithmetic alone, so that measuring starts near the front.

Half of them are the best predicted shape of each band of depths, since no arithmetic knows what depth costs here. The other
half trade predicted loss for bytes read per character. Scoring costs under a millisecond and measuring up to a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepthin.engine.accounting import bytes_read_per_token, kv_bytes_per_token
from deepthin.engine.formats import scheme_named
from deepthin.search.least_cache import least_cache
from deepthin.search.quality.characters import tokens_per_char
from deepthin.search.quality.model import QualityModel
from deepthin.search.space import Space

_POOL = 1024
_BANDS = 8
_SPREAD = 8


@dataclass(frozen=True, slots=True)
class _Guess:
    """A point of the pool with what arithmetic says about it; ``read`` is in bytes per character of text, ``cache`` a token."""

    point: dict[str, int]
    key: str
    layers: int
    quant: str
    loss: float
    read: float
    cache: int


def random_generator(seed: int, *stream: int) -> np.random.Generator:
    """A generator that depends on nothing but its arguments."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *stream])))


def initial_design(space: Space, quality: QualityModel, seed: int, most_cache: int | None = None) -> list[dict[str, int]]:
    """Up to sixteen points, no two of the same candidate; the two halves take turns, so that a short search sees both.

    Args:
        space: what may be proposed.
        quality: predicts losses.
        seed: start of every random choice.
        most_cache: bytes a token that the cache may take; then only points that meet it are taken, led by the one with the
            smallest cache, which meets it if any does.
    """
    pool = _pool(space, quality, seed)
    chosen: dict[str, _Guess] = {}
    if most_cache is not None:
        first = _guess(space, quality, least_cache(space).point)
        pool = [guess for guess in pool if guess.cache <= most_cache] or [first]
        chosen[first.key] = first
    depths, trades = _best_by_depth(pool, space), _spread_over_front(pool)
    for index in range(max(len(depths), len(trades))):
        for guess in (*depths[index : index + 1], *trades[index : index + 1]):
            chosen.setdefault(guess.key, guess)
    return [guess.point for guess in chosen.values()]


def _pool(space: Space, quality: QualityModel, seed: int) -> list[_Guess]:
    generator = random_generator(seed, _POOL)
    pool = {}
    for _ in range(_POOL):
        guess = _guess(space, quality, space.sample(generator))
        pool[guess.key] = guess
    return list(pool.values())


def _guess(space: Space, quality: QualityModel, point: dict[str, int]) -> _Guess:
    candidate = space.decode(point)
    shape, quant = candidate.shape, candidate.quant
    read = bytes_read_per_token(shape, quant) * tokens_per_char(shape.vocab_size)
    loss = quality.predict(shape, quant).loss
    return _Guess(point, candidate.key, shape.num_layers, quant, loss, read, kv_bytes_per_token(shape))


def _best_by_depth(pool: Sequence[_Guess], space: Space) -> list[_Guess]:
    """The best predicted guess of each band of equal log width; the body formats take turns. A band may be empty."""
    low, high = space.layers
    best: dict[int, _Guess] = {}
    for guess in pool:
        band = int(_BANDS * math.log(guess.layers / low) / math.log((high + 1) / low))
        body = scheme_named(guess.quant).body.name
        if body == space.quants[band % len(space.quants)] and (band not in best or guess.loss < best[band].loss):
            best[band] = guess
    return [best[band] for band in sorted(best)]


def _spread_over_front(pool: Sequence[_Guess]) -> list[_Guess]:
    """Guesses no other beats in loss and bytes, evenly spaced in rank from the best loss to the fewest bytes."""
    front: list[_Guess] = []
    for guess in sorted(pool, key=lambda guess: (guess.loss, guess.read, guess.key)):
        if not front or guess.read < front[-1].read:
            front.append(guess)
    at = np.linspace(0, len(front) - 1, min(_SPREAD, len(front)))
    return [front[int(index)] for index in np.round(at)]
