"""Processes that are killed, stopped and cut off, around a real PostgreSQL server on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
import psycopg
import pytest
from optuna.trial import TrialState

from deepthin.search.fleet.url import parse_storage
from deepthin.search.run import run_search
from tests.support.fake_costs import FakeMeasure
from tests.support.fleet_process import config
from tests.support.postgres import Server
from tests.support.stored_trials import stored_trials

pytestmark = pytest.mark.fleet
ROOT = Path(__file__).resolve().parents[3]
TRIALS = 20  # sixteen of the design, announced at once; the rest one after another
LEASE_S = "60"  # longer than any test; those that wait for one to end take a short one
SHORT = ("--lease", "3")
Process = subprocess.Popen[str]


class Fleet:
    """Starts workers and askers on one database, and reads what became of it."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url, self.folder, self._stack = url, folder, stack
        self.log = folder / "log"

    def worker(self, *more: str) -> Process:
        return self._start("worker", self.url, str(self.log), "--lease", LEASE_S, *more)

    def asker(self, name: str = "run") -> Process:
        return self._start("asker", self.url, str(self.folder / name), str(TRIALS))

    def _start(self, *arguments: str) -> Process:
        command = [sys.executable, "-m", "tests.support.fleet_process", *arguments]
        started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._stack.callback(self._end, started)
        return started

    def _end(self, process: Process) -> None:
        process.kill()
        process.communicate()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def wait_for(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.01)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def measured(self, count: int) -> Callable[[], bool]:
        return lambda: sum(line.startswith("end") for line in self.lines()) >= count

    def started(self, count: int) -> Callable[[], bool]:
        return lambda: sum(line.startswith("start") for line in self.lines()) >= count

    def front(self, name: str = "run") -> bytes:
        return (self.folder / name / "front.json").read_bytes()

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return stored_trials(parse_storage(self.url).text, "study")


@pytest.fixture
def fleet(postgres_url: str, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(postgres_url, tmp_path, stack)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The front of the same search without a fleet and without accidents."""
    out = tmp_path_factory.mktemp("expected") / "run"
    run_search(config(TRIALS), measure=FakeMeasure(), out=out, remeasure=lambda shape, quant, _: FakeMeasure()(shape, quant))
    return (out / "front.json").read_bytes()


def done(process: Process, seconds: float = 100.0) -> str:
    out, error = process.communicate(timeout=seconds)
    assert process.returncode == 0, error
    return out


def check(fleet: Fleet, expected: bytes, *names: str, twice: int = 0, lost: int = 0) -> None:
    """The front is the one expected, every job is done, no trial open or doubled, nothing measured twice but what was lost."""
    for name in names or ("run",):
        assert fleet.front(name) == expected
    trials = fleet.trials()
    assert Counter(trial.state for trial in trials)[TrialState.COMPLETE] == TRIALS
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    steps = [trial.user_attrs["deepthin"]["step"] for trial in trials if trial.state is TrialState.COMPLETE]
    assert sorted(steps) == list(range(TRIALS))
    assert fleet.rows("SELECT DISTINCT state FROM deepthin_job") == [("done",)]
    assert fleet.rows("SELECT count(*) FROM deepthin_job WHERE lost > 0") == [(lost,)]
    ended = Counter(line.split(" ", 3)[3] for line in fleet.lines() if line.startswith("end"))
    assert sum(times - 1 for times in ended.values()) == twice
    open_until = 0.0
    for line in sorted((line.split() for line in fleet.lines()), key=lambda words: float(words[2])):
        if line[0] == "start" and twice == 0 and lost == 0:
            assert float(line[2]) >= open_until  # one at a time on this host
        open_until = max(open_until, float(line[2])) if line[0] == "end" else open_until


def test_two_workers_share_the_jobs_of_two_askers_on_one_study(fleet: Fleet, expected: bytes) -> None:
    workers = [fleet.worker(), fleet.worker()]
    askers = [fleet.asker("one"), fleet.asker("two")]
    for asker in askers:
        done(asker)
    for worker in workers:
        worker.terminate()
    reports = [json.loads(done(worker)) for worker in workers]
    check(fleet, expected, "one", "two")
    assert [report["ended"] for report in reports] == ["stopped", "stopped"]
    (jobs,) = fleet.rows("SELECT count(*) FROM deepthin_job")[0]
    assert sum(report["measured"] for report in reports) == jobs  # on one host either may get them all: one measures at a time
    assert fleet.rows("SELECT count(*) FROM deepthin_job WHERE token <> 1") == [(0,)]  # each was leased once


def test_a_stopped_worker_gives_its_job_back_and_a_killed_one_loses_it_until_the_lease_ends(
    fleet: Fleet, expected: bytes
) -> None:
    asker, stopped = fleet.asker(), fleet.worker("--takes", "60")
    fleet.wait_for(fleet.started(1))
    stopped.terminate()
    report = json.loads(done(stopped, 20.0))
    assert (report["measured"], report["given_back"], report["ended"]) == (0, 1, "stopped")
    assert fleet.rows("SELECT state, lost FROM deepthin_job WHERE token > 0") == [("queued", 0)]
    killed = fleet.worker("--takes", "0.5", *SHORT)
    fleet.wait_for(fleet.started(4))
    killed.kill()
    last = fleet.worker()
    done(asker)
    last.terminate()
    assert json.loads(done(last))["ended"] == "stopped"
    check(fleet, expected, lost=1)


def test_a_killed_asker_goes_on_where_it_was_and_leaves_no_open_trial(fleet: Fleet, expected: bytes) -> None:
    fleet.worker()
    for name, measured in (("run", 1), ("run", 17)):  # during the design, and one step after another
        asker = fleet.asker(name)
        fleet.wait_for(fleet.measured(measured))
        asker.kill()
        asker.wait()
        assert all(trial.state.is_finished() for trial in fleet.trials())
    done(fleet.asker("elsewhere"))  # even in another folder, as on another host
    check(fleet, expected, "elsewhere")


def test_a_late_worker_cannot_overwrite_what_its_successor_measured(fleet: Fleet, expected: bytes) -> None:
    asker, late = fleet.asker(), fleet.worker("--takes", "0.5", *SHORT)
    fleet.wait_for(fleet.started(2))
    late.send_signal(signal.SIGSTOP)
    held = fleet.rows("SELECT id FROM deepthin_job WHERE state = 'leased'")
    assert len(held) == 1
    # The stopped process still holds the file lock of this host, as it would; its successor is on another one.
    fleet.log = fleet.folder / "other" / "log"
    fleet.log.parent.mkdir()
    fleet.worker()
    fleet.wait_for(lambda: fleet.rows(f"SELECT state FROM deepthin_job WHERE id = {held[0][0]}") == [("done",)])
    (before,) = fleet.rows(f"SELECT token, worker, result FROM deepthin_job WHERE id = {held[0][0]}")
    late.send_signal(signal.SIGCONT)
    done(asker)
    late.terminate()
    assert json.loads(done(late))["lost"] == 1
    assert fleet.rows(f"SELECT token, worker, result FROM deepthin_job WHERE id = {held[0][0]}") == [before]
    assert before[0] == 2
    assert fleet.front() == expected


def test_everybody_comes_back_after_the_database_was_restarted(fleet: Fleet, expected: bytes, server: Server) -> None:
    asker, worker = fleet.asker(), fleet.worker("--takes", "0.1")
    fleet.wait_for(fleet.measured(4))
    server.stop("immediate")  # as if it had crashed
    time.sleep(0.5)
    server.start()
    done(asker)
    worker.terminate()
    done(worker)
    check(fleet, expected)
