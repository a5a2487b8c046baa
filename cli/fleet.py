"""What asking and working share: the options that name a database and a device, and the way into the queue."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepthin.cli.arguments import argument
from deepthin.cli.progress import Progress
from deepthin.engine.errors import DeepthinError, UsageError

if TYPE_CHECKING:
    from deepthin.search.fleet.jobs import JobQueue

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,99}")


def add_storage(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The option that names the database."""
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="database shared by searches and workers: postgresql://USER@HOST/DATABASE, or sqlite:///FILE on one host; "
        "passwords from PGPASSWORD or ~/.pgpass",
    )


@argument
def device_tag(text: str) -> str:
    """A tag: letters, digits, dots, dashes and underscores.

    Raises:
        UsageError: it is none.
    """
    if not _TAG.fullmatch(text):
        raise UsageError(f"{text!r} is no device tag; use up to 64 letters, digits, dots, dashes and underscores, such as pi5")
    return text


@argument
def study_name(text: str) -> str:
    """Name of a study.

    Raises:
        UsageError: it is none.
    """
    if not _NAME.fullmatch(text):
        raise UsageError(f"{text!r} is no name of a study; use up to 100 letters, digits, dots, dashes, underscores and blanks")
    return text


@contextmanager
def open_queue(storage: str, progress: Progress) -> Iterator[JobQueue]:
    """The queue of the database ``storage``; its connections are closed at the end.

    Raises:
        UsageError: no URL of a database.
        DeepthinError: it cannot be reached, refuses us, lacks a driver here, or holds another version's tables.
    """
    try:
        import sqlalchemy  # noqa: F401 (Optuna brings it)
    except ImportError:
        raise DeepthinError(
            "--storage needs SQLAlchemy, which Optuna brings; install it with pip install 'deepthin[fleet]'"
        ) from None
    from deepthin.search.fleet.database import Database
    from deepthin.search.fleet.jobs import JobQueue
    from deepthin.search.fleet.url import parse_storage

    database = Database(parse_storage(storage), say=progress)
    try:
        yield JobQueue(database)
    finally:
        database.close()
