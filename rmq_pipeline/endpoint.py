"""The addresses of a home's broker: ``<home>/endpoint.json`` exists while the broker serves."""

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil

from rmq_pipeline import durable_files

if TYPE_CHECKING:
    from rmq_pipeline.storage.root import Address

FILE_NAME = "endpoint.json"
#: A process may seem this much younger than its endpoint file: clock ticks round its start time.
_START_SLACK_MS = 2_000
#: The lock of a home; contains the pid of its current or last process.
LOCK_FILE: Final = "lock"


@dataclass(frozen=True, slots=True)
class HomeMark:
    """The lock file of a home as it was when the home was opened."""

    inode: int
    changed_ns: int

    @classmethod
    def of(cls, home: Path) -> Self | None:
        """Return the mark of a folder; None if it was never opened as a home."""
        try:
            found = (home / LOCK_FILE).stat()
        except OSError:
            return None
        return cls(found.st_ino, found.st_ctime_ns)

    def is_of(self, home: Path) -> bool:
        """Return True if the folder is the marked one, even after a move."""
        found = HomeMark.of(home)
        return found is not None and (
            found.inode == self.inode or found.changed_ns == self.changed_ns
        )


@dataclass(frozen=True)
class Endpoint:
    """A serving broker: its process, its addresses and its flags."""

    pid: int
    started_at_ms: int
    #: Identifies this start of the broker; it refuses calls with another token.
    token: str = field(repr=False)
    #: host:port of the Flight endpoint.
    flight: str
    #: host:port of the gRPC endpoint; None: it is not open.
    grpc: str | None
    home: str
    upkeep: str
    flush: str
    #: host:port of the gRPC endpoint with TLS.
    grpc_tls: str | None = None
    #: PEM file that local clients trust, and the name in the certificate; None: no TLS.
    certificate: str | None = None
    server_name: str | None = None
    #: Mark of the folder that the broker serves; None: the folder is not checked.
    mark: HomeMark | None = None

    @classmethod
    def read(cls, home: Path) -> "Endpoint | None":
        """Return the endpoint of a home; None if no broker has left a valid one."""
        try:
            found = durable_files.load_json((home / FILE_NAME).read_bytes())
            if found["mark"] is not None:
                found["mark"] = HomeMark(**found["mark"])
            endpoint = cls(**{each.name: found[each.name] for each in fields(cls)})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError):
            # Written by another version or by hand, and unusable for a connection.
            return None
        if endpoint.mark is not None and not endpoint.mark.is_of(home):
            # It came here with a copy of the home: its broker serves the original.
            return None
        return endpoint

    def write(self) -> None:
        """Publish it in its home, replacing the one before; only the owner may read the token."""
        durable_files.write_json(Path(self.home) / FILE_NAME, asdict(self))

    def remove(self) -> None:
        """Withdraw it, unless a later broker has replaced it."""
        if Endpoint.read(Path(self.home)) == self:
            (Path(self.home) / FILE_NAME).unlink(missing_ok=True)

    def is_alive(self) -> bool:
        """Return True if its process still runs; a process that reuses the pid does not count."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.create_time() * 1000 <= self.started_at_ms + _START_SLACK_MS
        except psutil.NoSuchProcess:
            return False


def stamp(home: Path) -> tuple[int, int] | None:
    """Changes whenever a broker publishes an endpoint; None while there is none."""
    try:
        found = (home / FILE_NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def default_home() -> Path:
    """RMQ_HOME, else ``.rmq`` in the current project, else ``.rmq`` in the current folder.

    The project is the nearest folder upwards with a pyproject.toml or workspace.yaml.
    """
    if named := os.environ.get("RMQ_HOME"):
        return Path(named)
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").exists() or (folder / "workspace.yaml").exists():
            return folder / ".rmq"
    return here / ".rmq"


def sinks_root(root: str | None = None, *, home: Path | None = None) -> "Address":
    """Return the folder of all sinks: ``root``, else RMQ_SINKS, else ``sinks`` in the home.

    Raises:
        ValueError: the address is malformed.
    """
    from rmq_pipeline.storage.root import address_of

    named = root or os.environ.get("RMQ_SINKS")
    return address_of(named) if named else (home or default_home()) / "sinks"
