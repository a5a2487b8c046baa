"""Sustained read bandwidth of this machine, measured with the kernels' own loads."""

from __future__ import annotations

import threading

import numpy as np

from deepthin.engine.arrays import F64
from deepthin.engine.decoder import cycles_per_second
from deepthin.engine.errors import UsageError
from deepthin.engine.kernels.bandwidth import read_all
from deepthin.engine.kernels.sync import ctl_words
from deepthin.engine.plan import aligned_bytes
from deepthin.engine.simd import W


def read_bandwidth(threads: int, num_bytes: int, repetitions: int) -> F64:
    """Bytes per second with ``threads`` threads each streaming its part of ``num_bytes``; f64 [repetitions].

    One pass more is made first and dropped. With ``num_bytes`` well above the last-level cache this is the memory's
    rate, below it the cache's.

    Raises:
        UsageError: fewer than one thread, repetition or vector.
    """
    unit = 8 * W * 4 * max(threads, 1)
    if threads < 1 or repetitions < 1 or num_bytes < unit:
        raise UsageError(
            f"read_bandwidth needs threads and repetitions of at least 1 and {unit} bytes or more, not {num_bytes}"
        )
    words = aligned_bytes(num_bytes // unit * unit).view(np.float32)
    words[:] = 1.0  # pages exist only once written
    ctl = aligned_bytes(ctl_words(threads) * 4).view(np.int32)
    sums, cycles = np.zeros(threads, np.float32), np.zeros(1, np.int64)
    spin = int(200e-6 * cycles_per_second())
    samples = np.empty(repetitions + 1, np.float64)
    for index in range(repetitions + 1):
        others = [
            threading.Thread(target=read_all, args=(t, threads, ctl, words, spin, sums, cycles)) for t in range(1, threads)
        ]
        for other in others:
            other.start()
        read_all(0, threads, ctl, words, spin, sums, cycles)
        for other in others:
            other.join()
        samples[index] = words.nbytes / (cycles[0] / cycles_per_second())
    return samples[1:]
