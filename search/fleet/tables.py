"""The tables beside Optuna's: devices and hosts with their leases, jobs with their results, locks of studies.

Times are seconds of the database's clock. States of a job: ``queued``, ``leased``, ``done``, ``failed``; the last two are
final, and a final row is never written again.
"""

from __future__ import annotations

import random
import time

from sqlalchemy import Column, Connection, Double, Index, Integer, MetaData, String, Table, Text, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from deepthin.engine.errors import DeepthinError
from deepthin.search.fleet.database import Database

SCHEMA_VERSION = 1
QUEUED, LEASED, DONE, FAILED = "queued", "leased", "done", "failed"
_ATTEMPTS = 6
_metadata = MetaData()

META = Table(
    "deepthin_meta", _metadata, Column("name", String(32), primary_key=True), Column("value", String(64), nullable=False)
)
DEVICES = Table(
    "deepthin_device",
    _metadata,
    Column("tag", String(64), primary_key=True),
    Column("fingerprint", String(64), nullable=False),  # of the hardware; one tag, one kind of machine
    Column("machine", String(200), nullable=False),  # for people
    Column("threads", Integer, nullable=False),  # its default
    Column("engine", String(64), nullable=False),
    Column("seen", Double, nullable=False),
)
HOSTS = Table(
    "deepthin_host",
    _metadata,
    Column("host", String(64), primary_key=True),
    Column("worker", String(64)),  # who measures there now
    Column("expires", Double),
)
JOBS = Table(
    "deepthin_job",
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("key", String(64), nullable=False, unique=True),  # digest of what determines the result
    Column("device", String(64), nullable=False),
    Column("engine", String(64), nullable=False),
    Column("shape", Text, nullable=False),
    Column("quant", String(16), nullable=False),
    Column("context", Integer, nullable=False),
    Column("threads", Integer, nullable=False),
    Column("take", Integer, nullable=False),  # 0 for the first measurement, from 1 for repeats
    Column("state", String(8), nullable=False),
    Column("token", Integer, nullable=False),  # of the newest lease; only its holder may write
    Column("worker", String(64)),
    Column("expires", Double),
    Column("lost", Integer, nullable=False),  # leases that ran out
    Column("result", Text),
    Column("why", Text),
    Column("created", Double, nullable=False),
    Column("finished", Double),
    Index("deepthin_job_waiting", "device", "state"),
)
STUDIES = Table(
    "deepthin_study",
    _metadata,
    Column("name", String(200), primary_key=True),
    Column("holder", String(64)),  # who appends a trial now
    Column("expires", Double),
)


def prepare(database: Database) -> None:
    """Make the tables where they are missing and check that they are of this version.

    Raises:
        DeepthinError: another version of deepthin made them.
        MeasuringStoppedError: the database is away or refuses.
    """
    for attempt in range(_ATTEMPTS):
        try:
            version = database.run(_made)
            break
        except _RacedError:  # several processes start at once, and only one can make a table
            time.sleep(random.uniform(0.05, 0.2) * (attempt + 1))
    else:
        raise DeepthinError(f"database {database.url.shown}: tables could not be made; start this command again")
    if version != str(SCHEMA_VERSION):
        raise DeepthinError(
            f"database {database.url.shown}: its tables are of version {version}, but this deepthin needs {SCHEMA_VERSION}; "
            f"use the same deepthin everywhere, or another database"
        )


class _RacedError(Exception):
    """Another process made the same thing at the same time."""


def _made(connection: Connection) -> str:
    try:
        if not connection.dialect.has_table(connection, META.name):
            _metadata.create_all(connection)
            connection.execute(insert(META).values(name="schema", value=str(SCHEMA_VERSION)))
    except DBAPIError as error:
        if isinstance(error, IntegrityError) or "exists" in str(error.orig).lower():
            raise _RacedError from None
        raise
    value = connection.execute(select(META.c.value).where(META.c.name == "schema")).scalar_one_or_none()
    return "unknown" if value is None else str(value)
