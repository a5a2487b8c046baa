"""Cores read from made-up ``/sys`` and ``/proc`` trees of machines that are not here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from deepthin.engine import cores
from deepthin.engine.cores import default_threads, linux_cores, usable_cores

CPUS = "sys/devices/system/cpu"
GROUP = "sys/fs/cgroup"


def tree(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def hybrid() -> dict[str, object]:
    """Two performance cores of two threads, one of them favoured by its clock, and four efficient cores."""
    files: dict[str, object] = {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    for cpu, (siblings, clock) in enumerate([("0-1", 5200000)] * 2 + [("2-3", 5600000)] * 2 + [("", 4200000)] * 4):
        files[f"{CPUS}/cpu{cpu}/topology/core_cpus_list"] = siblings or cpu
        files[f"{CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq"] = clock
    return files


def test_a_hybrid_intel_has_its_performance_cores_first_and_only_them_for_threads(tmp_path: Path) -> None:
    found = linux_cores(range(8), tree(tmp_path, hybrid()))
    assert (found.cpus, found.num_big, found.most) == ((2, 0, 4, 5, 6, 7), 2, 2)
    assert found.near == {0, 1, 2, 3}


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    root = tree(tmp_path, hybrid())
    assert linux_cores({1, 3, 5}, root).cpus == (3, 1, 5)
    efficient = linux_cores({4, 5, 6}, root)
    assert (efficient.cpus, efficient.num_big) == ((4, 5, 6), 3)


def test_big_little_goes_by_capacity(tmp_path: Path) -> None:
    """A phone: four little cores, three big ones, one prime core; clocks alone would call all of them alike."""
    files: dict[str, object] = {}
    for cpu, (capacity, clock) in enumerate([(325, 2000000)] * 4 + [(828, 2400000)] * 3 + [(1024, 2600000)]):
        files |= {f"{CPUS}/cpu{cpu}/cpu_capacity": capacity, f"{CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq": clock}
        files[f"{CPUS}/cpu{cpu}/topology/core_cpus_list"] = cpu
    found = linux_cores(range(8), tree(tmp_path, files))
    assert (found.cpus, found.num_big) == ((7, 4, 5, 6, 0, 1, 2, 3), 4)


def test_compact_cores_are_told_by_their_clock_and_favoured_ones_are_no_kind_of_their_own(tmp_path: Path) -> None:
    clocks = [5100000, 4950000, 3700000, 3700000]
    found = linux_cores(range(4), tree(tmp_path, {f"{CPUS}/cpu{i}/cpufreq/cpuinfo_max_freq": c for i, c in enumerate(clocks)}))
    assert (found.cpus, found.num_big) == ((0, 1, 2, 3), 2)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_threads_of_one_core_count_once(tmp_path: Path, name: str) -> None:
    files = {f"{CPUS}/cpu{cpu}/topology/{name}": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    found = linux_cores(range(8), tree(tmp_path, files))
    assert (found.cpus, found.most, found.near) == ((0, 1, 2, 3), 4, frozenset(range(8)))


@pytest.mark.parametrize(
    ("files", "quota", "most"),
    [
        ({f"{GROUP}/cpu.max": "150000 100000"}, 1.5, 1),
        ({f"{GROUP}/cpu.max": "50000 100000"}, 0.5, 1),
        ({f"{GROUP}/cpu.max": "max 100000"}, None, 4),
        ({"proc/self/cgroup": "0::/a/b", f"{GROUP}/a/cpu.max": "200000 100000", f"{GROUP}/a/b/cpu.max": "max 100000"}, 2.0, 2),
        ({"proc/self/cgroup": "0::/a/b", f"{GROUP}/cpu.max": "300000 100000", f"{GROUP}/a/b/cpu.max": "900000 100000"}, 3.0, 3),
        (
            {
                "proc/self/cgroup": "7:memory:/x\n4:cpu,cpuacct:/box",
                f"{GROUP}/cpu/box/cpu.cfs_quota_us": 250000,
                f"{GROUP}/cpu/box/cpu.cfs_period_us": 100000,
            },
            2.5,
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/",
                f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": -1,
                f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": 100000,
            },
            None,
            4,
        ),
        ({f"{GROUP}/cpu.max": "100000 0"}, None, 4),
        ({f"{GROUP}/cpu.max": "rubbish"}, None, 4),
    ],
)
def test_the_groups_quota_caps_the_threads(tmp_path: Path, files: dict[str, object], quota: float | None, most: int) -> None:
    found = linux_cores(range(4), tree(tmp_path, files))
    assert (found.quota, found.most) == (quota, most)


def test_where_nothing_can_be_read_every_cpu_is_a_core(tmp_path: Path) -> None:
    found = linux_cores({3, 1, 2}, tmp_path)
    assert (found.cpus, found.num_big, found.quota, found.most) == ((1, 2, 3), 3, None, 3)


@pytest.mark.parametrize("text", ["", "x", "1-", "-3", "0,,1"])
def test_unreadable_lists_count_as_absent(tmp_path: Path, text: str) -> None:
    found = linux_cores(range(2), tree(tmp_path, {f"{CPUS}/cpu0/topology/core_cpus_list": text}))
    assert found.cpus == (0, 1)


def test_macos_tells_performance_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {b"hw.physicalcpu": 8, b"hw.perflevel0.physicalcpu": 4}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cores, "_sysctl", told.get)
    cores._cores.cache_clear()
    try:
        found = usable_cores()
        assert (len(found.cpus), found.num_big, default_threads()) == (8, 4, 4)
    finally:
        cores._cores.cache_clear()


def test_this_machine_has_a_core() -> None:
    found = usable_cores()
    assert 1 <= found.most <= found.num_big <= len(found.cpus) == len(set(found.cpus))
