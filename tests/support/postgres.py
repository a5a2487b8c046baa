"""A PostgreSQL server of its own for tests: made in a temporary folder, reached through loopback only, thrown away.

Found where a system package puts it, in ``PATH``, or where ``DEEPTHIN_POSTGRES_BIN`` says. The server refuses to run as
root, so root starts it as ``nobody``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PASSWORD = "s3cret/w@rd"  # with characters that a URL must quote
QUOTED = "s3cret%2Fw%40rd"


def postgres_folder() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``; None where there is no server."""
    named = os.environ.get("DEEPTHIN_POSTGRES_BIN")
    found = [Path(named)] if named else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name.zfill(4), reverse=True)
    on_path = shutil.which("initdb")
    found += [Path(on_path).parent] if on_path else []
    return next((path for path in found if (path / "initdb").exists() and (path / "pg_ctl").exists()), None)


class Server:
    """One server with a database ``fleet`` and a user ``deepthin`` that needs its password.

    Args:
        programs: from :func:`postgres_folder`.
    """

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._as = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
        self._folder = Path(tempfile.mkdtemp(prefix="deepthin-postgres-"))
        self.port = free_port()
        if self._as:
            shutil.chown(self._folder, "nobody", "nogroup")
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        data = self._folder / "data"
        login = ["-U", "deepthin", f"--pwfile={secret}", "--auth=scram-sha-256"]
        self._run("initdb", "-D", str(data), *login, "--no-sync", "-E", "UTF8", "--locale=C")
        settings = f"port={self.port}\nlisten_addresses='127.0.0.1'\nunix_socket_directories='{self._folder}'\nfsync=off\n"
        subprocess.run(
            ["tee", "-a", str(data / "postgresql.conf")], input=settings, text=True, check=True, stdout=subprocess.DEVNULL
        )
        self.start()
        self.sql("CREATE DATABASE fleet", database="postgres")

    @property
    def address(self) -> str:
        """The URL without password."""
        return f"postgresql://deepthin@127.0.0.1:{self.port}/fleet"

    @property
    def url(self) -> str:
        """The URL with its password."""
        return self.address.replace("deepthin@", f"deepthin:{QUOTED}@")

    def start(self) -> None:
        """Start and wait until it answers."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-l", str(self._folder / "log"), "-w", "-t", "30", "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; connections are cut."""
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", mode, "-w", "-t", "30", "stop")

    def remove(self) -> None:
        """Stop it and delete everything."""
        try:
            self.stop("immediate")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def sql(self, statement: str, database: str = "fleet") -> None:
        """Run a statement outside any transaction."""
        import psycopg

        login = {"host": "127.0.0.1", "port": self.port, "user": "deepthin", "password": PASSWORD, "dbname": database}
        with psycopg.connect(**login, autocommit=True) as connection:  # type: ignore[arg-type]
            connection.execute(statement)

    def _run(self, program: str, *arguments: str) -> None:
        command: Sequence[str] = [str(self._programs / program), *arguments]
        where = {"cwd": self._folder, "stdin": subprocess.DEVNULL, "timeout": 60, "check": False}
        # pg_ctl's server would keep a pipe open for good, so output goes to a file
        log = self._folder / "programs.log"
        with log.open("ab") as output:
            done = subprocess.run(command, stdout=output, stderr=output, **where, **self._as)  # type: ignore[call-overload]
        if done.returncode:
            raise RuntimeError(f"{program} failed: {log.read_text(errors='replace')[-2000:]}")


def free_port() -> int:
    """A TCP port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":  # python -m tests.support.postgres: one to try things by hand, until Enter
    programs = postgres_folder()
    if programs is None:
        sys.exit("no PostgreSQL found")
    server = Server(programs)
    print(server.url, flush=True)
    try:
        sys.stdin.readline()
    finally:
        server.remove()
