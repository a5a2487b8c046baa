from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import pytest

from deepthin.engine.cores import usable_cores
from deepthin.profiles.contention import (
    BarrierSentinel,
    Counters,
    MemorySentinel,
    Sentinel,
    contention_flags,
    has_moved,
    read_counters,
)

START = Counters(wall_s=0.0, busy_s=100.0, own_s=10.0, steal_s=1.0, switches=50)


def test_a_quiet_second_raises_no_flag() -> None:
    assert contention_flags(START, Counters(1.0, 102.0, 12.0, 1.0, 53)) == ()


@pytest.mark.parametrize(
    ("after", "flag"),
    [
        (Counters(1.0, 102.5 + (os.cpu_count() or 1), 12.0, 1.0, 50), "other-processes"),
        (Counters(1.0, 102.0, 12.0, 1.1 + 0.1 * (os.cpu_count() or 1), 50), "steal"),
        (Counters(1.0, 102.0, 12.0, 1.0, 250), "preempted"),
    ],
)
def test_each_disturbance_has_its_flag(after: Counters, flag: str) -> None:
    assert contention_flags(START, after) == (flag,)


def test_what_the_platform_does_not_tell_raises_no_flag() -> None:
    assert contention_flags(Counters(0.0), Counters(5.0)) == ()
    assert contention_flags(START, Counters(1.0, 500.0, None, None, None)) == ()


def test_counters_from_a_tree(tmp_path: Path) -> None:
    tick = 1.0 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
    (tmp_path / "proc/42").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  100 10 20 5000 7 3 4 9 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    numbers = ["0"] * 10 + ["300", "200"] + ["0"] * 5
    (tmp_path / "proc/42/stat").write_text(f"42 (a peer) S {' '.join(numbers)}")
    alone, with_peer = read_counters(root=tmp_path), read_counters([42], tmp_path)
    assert alone.busy_s == pytest.approx(137 * tick)
    assert alone.steal_s == pytest.approx(9 * tick)
    assert alone.own_s is not None
    assert with_peer.own_s is not None
    assert with_peer.own_s - alone.own_s == pytest.approx(500 * tick, abs=0.5)  # our own CPU time moves a little between


def test_no_proc_and_dead_peers_give_none(tmp_path: Path) -> None:
    assert read_counters(root=tmp_path).busy_s is None
    assert read_counters([999_999_999], tmp_path).own_s is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu gibberish\n")
    assert read_counters(root=tmp_path).steal_s is None


def test_sentinel_returns_seconds_and_remembers_its_fastest() -> None:
    taken = [Sentinel()() for _ in range(5)]
    assert 0 < Sentinel.fastest_s <= min(taken) < 1


def test_a_barrier_tells_how_far_apart_the_cores_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BarrierSentinel, "reference_s", {})
    assert BarrierSentinel(1)() is None
    assert BarrierSentinel(usable_cores().most + 1)() is None
    assert BarrierSentinel(2).reference() is None
    if usable_cores().most > 1:
        seconds = BarrierSentinel(2)()
        assert seconds is not None
        assert 1e-9 < seconds < 0.1
        assert BarrierSentinel(2).reference() == seconds
        BarrierSentinel(2)()
        assert BarrierSentinel(2).reference() == seconds


@pytest.mark.parametrize(("now", "reference", "moved"), [(7e-8, 8e-8, False), (7e-8, 2.8e-7, True), (2.8e-7, 7e-8, True)])
def test_cores_have_moved_when_barriers_differ_by_much(now: float, reference: float, moved: bool) -> None:
    assert has_moved(now, reference) is moved
    assert not has_moved(None, reference)
    assert not has_moved(now, None)


def test_the_memory_sentinel_reads_and_knows_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemorySentinel, "seen", deque(maxlen=3))
    assert MemorySentinel().usual() == 0.0
    rate = MemorySentinel()()
    assert 1e6 < rate < 1e14
    assert MemorySentinel().usual() == rate
    MemorySentinel.seen.extend([4e10, 1e10, 2e10])
    assert MemorySentinel().usual() == 2e10
