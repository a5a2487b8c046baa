"""Reading memory and meeting threads: rates and times are plausible, and impossible requests are refused."""

from __future__ import annotations

import numpy as np
import pytest

from deepthin.engine.bandwidth import Reader, barrier_seconds, read_bandwidth
from deepthin.engine.errors import UsageError


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_thread_reads_its_part(threads: int) -> None:
    rates = Reader(threads, 1 << 20).rates(4, dropped=0)
    assert rates.shape == (4,)
    assert np.all((rates > 1e6) & (rates < 1e14))


def test_reading_counts_each_word_once() -> None:
    reader = Reader(2, 1 << 16)
    reader.rates(1)
    assert reader._sums.sum() == (1 << 16) / 4  # every word is 1


@pytest.mark.parametrize("threads", [2, 3])
def test_barriers_take_some_time_and_no_second(threads: int) -> None:
    seconds = barrier_seconds(threads, 3, times=50)
    assert seconds.shape == (3,)
    assert np.all((seconds > 0) & (seconds < 1))


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 thread"):
        Reader(0, 1 << 20)
    with pytest.raises(UsageError, match="at least 1 thread"):
        Reader(1, 16)
    with pytest.raises(UsageError, match="at least 1 repetition"):
        read_bandwidth(1, 1 << 20, 0)
    for threads, repetitions, times in ((1, 1, 1), (2, 0, 1), (2, 1, 0)):
        with pytest.raises(UsageError, match="two threads or more"):
            barrier_seconds(threads, repetitions, times)
