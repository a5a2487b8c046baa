"""Which database: a URL that Optuna's RDB storage takes, checked, and a form of it without credentials for everything shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from deepthin.engine.errors import DeepthinError, UsageError
from deepthin.search.filesystem import network_filesystem

BACKENDS = ("postgresql", "mysql", "mariadb", "sqlite")
_POSTGRESQL_DRIVERS = ("psycopg", "psycopg2")  # in the order they are tried where the URL names none
_EXAMPLE = "postgresql://USER@HOST:5432/DATABASE"


@dataclass(frozen=True, slots=True)
class StorageUrl:
    """A database.

    Attributes:
        text: the whole URL with its driver; holds the password, if one was given, so it is never shown.
        shown: the same without password and options.
        backend: one of :data:`BACKENDS`.
        secrets: what must not appear in any message.
    """

    text: str = field(repr=False)
    shown: str
    backend: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def scrubbed(self, message: str) -> str:
        """``message`` with everything secret replaced."""
        message = message.replace(self.text, self.shown)
        for secret in self.secrets:
            message = message.replace(secret, "***")
        return message


def parse_storage(text: str) -> StorageUrl:
    """The database that ``text`` names.

    Messages never repeat ``text``, which may hold a password.

    Raises:
        UsageError: it is no URL of a database that Optuna stores studies in.
        DeepthinError: the driver is not installed, or an SQLite file lies on a network file system.
    """
    if "://" not in text:
        raise UsageError(
            f"--storage is no database URL; give one such as {_EXAMPLE}, or leave it out: a search on one host keeps its "
            f"journal in --out"
        )
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # whose text repeats the URL
        raise UsageError(f"--storage is no database URL that can be read; one looks like {_EXAMPLE}") from None
    backend = {"postgres": "postgresql"}.get(url.get_backend_name(), url.get_backend_name())
    if backend not in BACKENDS:
        raise UsageError(f"--storage names {backend!r}, but studies are kept in {', '.join(BACKENDS)}; try {_EXAMPLE}")
    if url.drivername == "postgres":
        url = url.set(drivername=backend)
    if backend == "sqlite":
        _check_sqlite(url.database)
    elif not url.database:
        raise UsageError(f"--storage names no database of that server; one looks like {_EXAMPLE}")
    if url.drivername == "postgresql":
        url = url.set(drivername=f"postgresql+{_postgresql_driver()}")
    try:
        url.get_dialect().import_dbapi()
    except NoSuchModuleError:
        raise UsageError(f"--storage asks for driver {url.drivername!r}, which SQLAlchemy does not know") from None
    except ImportError:
        raise _missing_driver(url.drivername) from None
    password = url.password
    secrets = [value for key, value in url.query.items() if "pass" in key.lower() for value in _texts(value)]
    if password:
        quoted = URL.create("x", "u", password).render_as_string(hide_password=False)
        typed = text.partition("://")[2].rpartition("@")[0].partition(":")[2]
        secrets += [password, typed, quoted.removeprefix("x://u:").removesuffix("@")]
    return StorageUrl(
        text=url.render_as_string(hide_password=False),
        shown=URL.create(backend, url.username, None, url.host, url.port, url.database).render_as_string(),
        backend=backend,
        secrets=tuple(sorted({secret for secret in secrets if secret}, key=len, reverse=True)),
    )


def _check_sqlite(database: str | None) -> None:
    if not database or database == ":memory:" or database.startswith("file:"):
        raise UsageError(
            "--storage names an SQLite database in memory, which no other process sees; give a file: sqlite:///FILE"
        )
    path = Path(database)
    kind = network_filesystem(path)
    if kind:
        raise DeepthinError(
            f"{path}: lies on a network file system ({kind}), where SQLite's locks are not kept; use a PostgreSQL server, or a "
            f"file on a local disk for processes of one host"
        )
    if not path.absolute().parent.is_dir():
        raise DeepthinError(f"{path}: its folder does not exist; make it first, or name another file")


def _postgresql_driver() -> str:
    for name in _POSTGRESQL_DRIVERS:
        if find_spec(name) is not None:
            return name
    raise _missing_driver("postgresql")


def _missing_driver(name: str) -> DeepthinError:
    backend, _, driver = name.partition("+")
    if backend == "postgresql":
        return DeepthinError(
            f"the driver for PostgreSQL is missing ({driver or 'psycopg'}); install it with pip install 'deepthin[fleet]'"
        )
    wanted = driver or {"mysql": "mysqlclient, or name another as mysql+pymysql://", "mariadb": "mariadb"}.get(backend, backend)
    return DeepthinError(f"the driver for {backend} is missing; install {wanted}")


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
