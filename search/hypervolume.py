"""The area two objectives leave dominated, both minimised: of a front, and what a further point would add. Plain numbers.

N candidates   M members of a front   (x, y) an objective pair
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepthin.engine.arrays import F64

Pair = tuple[float, float]
_MARGIN = 0.1  # of the front's extent, beyond its ends


def staircase(points: Sequence[Pair]) -> list[Pair]:
    """The points no other beats in both, by rising x and so by falling y; one of equal points is kept."""
    front: list[Pair] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def corner_of(points: Sequence[Pair]) -> Pair:
    """A far corner for areas: a tenth of the extent of the front of ``points`` beyond its ends, so that these count too."""
    front = staircase(points)
    (x_low, y_high), (x_high, y_low) = front[0], front[-1]
    return x_high + _MARGIN * (x_high - x_low or 1.0), y_high + _MARGIN * (y_high - y_low or 1.0)


def hypervolume(points: Sequence[Pair], reference: Pair) -> float:
    """Area between the front of ``points`` and ``reference``; points beyond it count nothing."""
    inside = [(x, y) for x, y in points if x < reference[0] and y < reference[1]]
    area, ceiling = 0.0, reference[1]
    for x, y in staircase(inside):
        area += (reference[0] - x) * (ceiling - y)
        ceiling = y
    return area


def improvements(front: Sequence[Pair], candidates: F64, reference: Pair) -> F64:
    """What each candidate alone would add to the area of ``front``.

    Args:
        front: objective pairs; dominated ones may be among them.
        candidates: f64 [N, 2].
        reference: far corner.

    Returns:
        f64 [N], none negative.
    """
    inside = [(x, y) for x, y in front if x < reference[0] and y < reference[1]]
    steps = staircase(inside)
    starts = np.array([-np.inf, *(x for x, _ in steps)])  # strips between x's, each with the least y to its left
    ends = np.array([*(x for x, _ in steps), reference[0]])
    ceilings = np.array([reference[1], *(y for _, y in steps)])
    x, y = candidates[:, :1], candidates[:, 1:]
    widths = np.maximum(0.0, ends - np.maximum(starts, x))
    heights = np.maximum(0.0, ceilings - y)
    found: F64 = (widths * heights).sum(axis=1)
    return found
