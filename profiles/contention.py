"""Was the machine ours while we timed? CPU time of others, stolen time, involuntary switches, and sentinel workloads.

The sentinels tell a slowed core, slowed memory, and cores that were moved apart or together.
Counters are read before and after a batch of rounds; only differences matter. Each is None where the platform does not
tell (all but the switches need Linux's ``/proc``), and None raises no flag.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

MAX_OTHER_SHARE = 0.04  # CPU seconds of other processes per second and CPU
MAX_STEAL_SHARE = 0.01  # stolen seconds per second and CPU
MAX_SWITCHES_PER_S = 30.0  # kernel housekeeping alone stays in single digits; a shared core gives hundreds
MAX_SLOWED = 1.2  # sentinel against its fastest; the core's other hyperthread at work gave 1.5 to 1.6 on a Zen 3 guest
MAX_MOVED = 1.6  # barrier against the reference, either way; the two placements seen on a Zen 5 guest are 3.8 apart
MIN_MEMORY = 0.85  # of the usual read rate; dips to 0.75 for half a second to two were seen on a Zen 5 guest
SLOW_CORE, SLOW_MEMORY, MOVED_CORES = "slow-core", "slow-memory", "moved-cores"
FROM_OUTSIDE = frozenset({SLOW_CORE, MOVED_CORES})  # by the host, for minutes; slow memory passes within seconds
CONTENTION_FLAGS = frozenset({"other-processes", "steal", "preempted", SLOW_MEMORY}) | FROM_OUTSIDE
_MEMORY_BYTES = 128 << 20
_TICKS_OF_SLACK = 3  # /proc counts in ticks, and each end of an interval can be off by one


@dataclass(frozen=True, slots=True)
class Counters:
    """Running totals at one moment.

    Attributes:
        wall_s: monotonic clock.
        busy_s: CPU seconds all processes together have used, stolen time not included.
        own_s: CPU seconds of this process and the named peers.
        steal_s: CPU seconds the hypervisor gave to other guests.
        switches: involuntary context switches of this process.
    """

    wall_s: float
    busy_s: float | None = None
    own_s: float | None = None
    steal_s: float | None = None
    switches: int | None = None


def read_counters(pids: Sequence[int] = (), root: Path = Path("/")) -> Counters:
    """The counters now; ``pids`` are peers whose CPU time counts as ours."""
    cpu = _cpu_line(root)
    tick = _tick_s()
    own = time.process_time()
    peers = [_process_s(pid, root, tick) for pid in pids]
    busy = steal = None
    if cpu is not None:
        user, nice, system, _idle, _wait, irq, softirq, stolen = cpu
        busy, steal = (user + nice + system + irq + softirq) * tick, stolen * tick
    return Counters(
        wall_s=time.perf_counter(),
        busy_s=busy,
        own_s=None if None in peers else own + sum(s for s in peers if s is not None),
        steal_s=steal,
        switches=_switches(),
    )


def contention_flags(before: Counters, after: Counters) -> tuple[str, ...]:
    """Why the time between two readings was not ours alone: ``other-processes``, ``steal``, ``preempted``."""
    wall = max(after.wall_s - before.wall_s, 1e-9)
    slack = _TICKS_OF_SLACK * _tick_s()
    cpus = os.cpu_count() or 1
    flags = []
    busy, own = _difference(before.busy_s, after.busy_s), _difference(before.own_s, after.own_s)
    if busy is not None and own is not None and busy - own > MAX_OTHER_SHARE * wall * cpus + slack:
        flags.append("other-processes")
    steal = _difference(before.steal_s, after.steal_s)
    if steal is not None and steal > MAX_STEAL_SHARE * wall * cpus + slack:
        flags.append("steal")
    switches = _difference(before.switches, after.switches)
    if switches is not None and switches > MAX_SWITCHES_PER_S * wall + 5:
        flags.append("preempted")
    return tuple(flags)


def load_average() -> tuple[float, float, float] | None:
    """Runnable processes averaged over 1, 5 and 15 minutes; None on Windows."""
    return os.getloadavg() if hasattr(os, "getloadavg") else None


class Sentinel:
    """A small fixed workload that lives in the first-level cache; calling it returns its seconds, best of five.

    Timed in every round, it tells a slower core from a slower subject: a lower clock, another kind of core, or another guest on
    the core's other hyperthread, which no counter of this machine shows. It touches some 12 KiB, so it evicts nothing.

    Attributes:
        fastest_s: the fastest seen in this process.
    """

    fastest_s: ClassVar[float] = float("inf")

    def __init__(self) -> None:
        self._x = np.linspace(0.5, 1.5, 1024, dtype=np.float32)
        self._y = np.empty_like(self._x)

    def __call__(self) -> float:
        """Seconds."""
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(30):
                np.sqrt(self._x, out=self._y)
                np.multiply(self._x, self._y, out=self._y)
            best = min(best, time.perf_counter() - start)
        Sentinel.fastest_s = min(Sentinel.fastest_s, best)
        return best


class BarrierSentinel:
    """How far apart the cores are that our threads run on, as the seconds of one barrier among them; None for one thread.

    The host of a virtual machine moves its CPUs about. On a Zen 5 guest two meet in 75 ns or in 280 ns, for seconds to
    minutes each, in all likelihood with one last-level cache or with one each: then a model of 42 MB decodes 1.4 times faster,
    and one of many small layers two times slower. Nothing else tells. Takes some 2 ms.

    Attributes:
        reference_s: threads -> the placement that measurements of this process belong to; the first seen, unless it was set.
    """

    reference_s: ClassVar[dict[int, float]] = {}

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __call__(self) -> float | None:
        """Seconds; None for one thread, and for more threads than equal cores, which share them anyhow."""
        from deepthin.engine.bandwidth import barrier_seconds  # loads the kernels
        from deepthin.engine.cores import usable_cores

        if self._threads < 2 or self._threads > usable_cores().most:
            return None
        seconds = float(barrier_seconds(self._threads, 3).min())
        self.reference_s.setdefault(self._threads, seconds)
        return seconds

    def reference(self) -> float | None:
        """The reference of this thread count; None before the first call."""
        return self.reference_s.get(self._threads)


class MemorySentinel:
    """Bytes per second that one thread reads from 128 MiB of its own, which on a shared host others slow down now and then.

    Takes some 3 ms, and leaves the caches cold.

    Attributes:
        seen: what was read in this process, the last ones.
    """

    seen: ClassVar[deque[float]] = deque(maxlen=201)
    _reader: ClassVar[Any] = None

    def __call__(self) -> float:
        """Bytes per second."""
        if MemorySentinel._reader is None:
            from deepthin.engine.bandwidth import Reader  # loads the kernels

            MemorySentinel._reader = Reader(1, _MEMORY_BYTES)
            MemorySentinel._reader.rates(1)
        rate = float(MemorySentinel._reader.rates(1, dropped=0)[0])
        self.seen.append(rate)
        return rate

    def usual(self) -> float:
        """The median of what was seen; 0 for nothing."""
        return float(np.median(self.seen)) if self.seen else 0.0


def has_moved(barrier_s: float | None, reference_s: float | None) -> bool:
    """Whether two barriers were met on cores of other distances; never where one is unknown."""
    if not barrier_s or not reference_s:
        return False
    return max(barrier_s / reference_s, reference_s / barrier_s) > MAX_MOVED


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _cpu_line(root: Path) -> list[int] | None:
    """First eight columns of the ``cpu`` line of /proc/stat: user nice system idle iowait irq softirq steal, in ticks."""
    try:
        first = (root / "proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except (OSError, UnicodeDecodeError):
        return None
    columns = first[1:9]
    return [int(x) for x in columns] if len(columns) == 8 and all(x.isdigit() for x in columns) else None


def _process_s(pid: int, root: Path, tick: float) -> float | None:
    """User and system seconds of process ``pid``."""
    try:
        text = (root / f"proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    columns = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return (int(columns[11]) + int(columns[12])) * tick if len(columns) > 12 else None


def _tick_s() -> float:
    return 1.0 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


def _switches() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
