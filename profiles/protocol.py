"""The measuring protocol, in one place: warm up until stable, time all subjects in interleaved rounds, check, repeat or flag.

A subject is a callable that does one unit of work and returns its own readings by name ({"decode_s": 0.51}). Rounds run
every subject once, always in the same order (ABAB), so each meets the same conditions and pairs of one round can be
divided. Rounds come in batches: a batch during which another process held a CPU is set aside and taken again; an interval
wider than 3 % or a drift adds batches; when the time budget ends first, the result is flagged, never dressed up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from deepthin.engine.errors import PeerError, UsageError
from deepthin.profiles.contention import (
    FROM_OUTSIDE,
    MAX_SLOWED,
    MIN_MEMORY,
    MOVED_CORES,
    SLOW_CORE,
    SLOW_MEMORY,
    BarrierSentinel,
    Counters,
    MemorySentinel,
    Sentinel,
    contention_flags,
    has_moved,
    load_average,
    read_counters,
)
from deepthin.profiles.schema import Measured
from deepthin.profiles.statistics import drift, measured, median, paired_ratio

Subject: TypeAlias = Callable[[], Mapping[str, float]]

MAX_WIDTH = 0.03  # of an interval, relative to its median
MAX_DRIFT = 0.03  # of the sentinel or a subject, last third against first
STABLE = 0.05  # spread of the last three warm-up calls
MAX_WARMUP_CALLS = 50


@dataclass(frozen=True, slots=True)
class Rule:
    """How long and how often to measure.

    Attributes:
        rounds: rounds of one batch; the first batch is always finished.
        budget_s: seconds for warm-up and all batches together.
        patience: how many budgets to wait for an undisturbed batch while there is none; cores slowed or moved from outside are
            waited for within one, since on a shared host that may never end.
        settle_s: idle seconds before each call, so that the threads of the one before have parked.
    """

    rounds: int = 11
    budget_s: float = 10.0
    patience: float = 1.0
    settle_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse rules that measure nothing."""
        if self.rounds < 1 or self.budget_s < 0 or self.patience < 1 or self.settle_s < 0:
            raise UsageError(
                f"measuring: rounds={self.rounds}, budget_s={self.budget_s}, patience={self.patience}, "
                f"settle_s={self.settle_s}; at least one round, one budget and no negative time are needed"
            )


@dataclass(frozen=True, slots=True)
class Instruments:
    """Where time and disturbances are read; tests replace them.

    Attributes:
        clock: monotonic seconds.
        sleep: waits so many seconds.
        counters: running totals of who used the machine.
        sentinel: seconds of a fixed workload, timed after each round.
        fastest_sentinel: the fastest of it so far, from which a slowed core is told.
        barrier: seconds of a barrier among as many threads as the subjects have, asked before and after each batch; None for
            one thread.
        reference_barrier: what it should be, from which moved cores are told.
        memory: bytes per second read from memory, asked before and after each batch; None where it is not read.
        usual_memory: what it usually is, from which slowed memory is told.
    """

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    counters: Callable[[], Counters] = read_counters
    sentinel: Callable[[], float] = field(default_factory=Sentinel)
    fastest_sentinel: Callable[[], float] = lambda: Sentinel.fastest_s
    barrier: Callable[[], float | None] = lambda: None
    reference_barrier: Callable[[], float | None] = lambda: None
    memory: Callable[[], float | None] = lambda: None
    usual_memory: Callable[[], float] = lambda: 0.0

    @classmethod
    def real(cls, pids: Sequence[int] = (), threads: int = 1) -> Instruments:
        """The real ones, for subjects with ``threads`` threads; the CPU time of processes ``pids`` counts as ours."""
        barrier, memory = BarrierSentinel(threads), MemorySentinel()
        return cls(
            counters=lambda: read_counters(pids),
            barrier=barrier,
            reference_barrier=barrier.reference,
            memory=memory,
            usual_memory=memory.usual,
        )


