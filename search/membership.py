"""How sure it is that a candidate lies on the front, given how well its time is known. Predicted loss counts as given.

R draws   N candidates
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepthin.search.design import random_generator
from deepthin.search.objectives import Scored

_DRAWS = 2000
_INTERVAL_SDS = {"measured": 2 * 1.96, "predicted": 2 * 1.645, "published": 2 * 1.645}  # 95 % and 90 % intervals


def front_probabilities(scored: Sequence[Scored]) -> dict[str, float]:
    """By candidate key, the share of draws in which no other candidate beats it in loss and time.

    Times are drawn from log-normal distributions of their intervals' widths, independently and with a fixed seed.
    """
    ordered = sorted(scored, key=lambda one: (one.loss, one.time, one.candidate.key))
    timings = [one.ms_per_kchar for one in ordered]
    centres = np.log([timing.value for timing in timings])
    spreads = np.array([np.log(timing.high / max(timing.low, 1e-300)) / _INTERVAL_SDS[timing.basis] for timing in timings])
    draws = centres + spreads * random_generator(0, _DRAWS, 3).standard_normal((_DRAWS, len(ordered)))
    _, starts, group = np.unique([one.loss for one in ordered], return_index=True, return_inverse=True)
    quickest = np.minimum.reduceat(draws, starts, axis=1)  # of each loss, [R, distinct losses]
    better = np.full_like(quickest, np.inf)
    better[:, 1:] = np.minimum.accumulate(quickest, axis=1)[:, :-1]
    leads = (draws < better[:, group]) & (draws <= quickest[:, group])
    shares = leads.mean(axis=0)
    return {one.candidate.key: float(share) for one, share in zip(ordered, shares, strict=True)}
