"""Models that were fitted before terms were added: the new unknowns take the values that leave predictions as they were.

Only the engine's prompts that are no multiple of four tokens are predicted a little longer: lone tokens count for more.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from deepthin.profiles.latency.regression import Fitted
from deepthin.profiles.latency.runtimes import HEAD_DIMS, ROWS_TOGETHER
from deepthin.profiles.latency.terms import COLD

# before: attention cost by query heads alone, a layer cost the same from any memory, utilisation had no knots at 64 and 512 MiB
_BLENDS = {"share_at_64": ("share_at_32", "share_at_128"), "share_at_512": ("share_at_128",)}
_CONSTANTS = (
    {f"rows_{n}": math.log(n) for n in range(1, ROWS_TOGETHER + 1)}
    | {f"dim_{size}": 0.0 for size in HEAD_DIMS}
    | {f"cold_at_{knot}": 0.0 for knot in COLD}
)


def upgraded(fitted: Fitted) -> Fitted:
    """``fitted`` with the unknowns that it lacks and that this knows; the same object when it lacks none of them.

    Knots that were added are means of their neighbours, with their covariance; the rest is pinned.
    """
    missing = [name for name in (*_BLENDS, *_CONSTANTS) if name not in fitted.index]
    if not missing or any(old not in fitted.index for name in missing for old in _BLENDS.get(name, ())):
        return fitted
    known = len(fitted.names)
    blend = np.zeros((known + len(missing), known))
    blend[:known] = np.eye(known)
    added = np.zeros(known + len(missing))
    for row, name in enumerate(missing, known):
        for old in _BLENDS.get(name, ()):
            blend[row, fitted.index[old]] = 1 / len(_BLENDS[name])
        added[row] = _CONSTANTS.get(name, 0.0)
    return replace(
        fitted,
        names=(*fitted.names, *missing),
        theta=blend @ fitted.theta + added,
        covariance=blend @ fitted.covariance @ blend.T,
    )
