"""Storage roots: a local folder, or a folder of an object store or another pyarrow file system.

Paths are relative to the root, with slashes. A local folder has hard links and is synced
explicitly. On any other file system a closed file is assumed to be durable. The archive and the
sinks lie on roots; ``put_if_absent`` decides which of several writers wins.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

import pyarrow as pa

from rmq_pipeline.errors import OperatorError

#: Prefix of the files by which ``check_put_if_absent`` tries a root; readers of tables ignore it.
_PROBE: Final = ".probe"

#: Stands for a secret in messages.
HIDDEN: Final = "***"
#: Names of options of a URI whose values are secrets.
_SECRET: Final = re.compile("key|secret|token|password|sas|sig|credential", re.IGNORECASE)

#: A local path, or the URI of a folder of another file system.
Address: TypeAlias = Path | str


class StorageRootError(OperatorError):
    """A folder or a bucket cannot be used as a storage root."""

    remedy = "Choose a local folder, or a bucket of a store with conditional puts."


class Root(ABC):
    """A folder of files. Thread-safe."""

    #: Address by which another process opens the root: a path, or the URI of a file system.
    address: str

    def __str__(self) -> str:
        """Return the address without secrets, for messages."""
        return shown(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    @property
    @abstractmethod
    def has_links(self) -> bool:
        """True only for a LocalRoot: a file can have two names."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The URI of the folder, without secrets and options; it names the folder."""

    @abstractmethod
    def location(self, path: str) -> Address:
        """Return the address of a file, for other readers."""

    @abstractmethod
    def check_inside(self, path: str) -> None:
        """Raise ValueError if a link leads the path out of the root."""

    @abstractmethod
    def create_folder(self, path: str = "") -> None:
        """Create a folder, durably, if the file system has folders; it may exist."""

    @abstractmethod
    def write(self, path: str, fill: Callable[[Any], object]) -> int:
        """Write a new file by passing it to ``fill``; return its size once it is durable.

        The folder exists, and its names are not synced.
        """

    @abstractmethod
    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Write a file, atomically and durably, unless it exists; return False if it does.

        After a lost answer of a store, False may mean the caller's own file: read it again.

        Raises:
            StorageRootError: the root has no such operation.
        """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if it does not exist."""

    @abstractmethod
    def matching(self, pattern: str) -> list[str]:
        """Return the paths of files that match a pattern, with as many parts as it has."""

    @abstractmethod
    def delete_unfinished(self, paths: Iterable[str], *, before_ms: int) -> None:
        """Delete files that a writer was writing before a time, and did not finish."""

    @abstractmethod
    def create(self, path: str) -> pa.NativeFile:
        """Create a file for writing; missing folders are created."""

    @abstractmethod
    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading; raises FileNotFoundError."""

    @abstractmethod
    def load(self, path: str) -> pa.Buffer:
        """Return a whole file, memory-mapped if possible; raises FileNotFoundError."""

    @abstractmethod
    def sync(self, path: str) -> None:
        """Sync a written file to disk."""

    @abstractmethod
    def sync_folders(self, paths: Iterable[str], *, missing_ok: bool = False) -> None:
        """Sync these folders and their parents, so that created and deleted names are durable.

        Raises:
            FileNotFoundError: a folder is missing, and so are the files that it had.
        """

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing an existing one; raises FileNotFoundError."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file if it exists."""

    @abstractmethod
    def delete_folder(self, path: str) -> None:
        """Delete a folder and its content if it exists."""

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """Return the paths of all files in a folder and below it, with their sizes in bytes."""

    @abstractmethod
    def modified_ms(self, folder: str) -> dict[str, int]:
        """Return the paths of all files in a folder and below it, with when each was written.

        The times are the store's own: compare them with each other, and with no clock.
        """

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes; raises FileNotFoundError."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a file; raises FileNotFoundError."""

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Replace a file atomically and durably: readers see the old or the new content."""

    def exists(self, path: str) -> bool:
        """Return True if the file exists."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def check_put_if_absent(self) -> None:
        """Try whether only one of two writers of a file wins; the folder exists.

        Raises:
            StorageRootError: both do, or the root has no such operation.
        """
        path = f"{_PROBE}-{secrets.token_hex(8)}"
        try:
            # The answer to the first put may be lost: the store repeats it, and the name is taken.
            self.put_if_absent(path, b"1")
            is_kept = not self.put_if_absent(path, b"2") and self.read(path) == b"1"
        finally:
            with suppress(OSError):
                self.delete(path)
        if not is_kept:
            raise StorageRootError(
                f"{self} has no conditional puts: the second of two writers replaced the file of"
                " the first one."
            )


def is_uri(address: object) -> bool:
    """Return True if the text is a URI, and not a local path."""
    return "://" in str(address)


def shown(address: object) -> str:
    """Return an address for messages, without the secrets of a URI."""
    if not is_uri(address):
        return str(address)
    # A secret key may have a slash, which ends the host for ``urlsplit``.
    scheme, _, rest = str(address).partition("://")
    _, at, rest = rest.rpartition("@")
    place, asked, query = rest.partition("?")
    options = "&".join(
        f"{name}={HIDDEN if _SECRET.search(name) else value}" for name, value in parse_qsl(query)
    )
    return f"{scheme}://{HIDDEN + at if at else ''}{place}{asked}{options}"


def without_credentials(address: str | None) -> str | None:
    """Return an address without the user and the password of a URI."""
    if not is_uri(address):
        return address
    parts = urlsplit(str(address))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def address_of(named: str | Path) -> Address:
    """Return a local path as Path, and a URI as text.

    Raises:
        ValueError: the path is empty, or was a URI, and lost a slash when it became a Path; or a
            URI of a local path has a host or options.
    """
    if not str(named):
        raise ValueError("The address is empty. Give a path or a URI.")
    if isinstance(named, str) and named.startswith("file://"):
        parts = urlsplit(named)
        if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment:
            raise ValueError(
                f"{shown(named)} must be file:/// and a path, without host and options."
            )
        return Path(unquote(parts.path))
    if isinstance(named, str) and is_uri(named):
        return named
    path = Path(named)
    first = path.parts[0] if path.parts else ""
    if len(first) > 2 and first.endswith(":"):
        raise ValueError(
            f"{path} was a URI before it became a Path. Give {first}//… as text, not as a Path."
        )
    return path


def below(parent: Address, name: str | Path) -> Address:
    """Return the address of a folder below another one; an absolute path or a URI is unchanged."""
    own = address_of(name or ".")
    if isinstance(own, str) or own.is_absolute():
        return own
    if isinstance(parent, Path):
        return parent / own
    if own == Path():
        return parent
    parts = urlsplit(parent)
    path = quote(own.as_posix(), safe="/=")
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{path}"))


def path_in(folder: str, path: str) -> str:
    """Return the local path or the URI of a file in a folder, which may be a URI with options."""
    return str(below(folder, path)) if is_uri(folder) else f"{folder}/{path}"


def split(uri: str) -> tuple[str, str]:
    """Return the URI of the folder of a file, and the file's name in it."""
    parts = urlsplit(uri)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=folder)), unquote(name)
