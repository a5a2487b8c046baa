from __future__ import annotations

import re

import numpy as np
import pytest

from deepthin.engine.accounting import kv_bytes_per_token
from deepthin.engine.errors import InfeasibleError
from deepthin.search.budget import Budget
from deepthin.search.design import initial_design
from deepthin.search.least_cache import least_cache, require_cache
from deepthin.search.objectives import Limits
from deepthin.search.quality.model import QualityModel
from deepthin.search.space import Space

SPACE = Space(Budget(params=20_000_000), layers=(4, 40), vocabs=(8192, 16384), head_dims=(32, 64))


def test_nothing_drawn_from_the_space_has_a_smaller_cache() -> None:
    least = least_cache(SPACE)
    assert SPACE.decode(least.point) == least.candidate
    generator = np.random.default_rng(2)
    drawn = [kv_bytes_per_token(SPACE.decode(SPACE.sample(generator)).shape) for _ in range(300)]
    assert least.bytes_per_token == kv_bytes_per_token(least.candidate.shape) <= min(drawn)
    assert least.looked_at > 1


def test_a_limit_below_it_is_refused_with_shortfall_shape_and_two_ways_out_that_are_true() -> None:
    least = least_cache(SPACE)
    limit = least.bytes_per_token * 100 - 1
    with pytest.raises(InfeasibleError) as caught:
        require_cache(Limits(kv_bytes=limit, context=512), SPACE)
    message = str(caught.value)
    assert message.startswith("--max-kv-mb: no shape of this search has so small a cache: the nearest (")
    assert least.candidate.key in message
    assert f"takes {512 * least.bytes_per_token:,} bytes at --context 512" in message
    assert f"{512 * least.bytes_per_token / limit - 1:.1%} over the limit of {limit:,}" in message
    megabytes = re.search(r"Smallest relaxation: --max-kv-mb ([\d.]+), which that shape meets, or --context (\d+)$", message)
    assert megabytes is not None
    require_cache(Limits(kv_bytes=round(float(megabytes[1]) * 1e6), context=512), SPACE)
    assert int(megabytes[2]) == 99
    require_cache(Limits(kv_bytes=limit, context=99), SPACE)
    with pytest.raises(InfeasibleError, match=r"which that shape meets$"):
        require_cache(Limits(kv_bytes=5, context=512), SPACE)


def test_no_limit_and_no_context_ask_nothing() -> None:
    require_cache(Limits(), SPACE)
    require_cache(Limits(kv_bytes=1), SPACE)
    assert Limits(kv_bytes=1).cache_per_token is None


def test_a_search_under_a_limit_starts_with_shapes_that_meet_it() -> None:
    least = least_cache(SPACE)
    for allowed in (least.bytes_per_token, 2 * least.bytes_per_token):
        design = initial_design(SPACE, QualityModel(), 0, allowed)
        assert design[0] == least.point
        assert all(kv_bytes_per_token(SPACE.decode(point).shape) <= allowed for point in design)
    assert len(design) > 4
