"""A PostgreSQL server for these tests, and a fresh database of it for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from deepthin.search.fleet.database import Database
from deepthin.search.fleet.jobs import JobQueue
from deepthin.search.fleet.url import parse_storage
from tests.support.postgres import Server, postgres_folder

_numbers = count()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    programs = postgres_folder()
    if programs is None:
        message = "no PostgreSQL server (initdb, pg_ctl) is installed; Debian's package postgresql has it"
        if os.environ.get("DEEPTHIN_NEED_POSTGRES"):  # continuous integration must not pass without
            pytest.fail(message)
        pytest.skip(message)
    made = Server(programs)
    yield made
    made.remove()


@pytest.fixture
def postgres_url(server: Server) -> str:
    name = f"fleet{next(_numbers)}"
    server.sql(f"CREATE DATABASE {name}")
    return server.url.replace("/fleet", f"/{name}")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.fleet)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind that processes of one host can use."""
    return f"sqlite:///{tmp_path}/fleet.db" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def queue(url: str) -> Iterator[JobQueue]:
    database = Database(parse_storage(url))
    yield JobQueue(database)
    database.close()
