from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.search.fleet import url as url_module
from deepthin.search.fleet.url import parse_storage

SECRET = "s3cret/w@rd"


def test_password_and_options_are_in_the_url_but_in_nothing_shown() -> None:
    found = parse_storage("postgresql://me:s3cret%2Fw%40rd@db.example:6432/fleet?sslmode=require&sslpassword=other")
    assert found.text.startswith("postgresql+psycopg")
    assert "s3cret%2Fw%40rd" in found.text
    assert found.shown == "postgresql://me@db.example:6432/fleet"
    assert "s3cret" not in repr(found)
    assert "other" not in repr(found)


@pytest.mark.parametrize("form", [SECRET, "s3cret%2Fw%40rd", "s3cret%2fw%40rd", "other"])
def test_messages_of_others_lose_every_form_of_the_password(form: str) -> None:
    found = parse_storage("postgresql://me:s3cret%2fw%40rd@db/fleet?sslpassword=other")
    assert found.scrubbed(f"cannot log in with {form}!") == "cannot log in with ***!"
    assert "s3cret" not in found.scrubbed(f"bad url {found.text}")


def test_postgres_is_postgresql() -> None:
    assert parse_storage("postgres://db/fleet").shown == "postgresql://db/fleet"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run/fleet.db", "is no database URL; give one such as postgresql://USER@HOST:5432/DATABASE, or leave it out"),
        ("://me:s3cret@db", "is no database URL that can be read"),
        ("postgresql://me:s3cret@db:port/fleet", "is no database URL that can be read"),
        ("redis://:s3cret@db/0", "names 'redis', but studies are kept in postgresql, mysql, mariadb, sqlite"),
        ("https://me:s3cret@db/fleet", "names 'https'"),
        ("postgresql://me:s3cret@db", "names no database of that server"),
        ("postgresql+nothing://me:s3cret@db/fleet", "asks for driver 'postgresql+nothing', which SQLAlchemy does not know"),
        ("sqlite://", "SQLite database in memory, which no other process sees; give a file: sqlite:///FILE"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_nonsense_is_refused_without_repeating_it(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_storage(text)
    assert says in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_sqlite_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_module, "network_filesystem", lambda path: "nfs4")
    with pytest.raises(DeepthinError, match=r"lies on a network file system \(nfs4\).*use a PostgreSQL server"):
        parse_storage(f"sqlite:///{tmp_path}/fleet.db")


def test_sqlite_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(DeepthinError, match="its folder does not exist; make it first"):
        parse_storage(f"sqlite:///{tmp_path}/none/fleet.db")


def test_a_missing_driver_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_module, "find_spec", lambda name: None)
    with pytest.raises(
        DeepthinError, match=r"PostgreSQL is missing \(psycopg\); install it with pip install 'deepthin\[fleet\]'"
    ):
        parse_storage("postgresql://db/fleet")
    with pytest.raises(DeepthinError, match=r"PostgreSQL is missing \(psycopg2cffi\)"):
        parse_storage("postgresql+psycopg2cffi://db/fleet")
    with pytest.raises(DeepthinError, match="the driver for mysql is missing; install mysqlclient"):
        parse_storage("mysql://db/fleet")
