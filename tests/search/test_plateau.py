from __future__ import annotations

from deepthin.search.hypervolume import Pair, corner_of, hypervolume
from deepthin.search.plateau import LEAST_MEASURED, PLATEAU_GAIN, on_plateau


def front(count: int) -> list[tuple[int, Pair]]:
    """Steps along a front, each of which adds area."""
    return [(step, (3.0 + 0.01 * step, 5.0 - 0.01 * step)) for step in range(count)]


def test_a_front_that_stands_still_is_a_plateau_only_after_the_patience() -> None:
    still = front(20) + [(step, (4.0, 6.0)) for step in range(20, 40)]  # all beaten
    assert not on_plateau(still[:30], 30, 12)
    assert on_plateau(still[:33], 33, 12)
    assert not on_plateau(still, 40, 0)  # no patience, no stop


def test_progress_in_the_last_steps_is_no_plateau() -> None:
    moving = front(20) + [(step, (4.0, 6.0)) for step in range(20, 38)] + [(38, (2.9, 4.7))]
    assert not on_plateau(moving, 39, 12)


def test_one_terrible_shape_does_not_hide_progress() -> None:
    """Area up to the worst shape ever tried would be so large that nothing counted as progress any more."""
    steps = [(0, (9.0, 40.0)), *front(20)[1:], *((step, (4.0, 6.0)) for step in range(20, 30)), (30, (3.05, 4.94))]
    pairs = [pair for _, pair in steps]
    corner = corner_of(pairs)
    gain = hypervolume(pairs, corner) / hypervolume(pairs[:-1], corner) - 1
    assert gain > PLATEAU_GAIN
    assert not on_plateau(steps, 31, 10)
    far = (9.0, 40.0)
    assert hypervolume(pairs, far) / hypervolume(pairs[:-1], far) - 1 < PLATEAU_GAIN


def test_a_few_steps_show_nothing() -> None:
    few = [(step, (3.0, 5.0)) for step in range(LEAST_MEASURED + 1)]
    assert not on_plateau(few, len(few), 2)
