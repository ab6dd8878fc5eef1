"""The archive's root: a local folder, or a folder of a pyarrow file system.

Paths are relative to the root, with slashes. A local folder has hard links and is synced
explicitly. On any other file system a closed file is assumed to be durable.
"""

import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.fs as pafs
from typing_extensions import override

from rmq_pipeline import durable_files

#: Errors by which file systems report that they have no hard links.
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Root(ABC):
    """A folder of files. Thread-safe."""

    #: Address by which another process opens the root: a path, or the URI of a file system.
    address: str
    #: True only for a LocalRoot: a file can have two names.
    has_links: bool

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
    def sync_folders(self, paths: Iterable[str]) -> None:
        """Sync these folders and their parents, so that created and deleted names are durable."""

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


def opened(address: str | Path) -> Root:
    """Open the root at a local path, or at the URI of a pyarrow file system.

    Raises:
        ValueError: pyarrow does not support the URI.
    """
    text = str(address)
    if "://" not in text:
        return LocalRoot(Path(text))
    try:
        files, path = pafs.FileSystem.from_uri(text)
    except pa.ArrowException as error:
        raise ValueError(f"pyarrow cannot open {text!r}: {error}.") from error
    if isinstance(files, pafs.LocalFileSystem):
        return LocalRoot(Path(path))
    return RemoteRoot(files, path, address=text)


class LocalRoot(Root):
    """A local folder; it is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        durable_files.make_folder(self.folder)
        self.address = str(self.folder)
        self.has_links = self._try_links()

    def _try_links(self) -> bool:
        probe, other = self.folder / f".probe-{os.getpid()}", self.folder / f".link-{os.getpid()}"
        try:
            probe.touch()
            os.link(probe, other)
        except OSError as error:
            # A full or read-only disk tells nothing about links, and fails the next write anyway.
            return error.errno not in _NO_LINKS
        else:
            return True
        finally:
            for path in (probe, other):
                with suppress(OSError):
                    path.unlink()

    @override
    def create(self, path: str) -> pa.NativeFile:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        return pa.OSFile(str(self.folder / path), "wb")

    @override
    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(str(self.folder / path), "rb")

    @override
    def load(self, path: str) -> pa.Buffer:
        with pa.memory_map(str(self.folder / path)) as file:
            return file.read_buffer()

    @override
    def sync(self, path: str) -> None:
        durable_files.sync(self.folder / path)

    @override
    def sync_folders(self, paths: Iterable[str]) -> None:
        wanted = {self.folder}
        for path in paths:
            folder = self.folder / path
            wanted.update((folder, *folder.parents[: len(Path(path).parts)]))
        for folder in wanted:
            with suppress(FileNotFoundError):  # the folder was never created
                durable_files.sync(folder)

    @override
    def rename(self, old: str, new: str) -> None:
        (self.folder / new).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / old).rename(self.folder / new)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, replacing an existing one; requires ``has_links``."""
        target = self.folder / new
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.link(self.folder / old, target)

    @override
    def delete(self, path: str) -> None:
        (self.folder / path).unlink(missing_ok=True)

    @override
    def delete_folder(self, path: str) -> None:
        shutil.rmtree(self.folder / path, ignore_errors=True)
        parent = (self.folder / path).parent
        with suppress(OSError):  # the folder is not empty
            if parent != self.folder:
                parent.rmdir()

    @override
    def files(self, folder: str) -> dict[str, int]:
        found = {}
        for where, _, names in os.walk(self.folder / folder):
            for name in names:
                path = Path(where) / name
                with suppress(FileNotFoundError):
                    found[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        return found

    @override
    def folders(self, folder: str) -> list[str]:
        try:
            return sorted(
                entry.name for entry in os.scandir(self.folder / folder) if entry.is_dir()
            )
        except FileNotFoundError:
            return []

    @override
    def size(self, path: str) -> int:
        return (self.folder / path).stat().st_size

    @override
    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    @override
    def replace(self, path: str, content: bytes) -> None:
        target = self.folder / path
        durable_files.make_folder(target.parent)
        durable_files.replace(target, content)


class RemoteRoot(Root):
    """A folder of a pyarrow file system, such as an object store."""

    def __init__(self, files: pafs.FileSystem, folder: str, *, address: str) -> None:
        self._files = files
        self._folder = folder.rstrip("/")
        self.address = address
        self.has_links = False
        files.create_dir(self._folder, recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    @override
    def create(self, path: str) -> pa.NativeFile:
        self._files.create_dir(self._at(path).rpartition("/")[0], recursive=True)
        return self._files.open_output_stream(self._at(path), compression=None)

    @override
    def open(self, path: str) -> pa.NativeFile:
        return self._files.open_input_file(self._at(path))

    @override
    def load(self, path: str) -> pa.Buffer:
        with self.open(path) as file:
            return file.read_buffer()

    @override
    def sync(self, path: str) -> None:
        return

    @override
    def sync_folders(self, paths: Iterable[str]) -> None:
        return

    @override
    def rename(self, old: str, new: str) -> None:
        self._files.create_dir(self._at(new).rpartition("/")[0], recursive=True)
        self._files.move(self._at(old), self._at(new))

    @override
    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_file(self._at(path))

    @override
    def delete_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.delete_dir(self._at(path))

    def _list(self, folder: str, *, recursive: bool) -> list[pafs.FileInfo]:
        where = self._at(folder) if folder else self._folder
        selector = pafs.FileSelector(where, recursive=recursive, allow_not_found=True)
        found: list[pafs.FileInfo] = self._files.get_file_info(selector)
        return found

    @override
    def files(self, folder: str) -> dict[str, int]:
        start = len(self._folder) + 1
        return {
            info.path[start:]: info.size
            for info in self._list(folder, recursive=True)
            if info.type == pafs.FileType.File
        }

    @override
    def folders(self, folder: str) -> list[str]:
        found = self._list(folder, recursive=False)
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    @override
    def size(self, path: str) -> int:
        info = self._files.get_file_info(self._at(path))
        if info.type == pafs.FileType.NotFound:
            raise FileNotFoundError(path)
        size: int = info.size
        return size

    @override
    def read(self, path: str) -> bytes:
        with self._files.open_input_stream(self._at(path), compression=None) as file:
            content: bytes = file.read()
        return content

    @override
    def replace(self, path: str, content: bytes) -> None:
        unfinished = f"{path}.new"
        with self.create(unfinished) as file:
            file.write(content)
        self._files.move(self._at(unfinished), self._at(path))
