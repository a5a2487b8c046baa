"""A connection to the database that outlives it: transactions are tried again while the server is away.

All clocks are the database's, so hosts whose clocks differ agree on when a lease ends.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    PendingRollbackError,
    ResourceClosedError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from deepthin.search.cost import MeasuringStoppedError
from deepthin.search.fleet.url import StorageUrl

T = TypeVar("T")
FIRST_PATIENCE_S = 10.0  # for a server that was never reached: a wrong address should not wait for minutes
PATIENCE_S = 300.0  # for one that went away: restarts and failovers take seconds to minutes
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_NOW = {
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
    "mysql": "SELECT unix_timestamp(now(6))",
    "mariadb": "SELECT unix_timestamp(now(6))",
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
}
# Without these a server that vanished with its host would hang a call for the kernel's two hours.
_CONNECT: dict[str, dict[str, Any]] = {
    "postgresql": {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "deepthin",
    },
    "sqlite": {"timeout": 30.0},
}
# What waiting does not mend. Codes of PostgreSQL's appendix A; a refused connection carries none, only its text.
_HOPELESS_CODES = ("28P01", "28000", "3D000", "42501", "3F000")
_HOPELESS_TEXTS = (
    *("password authentication failed", "no password supplied", "no pg_hba.conf entry", "access denied"),
    *("unable to open database", "not a database", "readonly database", "unknown database"),
)
_TRANSIENT_CODES = ("40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300")


class Database:
    """One process's way to the database.

    Args:
        url: which one.
        patience_s: how long an outage may last before everything is given up.
        say: told once per outage that the database is away, and when it is back.

    Raises:
        MeasuringStoppedError: it cannot be reached, or refuses us.
    """

    def __init__(self, url: StorageUrl, *, patience_s: float = PATIENCE_S, say: Callable[[str], None] | None = None) -> None:
        self.url = url
        self._patience_s = min(FIRST_PATIENCE_S, patience_s)
        self._say = say or (lambda _: None)
        self.connect_args = dict(_CONNECT.get(url.backend, {})) if "pymysql" not in url.text else {}
        self._engine = create_engine(url.text, pool_pre_ping=True, pool_size=2, max_overflow=2, connect_args=self.connect_args)
        if url.backend == "sqlite":
            _begin_immediate(self._engine)
        try:
            self.run(database_time)
        except BaseException:
            self.close()
            raise
        self._patience_s = patience_s

    def run(self, work: Callable[[Connection], T]) -> T:
        """The result of ``work`` in one transaction; ``work`` may run several times, so it must bear that.

        Raises:
            MeasuringStoppedError: the database was away for longer than the patience, or refuses what is asked.
        """

        def once() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return self.retried(once)

    def retried(self, call: Callable[[], T]) -> T:
        """The result of ``call``, called again with growing pauses while the database is away or asks for another try.

        Raises:
            MeasuringStoppedError: as :meth:`run`.
        """
        pause, away_since = _FIRST_PAUSE_S, 0.0
        while True:
            try:
                result = call()
            except SQLAlchemyError as error:
                if not worth_waiting(error):
                    raise self._refused(error) from None
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._patience_s:
                    raise self._unreachable(error) from None
                if pause > _FIRST_PAUSE_S * 4:
                    self._say(f"database {self.url.shown} is away; trying again")
                time.sleep(pause * random.uniform(0.5, 1.0))  # so that a fleet does not return as one
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                if pause > _FIRST_PAUSE_S * 4:
                    self._say("database is back")
                return result

    def close(self) -> None:
        """Drop the connections."""
        self._engine.dispose()

    def failure(self, error: BaseException) -> str:
        """What went wrong in one line, without credentials."""
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        return self.url.scrubbed("; ".join(lines[:2]) or type(cause).__name__)

    def _unreachable(self, error: BaseException) -> MeasuringStoppedError:
        return MeasuringStoppedError(
            f"database {self.url.shown} cannot be reached ({self.failure(error)}); check that it runs and is reachable from "
            f"here, then start this command again: nothing is lost"
        )

    def _refused(self, error: BaseException) -> MeasuringStoppedError:
        hint = "check user, password (PGPASSWORD or ~/.pgpass), database name and rights"
        return MeasuringStoppedError(f"database {self.url.shown} refuses ({self.failure(error)}); {hint}")


def worth_waiting(error: SQLAlchemyError) -> bool:
    """Whether ``error`` may go away by itself: a lost connection, a restart, a deadlock, a lock held too long.

    A statement in a session that has just lost its connection fails for that, not for the loss; the error it was raised from,
    if there is one, then decides.
    """
    if isinstance(error, PendingRollbackError | ResourceClosedError | PoolTimeoutError):
        first = error.__cause__ or error.__context__
        return worth_waiting(first) if isinstance(first, SQLAlchemyError) else True
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""
    words = str(error.orig).lower()
    if code in _HOPELESS_CODES or any(part in words for part in _HOPELESS_TEXTS):
        return False
    if "fatal" in words and "does not exist" in words:
        return False
    if code in _TRANSIENT_CODES or error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return "locked" in words or "busy" in words
    return isinstance(error, OperationalError | InterfaceError)


def database_time(connection: Connection) -> float:
    """Seconds since 1970 by the clock of the database."""
    return float(connection.execute(text(_NOW[connection.dialect.name])).scalar_one())


def _begin_immediate(engine: Any) -> None:
    """SQLite takes its write lock at the start of a transaction; taken later, two writers would deadlock."""

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
