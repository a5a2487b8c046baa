from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.search.fleet.database import Database
from deepthin.search.fleet.jobs import MOST_LOST, Device, JobQueue, JobSpec, Lease
from deepthin.search.fleet.tables import DONE, FAILED, JOBS, LEASED, META, QUEUED
from deepthin.search.fleet.url import parse_storage

DEVICE = Device("pi5", "f00d", "pi5-4cpu-neon", 4, "e1")
SPEC = JobSpec("pi5", "e1", "L=3,d=64,heads=1,kv=1,ff=64,vocab=64,tied", "q4_0", 512, 4)
RESULT = {"seconds": 0.1}
LEASE_S = 60.0


@pytest.fixture(autouse=True)
def registered(queue: JobQueue) -> None:
    for host in ("h1", "h2"):
        queue.register(DEVICE, host)


def claimed(queue: JobQueue, host: str = "h1", worker: str = "w1", lease_s: float = LEASE_S, device: Device = DEVICE) -> Lease:
    lease = queue.claim(device, host, worker, lease_s)
    assert lease is not None
    return lease


def let_run_out(queue: JobQueue) -> None:
    """Leases end now, as if their time had passed."""
    queue.database.run(lambda connection: connection.execute(update(JOBS).where(JOBS.c.state == LEASED).values(expires=0.0)))


def row(queue: JobQueue) -> Any:
    def work(connection: Connection) -> Any:
        return connection.execute(select(JOBS)).one()

    return queue.database.run(work)


def test_a_measurement_is_asked_for_once_whoever_asks(queue: JobQueue, url: str) -> None:
    other = JobQueue(Database(parse_storage(url)))
    assert queue.submit(SPEC)
    assert not other.submit(SPEC)
    assert not queue.submit(SPEC)
    claimed(queue)
    assert other.claim(DEVICE, "h2", "w2", LEASE_S) is None
    other.database.close()


@pytest.mark.parametrize(
    "changed",
    [{"device": "x"}, {"engine": "e2"}, {"shape": "other"}, {"quant": "q8_0"}, {"context": 1}, {"threads": 1}, {"take": 1}],
)
def test_everything_that_determines_a_result_is_part_of_its_key(changed: dict[str, Any]) -> None:
    assert replace(SPEC, **changed).key != SPEC.key
    assert replace(SPEC).key == SPEC.key


def test_jobs_are_done_in_the_order_asked_and_results_are_final(queue: JobQueue) -> None:
    second = replace(SPEC, quant="q8_0")
    queue.submit(SPEC)
    queue.submit(second)
    lease = claimed(queue)
    assert lease.spec == SPEC
    assert queue.answer(SPEC).state == LEASED
    assert queue.finish(lease, "h1", "w1", RESULT)
    assert (queue.answer(SPEC).state, queue.answer(SPEC).result) == (DONE, RESULT)
    assert not queue.submit(SPEC)
    assert claimed(queue).spec == second


def test_one_measurement_at_a_time_on_a_host_whatever_the_tag(queue: JobQueue) -> None:
    phone = replace(DEVICE, tag="other")
    queue.register(phone, "h1")
    queue.submit(SPEC)
    queue.submit(replace(SPEC, quant="q8_0"))
    queue.submit(replace(SPEC, device="other"))
    lease = claimed(queue)
    assert queue.claim(DEVICE, "h1", "w2", LEASE_S) is None
    assert queue.claim(phone, "h1", "w3", LEASE_S) is None
    assert claimed(queue, "h2", "w4").spec.quant == "q8_0"  # another machine of the same kind
    assert queue.finish(lease, "h1", "w1", RESULT)
    assert claimed(queue, "h1", "w3", device=phone).spec.device == "other"


