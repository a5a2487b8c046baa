from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import (
    InvalidRequestError,
    OperationalError,
    PendingRollbackError,
    ProgrammingError,
    ResourceClosedError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from deepthin.search.cost import MeasuringStoppedError
from deepthin.search.fleet.database import Database, database_time
from deepthin.search.fleet.url import parse_storage
from tests.support.postgres import PASSWORD, QUOTED, Server


class DriverError(Exception):
    """What a driver raises, with the code that servers send."""

    def __init__(self, text: str, sqlstate: str | None = None) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


def failing(*errors: Exception) -> Callable[[], str]:
    """A call that fails with each of ``errors`` before it works."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = Database(parse_storage(f"sqlite:///{tmp_path}/fleet.db"), patience_s=1.0)
    yield found
    found.close()


def test_the_clock_is_the_databases(database: Database) -> None:
    assert abs(database.run(database_time) - time.time()) < 5


@pytest.mark.parametrize(
    "cause",
    [
        DriverError("connection refused"),
        DriverError("server closed the connection unexpectedly"),
        DriverError("the database system is starting up", "57P03"),
        DriverError("terminating connection due to administrator command", "57P01"),
        DriverError("deadlock detected", "40P01"),
    ],
)
def test_what_may_pass_is_tried_again(database: Database, cause: Exception) -> None:
    assert database.retried(failing(*[OperationalError("SELECT 1", {}, cause)] * 2)) == "done"


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (DriverError('FATAL:  password authentication failed for user "me"'), "password authentication failed"),
        (DriverError('FATAL:  database "none" does not exist'), "does not exist"),
        (DriverError("permission denied for schema public", "42501"), "permission denied"),
        (DriverError("attempt to write a readonly database"), "readonly"),
    ],
)
def test_what_waiting_does_not_mend_ends_at_once(database: Database, cause: Exception, says: str) -> None:
    with pytest.raises(MeasuringStoppedError, match=rf"refuses \(.*{says}.*check user, password \(PGPASSWORD"):
        database.retried(failing(OperationalError("SELECT 1", {}, cause)))


@pytest.mark.parametrize("kind", [PendingRollbackError, ResourceClosedError, PoolTimeoutError])
def test_what_follows_a_loss_is_judged_by_the_loss(database: Database, kind: type[SQLAlchemyError]) -> None:
    def after(first: Exception | None) -> SQLAlchemyError:
        error = kind("rollback() fully before proceeding")
        error.__context__ = first
        return error

    lost = OperationalError("SELECT 1", {}, DriverError("server closed the connection unexpectedly"))
    refused = ProgrammingError("SELECT 1", {}, DriverError("permission denied", "42501"))
    assert database.retried(failing(after(lost), after(ValueError()), after(None))) == "done"
    with pytest.raises(MeasuringStoppedError, match="refuses"):
        database.retried(failing(after(refused)))


def test_a_mistake_in_the_use_of_a_session_is_no_outage(database: Database) -> None:
    with pytest.raises(MeasuringStoppedError, match="refuses"):
        database.retried(failing(InvalidRequestError("no such thing")))


def test_mistakes_in_statements_are_no_outages(database: Database) -> None:
    with pytest.raises(MeasuringStoppedError, match="syntax error"):
        database.retried(failing(ProgrammingError("SELEKT", {}, DriverError("syntax error"))))


def test_an_outage_beyond_the_patience_ends_with_one_line(database: Database) -> None:
    error = OperationalError("SELECT 1", {}, DriverError("connection refused\nis it running?\nmore"))
    with pytest.raises(
        MeasuringStoppedError, match=r"cannot be reached \(connection refused; is it running\?\); check that it runs"
    ):
        database.retried(failing(*[error] * 100))


@pytest.mark.fleet
def test_passwords_come_from_the_environment_and_are_never_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    database = Database(parse_storage(server.address))
    assert database.run(database_time) > 0
    database.close()
    wrong = server.url.replace(QUOTED, "wr0ng%2Fone")
    with pytest.raises(MeasuringStoppedError) as caught:
        Database(parse_storage(wrong))
    assert f"database {server.address} refuses" in str(caught.value)
    assert "password authentication failed" in str(caught.value)
    assert "wr0ng" not in str(caught.value)
    with pytest.raises(MeasuringStoppedError, match=r"refuses .*does not exist"):
        Database(parse_storage(server.url.replace("/fleet", "/none")))