@dataclass(frozen=True, slots=True)
class Session:
    """What a run of the protocol found.

    Attributes:
        samples: subject -> reading -> one value per kept round.
        sentinel_s: sentinel seconds of each kept round.
        barrier_s: median seconds of a barrier among the threads; None for one thread.
        flags: what speaks against all of it: ``other-processes``, ``steal``, ``preempted``, ``slow-core`` (the sentinel took
            1.2 times its fastest in most rounds of a batch), ``slow-memory`` (reads took 1.2 times as long as usual),
            ``moved-cores`` (the threads' cores are not as far apart as before), ``sentinel-drift``, ``unstable-warm-up``.
            Empty when clean.
        failures: peers that died, with their one line; they have no samples.
        rounds: rounds kept.
        discarded_rounds: rounds set aside because others used the machine meanwhile.
        wall_s: seconds the whole session took.
        load_before: load average before, if known.
        load_after: load average after, if known.
    """

    samples: Mapping[str, Mapping[str, tuple[float, ...]]]
    sentinel_s: tuple[float, ...]
    barrier_s: float | None
    flags: tuple[str, ...]
    failures: Mapping[str, str]
    rounds: int
    discarded_rounds: int
    wall_s: float
    load_before: tuple[float, float, float] | None
    load_after: tuple[float, float, float] | None

    def measured(self, subject: str, reading: str, unit: str = "s") -> Measured:
        """Median and interval of one reading."""
        return measured(self.samples[subject][reading], unit)

    def rate(self, subject: str, reading: str, amount: float, unit: str) -> Measured:
        """Median and interval of ``amount`` per second, for a reading in seconds."""
        return measured([amount / seconds for seconds in self.samples[subject][reading]], unit)

    def speed_ratio(self, subject: str, other: str, reading: str) -> Measured:
        """How many times faster than ``other`` the subject is, by pairs of one round; above 1 means faster."""
        return paired_ratio(self.samples[other][reading], self.samples[subject][reading])

    def flags_of(self, subject: str, reading: str) -> tuple[str, ...]:
        """The session's flags, plus ``wide-interval`` and ``drift`` where this reading shows them."""
        return (*self.flags, *reading_flags(self.samples[subject][reading]))

    def state_json(self) -> dict[str, Any]:
        """How the measuring went, for results: rounds, flags, load, sentinel."""
        return {
            "rounds": self.rounds,
            "discarded_rounds": self.discarded_rounds,
            "flags": list(self.flags),
            "wall_s": self.wall_s,
            "load_before": None if self.load_before is None else list(self.load_before),
            "load_after": None if self.load_after is None else list(self.load_after),
            "sentinel_s": list(self.sentinel_s),
            "barrier_s": self.barrier_s,
        }


@dataclass(slots=True)
class _Batch:
    rounds: list[dict[str, Mapping[str, float]]]
    sentinel_s: list[float]
    barrier_s: tuple[float, ...]
    contention: tuple[str, ...]
    wall_s: float


