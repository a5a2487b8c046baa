"""When a search stops by itself: its last steps added next to nothing to the front."""

from __future__ import annotations

from collections.abc import Sequence

from deepthin.search.hypervolume import Pair, corner_of, hypervolume

PLATEAU_GAIN = 0.001  # relative; less than this in `patience` steps is no progress
LEAST_MEASURED = 16  # before a plateau can be seen


def on_plateau(pairs: Sequence[tuple[int, Pair]], step: int, patience: int) -> bool:
    """Whether the ``patience`` steps before ``step`` added less than :data:`PLATEAU_GAIN` to the area of the front.

    The area is taken up to a corner a tenth of the present front's extent beyond its ends: a corner at the worst candidate
    ever tried would make the area so large that real progress looked small.

    Args:
        pairs: objective pairs that meet all limits, each with its step.
        step: the step that would come next.
        patience: steps to look back; 0 never stops.
    """
    early = [pair for at, pair in pairs if at < step - patience]
    if not patience or len(early) < LEAST_MEASURED:
        return False
    every = [pair for _, pair in pairs]
    corner = corner_of(every)
    before, now = hypervolume(early, corner), hypervolume(every, corner)
    return before > 0 and now / before - 1 < PLATEAU_GAIN
