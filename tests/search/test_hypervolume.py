from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepthin.search.hypervolume import hypervolume, improvements, staircase

PAIRS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=12)


def test_area_of_a_hand_made_front() -> None:
    assert hypervolume([(1, 3), (2, 1)], (4, 4)) == 3 * 1 + 2 * 2
    assert hypervolume([(1, 3), (2, 1), (2, 3), (3, 3.5)], (4, 4)) == 7
    assert hypervolume([(5, 0), (0, 5)], (4, 4)) == hypervolume([], (4, 4)) == 0
    assert staircase([(2, 1), (1, 3), (2, 3), (1, 3)]) == [(1, 3), (2, 1)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(PAIRS, PAIRS)
def test_improvement_is_the_difference_of_areas(front: list[tuple[float, float]], extra: list[tuple[float, float]]) -> None:
    reference = (8.0, 9.0)
    candidates = np.array(extra, float).reshape(-1, 2)
    base = hypervolume(front, reference)
    wanted = [hypervolume([*front, pair], reference) - base for pair in extra]
    assert improvements(front, candidates, reference).tolist() == pytest.approx(wanted, abs=1e-9)
