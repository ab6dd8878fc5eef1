"""Where the broker of a home answers: ``<home>/endpoint.json``, there while it serves."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import psutil

FILE_NAME = "endpoint.json"
#: A process may be this much younger than the endpoint it wrote: its start is known in clock ticks.
_START_SLACK_MS = 2_000


@dataclass(frozen=True)
class Endpoint:
    """A serving broker: its process, its doors and its flags."""

    pid: int
    started_at_ms: int
    #: Names this start of this broker; a call that carries another one is refused.
    token: str = field(repr=False)
    #: host:port of the table door.
    flight: str
    #: host:port of the RocketMQ door, None when it is not open.
    grpc: str | None
    home: str
    upkeep: str
    flush: str
    #: host:port of the RocketMQ door for TLS.
    grpc_tls: str | None = None
    #: What its own clients trust, a file in PEM, and the name it is given for; None: no TLS.
    certificate: str | None = None
    server_name: str | None = None

    @classmethod
    def read(cls, home: Path) -> "Endpoint | None":
        """The endpoint of a home; None when no broker has left one."""
        try:
            found = json.loads((home / FILE_NAME).read_text(encoding="utf-8"))
            return cls(**{each.name: found[each.name] for each in fields(cls)})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError):
            # Written by another version, or by hand: nobody can be reached through it.
            return None

    def write(self) -> None:
        """Publish it in its home, replacing the one before; only the owner may read the token."""
        write_json(Path(self.home) / FILE_NAME, asdict(self))

    def remove(self) -> None:
        """Withdraw it, unless a later broker has replaced it."""
        if Endpoint.read(Path(self.home)) == self:
            (Path(self.home) / FILE_NAME).unlink(missing_ok=True)

    def is_alive(self) -> bool:
        """Whether its process still runs; a process that reuses the pid does not count."""
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


def write_json(path: Path, value: object) -> None:
    """Replace a small JSON file at once: a reader sees the old one or the new one, whole."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
