from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepthin.engine.errors import UnsupportedError
from deepthin.engine.shape import Shape
from deepthin.profiles.schema import TokenCost
from deepthin.search.cost import MeasuringStoppedError
from deepthin.search.fleet.asker import FleetCosts, wait_for_device
from deepthin.search.fleet.database import Database
from deepthin.search.fleet.host import HostLock, host_name
from deepthin.search.fleet.jobs import Device, JobQueue, JobSpec
from deepthin.search.fleet.tables import DONE, FAILED, QUEUED
from deepthin.search.fleet.url import parse_storage
from deepthin.search.fleet.worker import Worker
from tests.support.fake_costs import fake_cost

DEVICE = Device("pi5", "f00d", "pi5-4cpu-neon", 4, "e1")
SHAPE = Shape.parse("L=3,d=64,heads=1,kv=1,ff=64,vocab=64,tied")
SPEC = JobSpec("pi5", "e1", SHAPE.text, "q4_0", 512, 4)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    database = Database(parse_storage(f"sqlite:///{tmp_path}/fleet.db"))
    yield JobQueue(database)
    database.close()


def measure(spec: JobSpec) -> TokenCost:
    return fake_cost(Shape.parse(spec.shape), spec.quant)


def test_once_measures_one_job_and_the_asker_gets_exactly_what_was_measured(queue: JobQueue, tmp_path: Path) -> None:
    worker = Worker(queue, DEVICE, "h1", HostLock(tmp_path), measure)
    costs = FleetCosts(queue, wait_for_device(queue, "pi5"), engine="e1", context=512)
    costs.announce([(SHAPE, "q4_0"), (SHAPE, "q8_0")], 0)
    assert costs.num_asked == 2
    report = worker.run(once=True)
    assert (report.measured, report.ended) == (1, "once")
    assert costs.measure(SHAPE, "q4_0") == fake_cost(SHAPE, "q4_0")
    assert queue.answer(SPEC).state == DONE
    assert costs.num_asked == 2


def test_without_jobs_it_ends_when_told_to(queue: JobQueue, tmp_path: Path) -> None:
    report = Worker(queue, DEVICE, "h1", HostLock(tmp_path), measure).run(idle_exit_s=0.0)
    assert (report.measured, report.ended) == (0, "idle")


def test_what_cannot_be_measured_fails_for_good_with_the_reason(queue: JobQueue, tmp_path: Path) -> None:
    def refuse(spec: JobSpec) -> TokenCost:
        raise UnsupportedError("no kernel for this shape")

    queue.submit(SPEC)
    report = Worker(queue, DEVICE, "h1", HostLock(tmp_path), refuse).run(idle_exit_s=0.0)
    assert (report.measured, report.failed) == (0, 1)
    assert (queue.answer(SPEC).state, queue.answer(SPEC).why) == (FAILED, "no kernel for this shape")


def test_a_bug_while_measuring_gives_the_job_back_and_is_not_swallowed(queue: JobQueue, tmp_path: Path) -> None:
    def broken(spec: JobSpec) -> TokenCost:
        raise ZeroDivisionError

    queue.submit(SPEC)
    lock = HostLock(tmp_path)
    with pytest.raises(ZeroDivisionError):
        Worker(queue, DEVICE, "h1", lock, broken).run(once=True)
    assert queue.answer(SPEC).state == QUEUED
    assert HostLock(tmp_path).acquire()


def test_a_worker_waits_while_another_process_measures_here(queue: JobQueue, tmp_path: Path) -> None:
    queue.submit(SPEC)
    other = HostLock(tmp_path)
    assert other.acquire()
    worker = Worker(queue, DEVICE, "h1", HostLock(tmp_path), measure)
    assert worker.run(idle_exit_s=0.1).measured == 0
    other.release()
    assert worker.run(once=True).measured == 1


def test_the_lease_is_renewed_while_measuring_and_a_lost_one_is_noticed(queue: JobQueue, tmp_path: Path) -> None:
    taken: list[bool] = []

    def slow(spec: JobSpec) -> TokenCost:
        time.sleep(0.6)  # twice the lease
        taken.append(queue.claim(DEVICE, "h2", "other", 60.0) is not None)
        return measure(spec)

    queue.register(DEVICE, "h2")
    queue.submit(SPEC)
    report = Worker(queue, DEVICE, "h1", HostLock(tmp_path), slow, lease_s=0.3).run(once=True)
    assert taken == [False]
    assert (report.measured, report.lost) == (1, 0)


def test_a_result_that_comes_after_the_lease_was_lost_is_thrown_away(queue: JobQueue, tmp_path: Path) -> None:
    def overtaken(spec: JobSpec) -> TokenCost:
        queue.database.run(
            lambda connection: connection.exec_driver_sql("UPDATE deepthin_job SET token = token + 1, worker = 'other'")
        )
        return measure(spec)

    queue.submit(SPEC)
    report = Worker(queue, DEVICE, "h1", HostLock(tmp_path), overtaken).run(once=True)
    assert (report.measured, report.lost) == (0, 1)
    assert queue.answer(SPEC).result is None


def test_an_asker_waits_for_the_first_worker_and_for_results_only_so_long(queue: JobQueue, tmp_path: Path) -> None:
    with pytest.raises(MeasuringStoppedError, match=r"--device pi5: no worker came within 0 s; start deepthin search worker"):
        wait_for_device(queue, "pi5", patience_s=0.0)
    Worker(queue, DEVICE, "h1", HostLock(tmp_path), measure)
    with pytest.raises(MeasuringStoppedError, match=r"--device pi4: no worker came.*; workers have served pi5; start"):
        wait_for_device(queue, "pi4", patience_s=0.0)
    device = wait_for_device(queue, "pi5")
    with pytest.raises(MeasuringStoppedError, match=r"device pi5: waiting for a measurement since .*start the same command"):
        FleetCosts(queue, device, engine="e1", context=512, patience_s=0.0).measure(SHAPE, "q4_0")
    with pytest.raises(MeasuringStoppedError, match=r"its workers run engine e1, not e2; install the same deepthin there"):
        FleetCosts(queue, device, engine="e2", context=512, patience_s=0.0).measure(SHAPE, "q4_0")


def test_a_worker_told_to_stop_ends_after_its_job(queue: JobQueue, tmp_path: Path) -> None:
    worker = Worker(queue, DEVICE, "h1", HostLock(tmp_path), measure)
    thread = threading.Thread(target=worker.run)
    thread.start()
    worker.stop()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert worker.report.ended == "stopped"


def test_host_names_tell_boots_apart_and_nothing_else(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("7d1f\n")
    other.write_text("7d20\n")
    assert host_name(one) == host_name(one) != host_name(other)
    assert len(host_name(one)) == 12
    assert host_name(tmp_path / "none") == host_name(tmp_path / "none")