def test_a_lease_that_ran_out_goes_to_the_next_and_the_late_worker_cannot_overwrite(queue: JobQueue) -> None:
    queue.submit(SPEC)
    late = claimed(queue, "h1", "w1", lease_s=0.05)
    time.sleep(0.1)
    newer = claimed(queue, "h2", "w2")
    assert newer.token > late.token
    assert not queue.renew(late, "h1", "w1", LEASE_S)
    assert not queue.finish(late, "h1", "w1", {"seconds": 666.0})
    assert not queue.fail(late, "h1", "w1", "too late")
    assert not queue.give_back(late, "h1", "w1")
    assert queue.answer(SPEC).state == LEASED
    assert queue.finish(newer, "h2", "w2", RESULT)
    assert not queue.finish(late, "h1", "w1", {"seconds": 666.0})
    assert queue.answer(SPEC).result == RESULT


def test_renewing_keeps_a_lease(queue: JobQueue) -> None:
    queue.submit(SPEC)
    lease = claimed(queue, lease_s=0.05)
    assert queue.renew(lease, "h1", "w1", LEASE_S)
    time.sleep(0.1)
    assert queue.claim(DEVICE, "h2", "w2", LEASE_S) is None
    assert queue.finish(lease, "h1", "w1", RESULT)


def test_whoever_waits_for_an_answer_puts_a_dead_workers_job_back(queue: JobQueue) -> None:
    queue.submit(SPEC)
    claimed(queue)
    let_run_out(queue)
    queue.answer(SPEC)
    found = row(queue)
    assert (found.state, found.worker, found.expires, found.lost) == (QUEUED, None, None, 1)


def test_a_job_that_kills_its_workers_is_given_up(queue: JobQueue) -> None:
    queue.submit(SPEC)
    for turn in range(MOST_LOST):
        claimed(queue, worker=f"w{turn}")
        let_run_out(queue)
        queue.database.run(lambda connection: connection.exec_driver_sql("UPDATE deepthin_host SET worker = NULL"))
    assert queue.claim(DEVICE, "h1", "w", LEASE_S) is None
    answer = queue.answer(SPEC)
    assert answer.state == FAILED
    assert answer.why.startswith("given up after 3 workers vanished while measuring it")


def test_a_job_given_back_is_free_at_once_and_counts_as_no_loss(queue: JobQueue) -> None:
    queue.submit(SPEC)
    assert queue.give_back(claimed(queue), "h1", "w1")
    assert row(queue).lost == 0
    assert claimed(queue, "h1", "w2").spec == SPEC


def test_storing_again_after_a_lost_acknowledgement_is_no_loss(queue: JobQueue) -> None:
    queue.submit(SPEC)
    lease = claimed(queue)
    assert queue.finish(lease, "h1", "w1", RESULT)
    assert queue.finish(lease, "h1", "w1", RESULT)


def test_a_worker_whose_claim_was_not_acknowledged_gets_the_same_job_again(queue: JobQueue) -> None:
    queue.submit(SPEC)
    first = claimed(queue)
    again = claimed(queue)
    assert again.job == first.job
    assert not queue.finish(first, "h1", "w1", RESULT)
    assert queue.finish(again, "h1", "w1", RESULT)


def test_workers_take_jobs_of_their_own_engine_only(queue: JobQueue) -> None:
    queue.submit(replace(SPEC, engine="e2"))
    assert queue.claim(DEVICE, "h1", "w1", LEASE_S) is None
    assert claimed(queue, device=replace(DEVICE, engine="e2")).spec.engine == "e2"


def test_a_tag_stands_for_one_kind_of_machine(queue: JobQueue) -> None:
    with pytest.raises(
        UsageError, match=r"--device pi5 stands for pi5-4cpu-neon in this database, but this machine is xeon.*tag"
    ):
        queue.register(replace(DEVICE, fingerprint="beef", machine="xeon"), "h1")
    found = queue.device("pi5")
    assert found is not None
    assert replace(found, idle_s=0.0) == DEVICE
    assert queue.device("none") is None


def test_tables_of_another_version_are_refused(queue: JobQueue, url: str) -> None:
    queue.database.run(lambda connection: connection.execute(update(META).values(value="7")))
    with pytest.raises(DeepthinError, match=r"its tables are of version 7, but this deepthin needs 1; use the same deepthin"):
        JobQueue(queue.database)
