"""The CPU cores this process may use: one CPU of each physical core, the fast ones first, within the group's quota.

Linux tells through ``/sys``, ``/proc`` and the affinity mask, macOS through ``sysctl``. What cannot be read counts as absent:
then every CPU is a core of one kind. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_SIBLINGS = ("core_cpus_list", "thread_siblings_list")  # the same; the second is the name before Linux 5.4
_BIG_SHARE = (
    0.75  # cores below this share of the highest clock are another kind: Zen 4c reaches 0.72, favoured cores differ by 0.05
)
_BIG_CAPACITY = 0.5  # likewise for what Linux calls capacity on arm64: little cores have 0.25 to 0.45 of the largest


@dataclass(frozen=True, slots=True)
class Cores:
    """Where threads may run.

    Attributes:
        cpus: one CPU number per physical core, the fastest kind first.
        num_big: how many of them are of the fastest kind.
        quota: CPUs' worth of time the control group grants, None where nothing limits it.
        near: CPU numbers of the big cores with their second threads.
    """

    cpus: tuple[int, ...]
    num_big: int
    quota: float | None = None
    near: frozenset[int] = frozenset()

    @property
    def most(self) -> int:
        """Most threads that can be of use: the big cores, or the whole CPUs that the quota pays for."""
        return self.num_big if self.quota is None else max(1, min(self.num_big, int(self.quota)))


def default_threads() -> int:
    """Threads to use where nothing is measured: one per big core, within the quota."""
    return usable_cores().most


def usable_cores() -> Cores:
    """The cores of this machine that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return _cores(frozenset(affinity(0)) if affinity else frozenset())


@functools.cache
def _cores(allowed: frozenset[int]) -> Cores:
    if allowed:
        return linux_cores(allowed)
    count = os.cpu_count() or 1
    big = count
    if sys.platform == "darwin":
        count = _sysctl(b"hw.physicalcpu") or count
        big = _sysctl(b"hw.perflevel0.physicalcpu") or count
    return Cores(tuple(range(count)), min(big, count))


def linux_cores(allowed: Collection[int], root: Path = Path("/")) -> Cores:
    """The cores that the CPU numbers ``allowed`` lie on.

    Args:
        allowed: the affinity mask.
        root: folder that stands for ``/`` (tests give their own).
    """
    cpus = root / "sys/devices/system/cpu"
    seen: dict[frozenset[int], list[int]] = {}  # CPUs of a core -> those allowed
    for cpu in sorted(allowed):
        texts = (_text(cpus / f"cpu{cpu}/topology/{name}") for name in _SIBLINGS)
        siblings = next((found for text in texts if (found := _numbers(text))), frozenset((cpu,)))
        seen.setdefault(siblings | {cpu}, []).append(cpu)
    firsts = [members[0] for members in seen.values()]
    clocks = {cpu: _number(cpus / f"cpu{cpu}/cpufreq/cpuinfo_max_freq") for cpu in firsts}
    capacities = {cpu: _number(cpus / f"cpu{cpu}/cpu_capacity") for cpu in firsts}
    performance = _numbers(_text(root / "sys/devices/cpu_core/cpus"))  # Intel's hybrids name theirs
    big = set(firsts)
    if performance & big:
        big &= performance
    elif all(capacities.values()):
        big = {cpu for cpu in firsts if capacities[cpu] > _BIG_CAPACITY * max(capacities.values())}
    elif all(clocks.values()):
        big = {cpu for cpu in firsts if clocks[cpu] >= _BIG_SHARE * max(clocks.values())}
    order = sorted(firsts, key=lambda cpu: (cpu not in big, -capacities[cpu], -clocks[cpu], cpu))
    near = frozenset(cpu for members in seen.values() if members[0] in big for cpu in members)
    return Cores(tuple(order), len(big), _quota(root), near)


def _quota(root: Path) -> float | None:
    """The smallest quota of this process's control group and those it lies in, in CPUs."""
    found: list[float] = []
    for line in (_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = [Path(part) for part in (path.strip("/"), *(str(p) for p in Path(path.strip("/")).parents))]
        if not controllers:  # version 2
            for folder in {root / "sys/fs/cgroup" / part for part in inside}:
                limit, _, period = (_text(folder / "cpu.max") or "").partition(" ")
                found += _share(limit, period)
        elif "cpu" in controllers.split(","):
            for folder in {root / "sys/fs/cgroup" / top / part for part in inside for top in ("cpu", controllers)}:
                limit, period = (_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
                found += _share(limit, period)
    return min(found, default=None)


def _share(limit: str, period: str) -> list[float]:
    """Quota over period, in a list; empty without a limit (``max``, -1) or where the numbers make no sense."""
    try:
        share = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return []
    return [share] if share > 0 else []


def _numbers(text: str | None) -> frozenset[int]:
    """``0-3,8`` as a set; empty where the text is none."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        found.update(range(int(first), min(int(last or first), int(first) + 4096) + 1))
    return frozenset(found)


def _number(path: Path) -> int:
    text = _text(path) or ""
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _sysctl(key: bytes) -> int | None:
    """An integer of macOS by name; None where there is none.

    Source: sysctlbyname(3); Apple documents hw.perflevel0.physicalcpu for its performance cores.
    """
    try:
        libc = ctypes.CDLL(None)
        value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        failed = libc.sysctlbyname(key, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    except (AttributeError, OSError, TypeError):
        return None
    return None if failed else value.value
