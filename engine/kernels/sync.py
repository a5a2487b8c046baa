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
    atomic_store,
    futex_wait,
    futex_wake,
    never_inline,
    read_cycles,
    spin_pause,
)

STOP, LOSSES, FIRST_THREAD = 0, 16, 32
# words of each thread, in three cache lines of its own: its jobs, which others write; its haste; the barriers it has reached
JOB, JOB_PARKED, HASTE, PHASE, PHASE_PARKED, THREAD_WORDS = 0, 1, 16, 32, 33, 48

SPINS_UNTIMED = 64  # some microseconds at most: a wait that ends within them never reads the cycle counter
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
def wait_while(ctl, word, parked, value, spin_cycles, briefly):
    """Return once ``ctl[word]`` differs from ``value``: the cycles waited if that took parking, else 0.

    ``ctl[parked]`` counts the sleepers for whoever changes the word; with ``briefly`` other than 0 they look again after a
    millisecond, whatever that one saw.
    """
    for _ in range(SPINS_UNTIMED):
        if atomic_load(ctl, word) != value:
            return 0
        spin_pause()
    start = read_cycles()
    spins = 0
    while atomic_load(ctl, word) == value:
        spin_pause()
        spins += 1
        if spins & 15 == 0 and read_cycles() - start > spin_cycles:
            atomic_add(ctl, parked, np.int32(1))
            while atomic_load(ctl, word) == value:
                futex_wait(ctl, word, value, briefly)
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

    Each thread counts the barriers it has reached in a word of its own and looks at those of the others: one line moves from
    core to core where a shared counter would move three times. Its own store is not waited for, so it may miss that another
    thread goes to sleep just then; sleepers therefore look again after a millisecond.

    ``spin_cycles`` must be well above the time a sleeper takes to wake, or one park leads to the next and every barrier
    costs a wake-up. A wait several times as long means that some thread has lost its core to another process: then, for
    the next waits, this thread gives its own core up almost at once, since spinning only keeps the others from running;
    and it counts the loss, which tells the caller that fewer threads might do better.
    """
    never_inline()
    if num_threads == 1:
        return
    before = atomic_load(ctl, thread_word(tid, PHASE))
    atomic_store(ctl, thread_word(tid, PHASE), np.int32(before + 1))
    if atomic_load(ctl, thread_word(tid, PHASE_PARKED)) > 0:
        futex_wake(ctl, thread_word(tid, PHASE))
    mine = thread_word(tid, HASTE)
    hasty = ctl[mine]
    longest = 0
    for other in range(num_threads):
        if other != tid:
            spin = spin_cycles // 64 if hasty > 0 else spin_cycles
            waited = wait_while(ctl, thread_word(other, PHASE), thread_word(other, PHASE_PARKED), before, spin, 1)
            longest = max(longest, waited)
    if longest > LOST_CORE * spin_cycles:
        ctl[mine] = HASTY_WAITS
        atomic_add(ctl, LOSSES, np.int32(1))
    elif hasty > 0:
        ctl[mine] = hasty - 1


@kernel
def in_step(ctl, num_threads):
    """Put the threads that a job is for at the barrier that thread 0 has reached, before the job is published."""
    phase = atomic_load(ctl, thread_word(0, PHASE))
    for tid in range(1, num_threads):
        if atomic_load(ctl, thread_word(tid, PHASE)) != phase:
            atomic_store(ctl, thread_word(tid, PHASE), phase)
