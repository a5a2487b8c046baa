"""Models that were fitted before terms were added: the new unknowns take the values that leave predictions as they were.

Only prompts whose tokens do not fill a runtime's unit are predicted a little longer: lone tokens count for more.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from deepthin.engine.formats import FORMATS
from deepthin.profiles.latency.regression import Fitted
from deepthin.profiles.latency.runtimes import COLD_MIB, HEAD_DIMS, ROWS_TOGETHER
from deepthin.profiles.latency.terms import KNOTS_MIB

# before: attention cost by query heads alone, a layer cost the same from any memory, and starts of rows and heads cost nothing;
# utilisation had fewer knots, between and beyond which it was interpolated as now
_NOTHING_S = 1e-18
_BLENDS = {
    "share_at_12": {"share_at_8": math.log2(16 / 12), "share_at_16": math.log2(12 / 8)},
    "share_at_24": {"share_at_16": math.log2(32 / 24), "share_at_32": math.log2(24 / 16)},
    "share_at_64": {"share_at_32": 0.5, "share_at_128": 0.5},
    "share_at_512": {"share_at_128": 1.0},
}
_CONSTANTS = (
    {f"rows_{n}": math.log(n) for n in range(1, ROWS_TOGETHER + 1)}
    | {f"dim_{size}": 0.0 for size in HEAD_DIMS}
    | {f"{name}_{knot}": 0.0 for name in ("cold_at", "row_cold_at") for knot in COLD_MIB}
    | {f"cache_at_{knot}": 0.0 for knot in KNOTS_MIB}
    | {f"row_{name}": 0.0 for name in FORMATS}
    | dict.fromkeys(("row", "head_call", "kv_call", "chunk"), math.log(_NOTHING_S))
    | {"uneven": 0.0, "lone": 1.0}
)


def upgraded(fitted: Fitted) -> Fitted:
    """``fitted`` with the unknowns that it lacks and that this knows; the same object when it lacks none of them.

    Knots that were added are means of their neighbours, with their covariance; the rest is pinned.
    """
    missing = [name for name in (*_BLENDS, *_CONSTANTS) if name not in fitted.index]
    if not missing or any(old not in fitted.index for name in missing for old in _BLENDS.get(name, {})):
        return fitted
    known = len(fitted.names)
    blend = np.zeros((known + len(missing), known))
    blend[:known] = np.eye(known)
    added = np.zeros(known + len(missing))
    for row, name in enumerate(missing, known):
        for old, weight in _BLENDS.get(name, {}).items():
            blend[row, fitted.index[old]] = weight
        added[row] = _CONSTANTS.get(name, 0.0)
    return replace(
        fitted,
        names=(*fitted.names, *missing),
        theta=blend @ fitted.theta + added,
        covariance=blend @ fitted.covariance @ blend.T,
    )
