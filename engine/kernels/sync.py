"""Waiting for other threads: spin for a bounded time, then park in the kernel until woken.

A waiter that only spins keeps the core from whoever it waits for when another process runs here, and decode collapses
(20-fold where it was measured). Words of ``ctl`` lie 64 bytes apart so that each has a cache line of its own.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.simd import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    futex_wait,
    futex_wake,
    never_inline,
    read_cycles,
    spin_pause,
)

STOP, ARRIVED, PHASE, PHASE_PARKED, LOSSES, FIRST_THREAD = 0, 16, 32, 48, 64, 80
# words of each thread, in two cache lines of its own: its jobs, which others write, and its haste
JOB, JOB_PARKED, HASTE, THREAD_WORDS = 0, 1, 16, 32

LOST_CORE = 4  # spin times after which a wait can only mean that a thread does not run
HASTY_WAITS = 64  # about two fifths of the waits of a 30-layer token


def ctl_words(num_threads: int) -> int:
    """Length of ``ctl``: the shared words, then the words of each thread."""
    return FIRST_THREAD + THREAD_WORDS * num_threads


@kernel
def thread_word(tid, word):
    """Where thread ``tid`` has ``word`` in ``ctl``."""
    return FIRST_THREAD + THREAD_WORDS * tid + word


@kernel
def cycles():
    """The cycle counter, for calibration from Python."""
    return read_cycles()


@kernel
def wait_while(ctl, word, parked, value, spin_cycles):
    """Return once ``ctl[word]`` differs from ``value``: the cycles waited if that took parking, else 0.

    ``ctl[parked]`` counts the sleepers for :func:`publish`.
    """
    start = read_cycles()
    spins = 0
    while atomic_load(ctl, word) == value:
        spin_pause()
        spins += 1
        if spins & 15 == 0 and read_cycles() - start > spin_cycles:
            atomic_add(ctl, parked, np.int32(1))
            while atomic_load(ctl, word) == value:
                futex_wait(ctl, word, value)
            atomic_add(ctl, parked, np.int32(-1))
            return read_cycles() - start
    return 0


@kernel
def publish(ctl, word, parked, value):
    """Set ``ctl[word]`` and wake whoever sleeps on it.

    The exchange and the sleepers' count are both sequentially consistent: either we see the sleeper, or it sees the value.
    """
    atomic_exchange(ctl, word, value)
    if atomic_load(ctl, parked) > 0:
        futex_wake(ctl, word)


@kernel
def barrier(ctl, tid, num_threads, spin_cycles):
    """Return once all ``num_threads`` threads have called it; writes before it are seen by all after it.

    ``spin_cycles`` must be well above the time a sleeper takes to wake, or one park leads to the next and every barrier
    costs a wake-up. A wait several times as long means that some thread has lost its core to another process: then, for
    the next waits, this thread gives its own core up almost at once, since spinning only keeps the others from running;
    and it counts the loss, which tells the caller that fewer threads might do better.
    """
    never_inline()
    if num_threads == 1:
        return
    phase = atomic_load(ctl, PHASE)
    if atomic_add(ctl, ARRIVED, np.int32(1)) == num_threads - 1:
        atomic_exchange(ctl, ARRIVED, np.int32(0))
        publish(ctl, PHASE, PHASE_PARKED, np.int32(phase + 1))
        return
    mine = thread_word(tid, HASTE)
    hasty = ctl[mine]
    waited = wait_while(ctl, PHASE, PHASE_PARKED, phase, spin_cycles // 64 if hasty > 0 else spin_cycles)
    if waited > LOST_CORE * spin_cycles:
        ctl[mine] = HASTY_WAITS
        atomic_add(ctl, LOSSES, np.int32(1))
    elif hasty > 0:
        ctl[mine] = hasty - 1
