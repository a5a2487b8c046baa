"""The queue of measurements: asked for once whoever asks, leased to one worker at a time, finished once.

A lease ends by itself when its worker stops renewing it; whoever looks next puts the job back (the reaper is everybody).
Each lease has a higher token than the one before, and only the holder of the newest can store a result, so a worker that
was taken for dead cannot overwrite what its successor measured.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, and_, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from deepthin.engine.errors import UsageError
from deepthin.search.fleet.database import Database, database_time
from deepthin.search.fleet.tables import DEVICES, DONE, FAILED, HOSTS, JOBS, LEASED, QUEUED, prepare

MOST_LOST = 3  # workers that may vanish over a job before it counts as the cause
_SEEN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that determines a measurement.

    Attributes:
        device: tag of the device.
        engine: digest of the engine that is timed.
        shape: text of the shape.
        quant: format of its body.
        context: cached tokens.
        threads: threads.
        take: 0 for the first measurement, from 1 for repeats, each of which measures anew.
    """

    device: str
    engine: str
    shape: str
    quant: str
    context: int
    threads: int
    take: int = 0

    @property
    def key(self) -> str:
        """Digest of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Lease:
    """A job that a worker holds.

    Attributes:
        job: row of the job.
        token: what proves that this lease is the newest.
        spec: what to measure.
    """

    job: int
    token: int
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job stands: ``state``, and its ``result`` once done or ``why`` it failed."""

    state: str
    result: dict[str, Any] | None
    why: str


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of the machines behind a tag.

    Attributes:
        tag: its name.
        fingerprint: of the hardware, the same for all machines of the tag.
        machine: name of the hardware, for people.
        threads: that measuring uses unless told otherwise.
        engine: digest of the engine its last worker ran.
        idle_s: seconds since a worker was last heard of.
    """

    tag: str
    fingerprint: str
    machine: str
    threads: int
    engine: str
    idle_s: float = 0.0


class JobQueue:
    """The queue in one database. Transactions lock devices, then jobs, then hosts, so that none waits for another in a circle.

    Raises:
        DeepthinError: the tables are of another version.
        MeasuringStoppedError: the database is away or refuses; so do all methods.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        prepare(database)

    # Asking

    def submit(self, spec: JobSpec) -> bool:
        """Ask for a measurement unless that was done; whether this call was the first to ask."""

        def work(connection: Connection) -> bool:
            if connection.execute(select(JOBS.c.id).where(JOBS.c.key == spec.key)).first() is not None:
                return False
            row = {**asdict(spec), "key": spec.key, "state": QUEUED, "token": 0, "lost": 0}
            try:
                with connection.begin_nested():
                    connection.execute(insert(JOBS).values(**row, created=database_time(connection)))
            except IntegrityError:  # another asker was quicker
                return False
            return True

        return self.database.run(work)

    def answer(self, spec: JobSpec) -> Answer:
        """How the job of ``spec`` stands; leases that ran out are put back on the way."""

        def work(connection: Connection) -> Answer:
            row = connection.execute(select(JOBS.c.state, JOBS.c.result, JOBS.c.why).where(JOBS.c.key == spec.key)).first()
            if row is None:
                return Answer("unknown", None, "")
            if row.state == LEASED:
                reap(connection)
            return Answer(row.state, None if row.result is None else json.loads(row.result), row.why or "")

        return self.database.run(work)

    def device(self, tag: str) -> Device | None:
        """What is known of ``tag``; None before its first worker."""

        def work(connection: Connection) -> Device | None:
            row = connection.execute(select(DEVICES).where(DEVICES.c.tag == tag)).first()
            if row is None:
                return None
            idle = max(0.0, database_time(connection) - row.seen)
            return Device(row.tag, row.fingerprint, row.machine, row.threads, row.engine, idle)

        return self.database.run(work)

    def tags(self) -> list[str]:
        """Tags that workers have served."""
        return self.database.run(
            lambda connection: list(connection.execute(select(DEVICES.c.tag).order_by(DEVICES.c.tag)).scalars())
        )

    # Working

    def register(self, device: Device, host: str) -> None:
        """Announce a worker's device.

        Raises:
            UsageError: the tag belongs to machines with other hardware.
        """

        def work(connection: Connection) -> str | None:
            now = database_time(connection)
            if connection.execute(select(HOSTS.c.host).where(HOSTS.c.host == host)).first() is None:
                _insert_unless_there(connection, insert(HOSTS).values(host=host))
            known = connection.execute(select(DEVICES).where(DEVICES.c.tag == device.tag)).first()
            if known is None:
                row = {name: getattr(device, name) for name in ("tag", "fingerprint", "machine", "threads", "engine")}
                if _insert_unless_there(connection, insert(DEVICES).values(**row, seen=now)):
                    return None
                known = connection.execute(select(DEVICES).where(DEVICES.c.tag == device.tag)).one()
            if known.fingerprint != device.fingerprint:
                return str(known.machine)
            changed = update(DEVICES).where(DEVICES.c.tag == device.tag)
            connection.execute(changed.values(threads=device.threads, engine=device.engine, seen=now))
            return None

        other = self.database.run(work)
        if other is not None:
            raise UsageError(
                f"--device {device.tag} stands for {other} in this database, but this machine is {device.machine}; times of "
                f"different machines must not mix, so choose another tag"
            )

    def claim(self, device: Device, host: str, worker: str, lease_s: float) -> Lease | None:
        """The next job of ``device`` for ``worker``, or None: none waits, or another worker measures on this host.

        Nothing else is measured on ``host`` until the lease is finished, given back or has run out.
        """

        def work(connection: Connection) -> Lease | None:
            now = database_time(connection)
            stale = and_(DEVICES.c.tag == device.tag, DEVICES.c.seen < now - _SEEN_EVERY_S)
            connection.execute(update(DEVICES).where(stale).values(seen=now, engine=device.engine))
            reap(connection, now)
            mine = and_(JOBS.c.device == device.tag, JOBS.c.engine == device.engine)
            waiting = or_(JOBS.c.state == QUEUED, and_(JOBS.c.state == LEASED, JOBS.c.worker == worker))
            query = select(JOBS).where(mine, waiting).order_by(JOBS.c.id).limit(1)
            job = connection.execute(query.with_for_update(skip_locked=True)).first()
            if job is None:
                return None
            free = or_(HOSTS.c.worker.is_(None), HOSTS.c.worker == worker, HOSTS.c.expires < now)
            taken = update(HOSTS).where(HOSTS.c.host == host, free).values(worker=worker, expires=now + lease_s)
            if connection.execute(taken).rowcount == 0:
                return None
            leased = {"state": LEASED, "token": job.token + 1, "worker": worker, "expires": now + lease_s}
            connection.execute(update(JOBS).where(JOBS.c.id == job.id).values(**leased))
            names = ("device", "engine", "shape", "quant", "context", "threads", "take")
            return Lease(job.id, job.token + 1, JobSpec(**{name: getattr(job, name) for name in names}))

        return self.database.run(work)

    def renew(self, lease: Lease, host: str, worker: str, lease_s: float) -> bool:
        """Make the lease last ``lease_s`` from now; False when it is lost to another."""

        def work(connection: Connection) -> bool:
            now = database_time(connection)
            until = now + lease_s
            connection.execute(update(DEVICES).where(DEVICES.c.tag == lease.spec.device).values(seen=now))
            held = connection.execute(update(JOBS).where(_held(lease)).values(expires=until)).rowcount == 1
            connection.execute(update(HOSTS).where(HOSTS.c.host == host, HOSTS.c.worker == worker).values(expires=until))
            return held

        return self.database.run(work)

    def finish(self, lease: Lease, host: str, worker: str, result: dict[str, Any]) -> bool:
        """Store the result; False, and nothing is stored, when the lease was lost to another."""
        return self._end(lease, host, worker, {"state": DONE, "result": json.dumps(result, allow_nan=False), "why": None})

    def fail(self, lease: Lease, host: str, worker: str, why: str) -> bool:
        """Store why it cannot be measured, for good; False when the lease was lost to another."""
        return self._end(lease, host, worker, {"state": FAILED, "why": why})

    def give_back(self, lease: Lease, host: str, worker: str) -> bool:
        """Put the job back for others, as a worker that stops in good order does."""
        return self._end(lease, host, worker, {"state": QUEUED, "worker": None, "expires": None})

    def _end(self, lease: Lease, host: str, worker: str, values: dict[str, Any]) -> bool:
        def work(connection: Connection) -> bool:
            final = values if values["state"] == QUEUED else {**values, "finished": database_time(connection)}
            ended = connection.execute(update(JOBS).where(_held(lease)).values(**final)).rowcount == 1
            free = update(HOSTS).where(HOSTS.c.host == host, HOSTS.c.worker == worker)
            connection.execute(free.values(worker=None, expires=None))
            # Tried again after a lost acknowledgement, the first try may have been stored.
            same = select(JOBS.c.state).where(JOBS.c.id == lease.job, JOBS.c.token == lease.token)
            return ended or connection.execute(same).scalar_one_or_none() == values["state"]

        return self.database.run(work)


