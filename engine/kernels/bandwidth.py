"""Reading memory and nothing else, and meeting other threads and nothing else: the floors a decode speed is printed beside."""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.sync import barrier
from deepthin.engine.simd import W, add, load_f32, read_cycles, reduce_add, splat


@kernel
def read_all(tid, num_threads, ctl, words, spin, sums, cycles):
    """Read this thread's part of f32 ``words`` once; thread 0 leaves the cycles all of them took in ``cycles[0]``.

    Four streams a thread, as the products have: one alone is slower, since the CPU looks ahead on each.

    ``len(words)`` is a multiple of 8 W threads; the sum is stored so that no load can be dropped.
    """
    part = len(words) // num_threads
    start, quarter = tid * part, part // 4
    a0 = splat(np.float32(0))
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    barrier(ctl, tid, num_threads, spin)
    began = read_cycles()
    for i in range(start, start + quarter, 2 * W):
        a0 = add(a0, load_f32(words, i))
        a1 = add(a1, load_f32(words, i + W))
        a2 = add(a2, load_f32(words, i + quarter))
        a3 = add(a3, load_f32(words, i + quarter + W))
        a4 = add(a4, load_f32(words, i + 2 * quarter))
        a5 = add(a5, load_f32(words, i + 2 * quarter + W))
        a6 = add(a6, load_f32(words, i + 3 * quarter))
        a7 = add(a7, load_f32(words, i + 3 * quarter + W))
    sums[tid] = reduce_add(add(add(add(a0, a1), add(a2, a3)), add(add(a4, a5), add(a6, a7))))
    barrier(ctl, tid, num_threads, spin)
    if tid == 0:
        cycles[0] = read_cycles() - began


@kernel
def meet_often(tid, num_threads, ctl, times, spin, cycles):
    """Meet the other threads ``times`` times; thread 0 leaves the cycles that took in ``cycles[0]``."""
    barrier(ctl, tid, num_threads, spin)
    began = read_cycles()
    for _ in range(times):
        barrier(ctl, tid, num_threads, spin)
    if tid == 0:
        cycles[0] = read_cycles() - began
