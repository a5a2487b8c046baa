"""The smallest key/value cache that a search can reach: arithmetic, so a limit below it is refused before anything is timed.

At a fixed budget the cache grows with L and shrinks with the query heads per key/value head, so it is least at the fewest
layers and the widest groups; there every combination of the other choices is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.engine.errors import InfeasibleError
from deepthin.search.objectives import Limits, relaxed
from deepthin.search.space import Candidate, Space

_MOST_COMBINATIONS = 4096


@dataclass(frozen=True, slots=True)
class LeastCache:
    """The candidate with the smallest cache.

    Attributes:
        point: of the space.
        candidate: what it stands for.
        bytes_per_token: of its F16 cache.
        looked_at: distinct candidates it is the least of.
    """

    point: dict[str, int]
    candidate: Candidate
    bytes_per_token: int
    looked_at: int


@lru_cache(8)
def least_cache(space: Space) -> LeastCache:
    """The smallest cache of ``space``; beyond 4,096 combinations, of that many spread evenly over them."""
    free = [dimension for dimension in space.dimensions if dimension.name not in ("layers", "kv_group", "sharing")]
    fixed = {dimension.name: dimension.low for dimension in space.dimensions}  # of groups, the first is the widest
    total = math.prod(dimension.high - dimension.low + 1 for dimension in free)
    every = -(-total // _MOST_COMBINATIONS)
    found: dict[str, tuple[int, dict[str, int], Candidate]] = {}
    for index, values in enumerate(product(*(range(dimension.low, dimension.high + 1) for dimension in free))):
        if index % every:
            continue
        point = fixed | {dimension.name: value for dimension, value in zip(free, values, strict=True)}
        candidate = space.decode(point)
        found.setdefault(candidate.key, (kv_bytes_per_token(candidate.shape), point, candidate))
    size, point, candidate = min(found.values(), key=lambda one: (one[0], one[2].key))
    return LeastCache(point, candidate, size, len(found))


def require_cache(limits: Limits, space: Space) -> None:
    """Pass when the limit on the cache is absent, or some shape can meet it.

    Raises:
        InfeasibleError: none can; the message names the shortfall, the nearest shape, and the least that admits it.
    """
    if limits.kv_bytes is None or not limits.context:
        return
    least = least_cache(space)
    need = limits.context * least.bytes_per_token
    if need <= limits.kv_bytes:
        return
    context = limits.kv_bytes // least.bytes_per_token
    ways = f"{relaxed('kv_bytes', need)}, which that shape meets" + (f", or --context {context}" if context else "")
    raise InfeasibleError(
        f"--max-kv-mb: no shape of this search has so small a cache: the nearest ({least.candidate.key}), the least of "
        f"{least.looked_at} with the fewest layers, takes {need:,} bytes at --context {limits.context}, "
        f"{need / limits.kv_bytes - 1:.1%} over the limit of {limits.kv_bytes:,}. Smallest relaxation: {ways}"
    )