def reap(connection: Connection, now: float | None = None) -> None:
    """Put jobs back whose leases ran out; the :data:`MOST_LOST`-th time a job is given up, or it would kill a whole fleet."""
    now = database_time(connection) if now is None else now
    over = and_(JOBS.c.state == LEASED, JOBS.c.expires < now)
    why = f"given up after {MOST_LOST} workers vanished while measuring it (out of memory, or killed)"
    ids = list(connection.execute(select(JOBS.c.id).where(over).with_for_update(skip_locked=True)).scalars())
    if not ids:
        return
    those = and_(JOBS.c.id.in_(ids), over)
    given_up = update(JOBS).where(those, JOBS.c.lost >= MOST_LOST - 1)
    connection.execute(given_up.values(state=FAILED, why=why, lost=JOBS.c.lost + 1, finished=now))
    connection.execute(update(JOBS).where(those).values(state=QUEUED, lost=JOBS.c.lost + 1, worker=None, expires=None))


def _held(lease: Lease) -> Any:
    return and_(JOBS.c.id == lease.job, JOBS.c.token == lease.token, JOBS.c.state == LEASED)


def _insert_unless_there(connection: Connection, statement: Any) -> bool:
    """Insert a row; False if another process did so just now."""
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except IntegrityError:
        return False
    return True