def measure(
    subjects: Mapping[str, Subject],
    rule: Rule,
    *,
    gates: Sequence[str] | None = None,
    instruments: Instruments | None = None,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Time ``subjects`` against one another.

    Args:
        subjects: what to call, by name; a subject that raises :class:`PeerError` leaves the session with its message.
        rule: rounds and budget.
        gates: readings whose intervals and drift decide whether to go on; all of them when None.
        instruments: clock and counters.
        progress: told in a few words what happens next.

    Raises:
        UsageError: there are no subjects.
    """
    if not subjects:
        raise UsageError("measuring: no subjects; name at least one thing to time")
    tools = instruments or Instruments()
    say = progress or (lambda _: None)
    start, load_before = tools.clock(), load_average()
    alive = dict(subjects)
    failures: dict[str, str] = {}
    say("warming up")
    steady = _warm_up(alive, failures, rule, tools)
    batches: list[_Batch] = []
    while alive:
        say(f"batch {len(batches) + 1} of {rule.rounds} rounds")
        batches.append(_run_batch(alive, failures, rule, tools))
        kept = _kept(batches)
        budgets = rule.patience if any(set(batch.contention) - FROM_OUTSIDE for batch in kept) else 1.0
        left = budgets * rule.budget_s - (tools.clock() - start)
        if left < batches[-1].wall_s or not _wants_more(kept, alive, gates):
            break
    kept = _kept(batches)
    flags = {flag for batch in kept for flag in batch.contention}
    sentinel_s = tuple(s for batch in kept for s in batch.sentinel_s)
    if sentinel_s and abs(drift(sentinel_s)) > MAX_DRIFT:
        flags.add("sentinel-drift")
    if not steady:
        flags.add("unstable-warm-up")
    rounds = [one for batch in kept for one in batch.rounds]
    barriers = [one for batch in kept for one in batch.barrier_s]
    return Session(
        samples={name: _by_reading([one[name] for one in rounds]) for name in alive},
        sentinel_s=sentinel_s,
        barrier_s=median(barriers) if barriers else None,
        flags=tuple(sorted(flags)),
        failures=failures,
        rounds=len(rounds),
        discarded_rounds=sum(len(batch.rounds) for batch in batches) - len(rounds),
        wall_s=tools.clock() - start,
        load_before=load_before,
        load_after=load_average(),
    )


def reading_flags(samples: Sequence[float]) -> tuple[str, ...]:
    """``wide-interval`` when the median's interval is wider than 3 % of it, ``drift`` when the last third left the first."""
    flags = []
    if len(samples) < 2 or measured(samples, "s").relative_width > MAX_WIDTH:
        flags.append("wide-interval")
    if abs(drift(samples)) > MAX_DRIFT:
        flags.append("drift")
    return tuple(flags)


def _warm_up(alive: dict[str, Subject], failures: dict[str, str], rule: Rule, tools: Instruments) -> bool:
    """Call each subject until three calls in a row agree; False when one never did within a third of the budget."""
    steady = True
    share = rule.budget_s / (3 * len(alive))
    for name in list(alive):
        end = tools.clock() + share
        taken: list[float] = []
        while len(taken) < MAX_WARMUP_CALLS:
            begin = tools.clock()
            if _call(name, alive, failures) is None:
                break
            taken.append(tools.clock() - begin)
            if _is_stable(taken) or tools.clock() > end:
                break
        steady &= name in failures or _is_stable(taken)
    return steady


def _is_stable(seconds: Sequence[float]) -> bool:
    last = seconds[-3:]
    return len(last) == 3 and max(last) - min(last) <= STABLE * min(last)


def _run_batch(alive: dict[str, Subject], failures: dict[str, str], rule: Rule, tools: Instruments) -> _Batch:
    """``rule.rounds`` rounds of all living subjects; one that dies is missing from then on."""
    first, memory = _outside(rule, tools)
    begin, before = tools.clock(), tools.counters()
    rounds: list[dict[str, Mapping[str, float]]] = []
    sentinel_s: list[float] = []
    for _ in range(rule.rounds):
        readings: dict[str, Mapping[str, float]] = {}
        for name in list(alive):
            if rule.settle_s:
                tools.sleep(rule.settle_s)
            reading = _call(name, alive, failures)
            if reading is not None:
                readings[name] = reading
        if not alive:
            break
        rounds.append(readings)
        sentinel_s.append(tools.sentinel())
    flags = contention_flags(before, tools.counters())
    if sentinel_s and median(sentinel_s) > MAX_SLOWED * tools.fastest_sentinel():
        flags = (*flags, SLOW_CORE)
    last, memory_after = _outside(rule, tools)
    if any(rate is not None and rate < MIN_MEMORY * tools.usual_memory() for rate in (memory, memory_after)):
        flags = (*flags, SLOW_MEMORY)
    barriers = tuple(one for one in (first, last) if one is not None)
    if any(has_moved(one, tools.reference_barrier()) for one in barriers):
        flags = (*flags, MOVED_CORES)
    return _Batch(rounds, sentinel_s, barriers, flags, tools.clock() - begin)


def _outside(rule: Rule, tools: Instruments) -> tuple[float | None, float | None]:
    """Barrier and memory, asked when the threads of the last call have parked."""
    if rule.settle_s:
        tools.sleep(rule.settle_s)
    return tools.barrier(), tools.memory()


def _call(name: str, alive: dict[str, Subject], failures: dict[str, str]) -> Mapping[str, float] | None:
    """Readings of one call; None when the peer died of it, which is noted."""
    try:
        return alive[name]()
    except PeerError as error:
        failures[name] = str(error)
        del alive[name]
        return None


def _kept(batches: list[_Batch]) -> list[_Batch]:
    """The undisturbed batches, or all of them when none is."""
    clean = [batch for batch in batches if not batch.contention]
    return clean or batches


def _wants_more(kept: list[_Batch], alive: Mapping[str, Subject], gates: Sequence[str] | None) -> bool:
    if not alive:
        return False
    if any(batch.contention for batch in kept):
        return True
    if abs(drift([s for batch in kept for s in batch.sentinel_s])) > MAX_DRIFT:
        return True
    rounds = [one for batch in kept for one in batch.rounds]
    for name in alive:
        for reading, samples in _by_reading([one[name] for one in rounds]).items():
            if (gates is None or reading in gates) and reading_flags(samples):
                return True
    return False


def _by_reading(readings: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    return {key: tuple(one[key] for one in readings) for key in readings[0]} if readings else {}
