"""What this machine's memory and cores give at most, measured with the kernels' own loads and barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from deepthin.engine.arrays import F64, I32, I64
from deepthin.engine.decoder import cycles_per_second
from deepthin.engine.errors import UsageError
from deepthin.engine.kernels.bandwidth import meet_often, read_all
from deepthin.engine.kernels.sync import ctl_words
from deepthin.engine.plan import aligned_bytes
from deepthin.engine.simd import W

_SPIN_S = 200e-6


class Reader:
    """Memory of its own that threads stream through.

    Args:
        threads: each reads its part.
        num_bytes: of all parts.

    Raises:
        UsageError: fewer than one thread or vector.
    """

    def __init__(self, threads: int, num_bytes: int) -> None:
        unit = 8 * W * 4 * max(threads, 1)
        if threads < 1 or num_bytes < unit:
            raise UsageError(f"reading memory needs at least 1 thread and {unit} bytes, not {threads} and {num_bytes}")
        self._threads = threads
        self._words = aligned_bytes(num_bytes // unit * unit).view(np.float32)
        self._words[:] = 1.0  # pages exist only once written
        self._sums = np.zeros(threads, np.float32)

    def rates(self, repetitions: int, dropped: int = 1) -> F64:
        """Bytes per second of each of ``repetitions`` passes, f64 [repetitions]; ``dropped`` more are made first."""
        return self._words.nbytes / _seconds(self._threads, repetitions, self._read, dropped)

    def _read(self, tid: int, ctl: I32, spin: int, cycles: I64) -> None:
        read_all(tid, self._threads, ctl, self._words, spin, self._sums, cycles)


def read_bandwidth(threads: int, num_bytes: int, repetitions: int) -> F64:
    """Bytes per second with ``threads`` threads each streaming its part of ``num_bytes``; f64 [repetitions].

    One pass more is made first and dropped. With ``num_bytes`` well above the last-level cache this is the memory's
    rate, below it the cache's.

    Raises:
        UsageError: fewer than one thread, repetition or vector.
    """
    if repetitions < 1:
        raise UsageError(f"read_bandwidth needs at least 1 repetition, not {repetitions}")
    return Reader(threads, num_bytes).rates(repetitions)


def barrier_seconds(threads: int, repetitions: int, times: int = 200) -> F64:
    """Seconds of one barrier among ``threads`` threads, each repetition the mean of ``times``; f64 [repetitions].

    Raises:
        UsageError: fewer than two threads, or no repetition or barrier.
    """
    if threads < 2 or repetitions < 1 or times < 1:
        raise UsageError(
            f"barrier_seconds needs two threads or more and some repetitions, not {threads}, {repetitions}, {times}"
        )

    def meet(tid: int, ctl: I32, spin: int, cycles: I64) -> None:
        meet_often(tid, threads, ctl, times, spin, cycles)

    return _seconds(threads, repetitions, meet) / times


def _seconds(threads: int, repetitions: int, work: Callable[[int, I32, int, I64], None], dropped: int = 1) -> F64:
    """Seconds that ``work(tid, ctl, spin, cycles)`` of all threads takes, f64 [repetitions], after some that are dropped."""
    ctl = aligned_bytes(ctl_words(threads) * 4).view(np.int32)
    cycles = np.zeros(1, np.int64)
    spin = int(_SPIN_S * cycles_per_second())
    samples = np.empty(repetitions + dropped, np.float64)
    for index in range(len(samples)):
        others = [threading.Thread(target=work, args=(t, ctl, spin, cycles)) for t in range(1, threads)]
        for other in others:
            other.start()
        work(0, ctl, spin, cycles)
        for other in others:
            other.join()
        samples[index] = cycles[0] / cycles_per_second()
    return samples[dropped:]
