"""Where the archive is: a folder of this machine, or one that a pyarrow file system reaches.

Paths are relative to the root, with slashes. A local folder is synced step by step and has hard
links; of another file system it is taken that a finished file is there for good.
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

#: What file systems without hard links answer.
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Root(ABC):
    """A folder of files. For any thread."""

    #: How another process opens it: a path, or the URI of a file system.
    address: str
    #: A file can have two names: it is a LocalRoot then.
    has_links: bool

    @abstractmethod
    def create(self, path: str) -> pa.NativeFile:
        """A new file to write to; folders on the way are made."""

    @abstractmethod
    def open(self, path: str) -> pa.NativeFile:
        """A file to read from; FileNotFoundError when there is none."""

    @abstractmethod
    def load(self, path: str) -> pa.Buffer:
        """A file as a whole, mapped where that can be; FileNotFoundError when there is none."""

    @abstractmethod
    def sync(self, path: str) -> None:
        """A file that was written is on disk."""

    @abstractmethod
    def sync_folders(self, paths: Iterable[str]) -> None:
        """Names that were given and taken in these folders, and those above, are on disk."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what has that; FileNotFoundError."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, if it is there."""

    @abstractmethod
    def delete_folder(self, path: str) -> None:
        """Delete a folder and what is in it; nothing there: nothing happens."""

    @abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """Paths of all files in a folder and those below, and their sizes in bytes."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file; FileNotFoundError."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """What is in a file; FileNotFoundError."""

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Put a file in place of another, so that readers see one or the other; on disk."""


def opened(address: str | Path) -> Root:
    """The root at a path of this machine, or at the URI of a pyarrow file system.

    Raises:
        ValueError: it is a URI that pyarrow does not know.
    """
    text = str(address)
    if "://" not in text:
        return LocalRoot(Path(text))
    try:
        files, path = pafs.FileSystem.from_uri(text)
    except pa.ArrowException as error:
        raise ValueError(f"{text!r} is no place that pyarrow knows: {error}.") from error
    if isinstance(files, pafs.LocalFileSystem):
        return LocalRoot(Path(path))
    return RemoteRoot(files, path, address=text)


class LocalRoot(Root):
    """A folder of this machine, made if need be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.address = str(self.folder)
        self.has_links = self._try_links()

    def _try_links(self) -> bool:
        probe, other = self.folder / f".probe-{os.getpid()}", self.folder / f".link-{os.getpid()}"
        try:
            probe.touch()
            os.link(probe, other)
        except OSError as error:
            # A full or read-only disk says nothing of links; what is written next will.
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
        _sync(self.folder / path)

    @override
    def sync_folders(self, paths: Iterable[str]) -> None:
        wanted = {self.folder}
        for path in paths:
            folder = self.folder / path
            wanted.update((folder, *folder.parents[: len(Path(path).parts)]))
        for folder in wanted:
            with suppress(FileNotFoundError):  # nothing was ever named there
                _sync(folder)

    @override
    def rename(self, old: str, new: str) -> None:
        (self.folder / new).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / old).rename(self.folder / new)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, in place of what has that; only with ``has_links``."""
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
        with suppress(OSError):  # it holds something else
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
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.new")
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(target)
        _sync(target.parent)


class RemoteRoot(Root):
    """A folder of a pyarrow file system, an object store for one."""

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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
