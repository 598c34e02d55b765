"""A PostgreSQL server for the tests of one process, on a Unix socket in a temporary directory."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.support.disks import mounted

_ROOT: Final = "postgres"
"""Who runs the server if the tests run as root: it refuses to be root."""
_SETTINGS: Final = {
    "listen_addresses": "",
    "fsync": "off",  # nothing here outlives the machine
    "shared_buffers": "16MB",
    "max_connections": "200",
    "autovacuum": "off",
}
_numbers = itertools.count()


def program(name: str) -> str:
    """Return the path of a program of the newest server that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    path = str(found[-1]) if found else shutil.which(name)
    assert path is not None, (
        f"{name} not found: the tests need a PostgreSQL server (Debian: apt-get install postgresql)"
    )
    return path


class PostgresServer:
    """A server, and its databases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam(_ROOT)
            self._user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(folder, account.pw_uid, account.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)

    def create(self) -> None:
        """Create the files of the server."""
        self._run(
            program("initdb"), "-D", str(self.folder / "data"), "-A", "trust", "-U", "test", "--no-sync", "-E", "UTF8"
        )
        self._run("mkdir", str(self.socket))

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        given = [f"--{name}={value}" for name, value in _SETTINGS.items()]
        self._run(
            program("pg_ctl"), "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o",
            " ".join([f"-k {self.socket}", *given]), "start",
        )  # fmt: skip

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server."""
        self._run(program("pg_ctl"), "-D", str(self.folder / "data"), "-m", mode, "-w", "stop")

    def url(self, database: str, socket: Path | None = None) -> str:
        """Return the URL of a database, at the folder of a socket; by default that of the server."""
        return f"postgresql://test@/{database}?host={socket or self.socket}"

    def execute(self, database: str, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Execute a statement in a database."""
        with psycopg.connect(self.url(database), autocommit=True, options="-c search_path=dfm_async") as connection:
            found = connection.execute(statement.encode(), arguments or None)
            return found.fetchall() if found.description else []

    def new_database(self) -> str:
        """Create a database, and return its name."""
        name = f"test{next(_numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name} STRATEGY wal_log")
        return name

    @contextlib.contextmanager
    def small_database(self, megabytes: int) -> Iterator[tuple[str, Path]]:
        """Create a database on a file system of this size; return its URL, and the folder of the file system."""
        disk, name = self.folder / "disk", self.new_database()
        with mounted(disk, megabytes, owner=self._user.get("user")):
            self.execute("postgres", f"CREATE TABLESPACE small LOCATION '{disk}'")
            self.execute("postgres", f"ALTER DATABASE {name} SET TABLESPACE small")
            try:
                yield self.url(name), disk
            finally:
                self.execute("postgres", f"DROP DATABASE {name} WITH (FORCE)")
                self.execute("postgres", "DROP TABLESPACE small")
        disk.rmdir()


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Run a server in a folder of its own; the path of its socket must be short."""
    folder = Path(tempfile.mkdtemp(prefix="dfm-pg-", dir="/tmp"))
    server = PostgresServer(folder)
    try:
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
