"""The storage root of a local folder."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from typing_extensions import override

from rmq_pipeline import durable_files
from rmq_pipeline.storage.root import Root, StorageRootError

#: Errors by which file systems report that they have no hard links.
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
#: Ending of files that are being written for ``put_if_absent``.
UNFINISHED: Final = ".tmp"


class LocalRoot(Root):
    """A local folder; ``opened`` creates it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder.absolute())
        self._has_links: bool | None = None

    @override
    def __str__(self) -> str:
        return str(self.folder)

    @property
    @override
    def has_links(self) -> bool:
        if self._has_links is None:
            self._has_links = self._try_links()
        return self._has_links

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

    @property
    @override
    def uri(self) -> str:
        return self.folder.resolve().as_uri()

    @override
    def location(self, path: str) -> Path:
        return self.folder / path

    @override
    def check_inside(self, path: str) -> None:
        if not (self.folder / path).parent.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path!r} leads out of the sink {self} through a link.")

    @override
    def create_folder(self, path: str = "") -> None:
        durable_files.make_folder(self.folder / path)

    @override
    def write(self, path: str, fill: Callable[[Any], object]) -> int:
        with (self.folder / path).open("xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    @override
    def put_if_absent(self, path: str, content: bytes) -> bool:
        whole = self.folder / path
        # Readers of Delta tables ignore names that begin with a dot.
        temporary = whole.with_name(f".{whole.name}.{secrets.token_hex(6)}{UNFINISHED}")
        try:
            temporary.write_bytes(content)
            durable_files.sync(temporary)
            return self._is_linked(temporary, whole)
        finally:
            temporary.unlink(missing_ok=True)
            # The other writer may not have synced the name yet.
            durable_files.sync(whole.parent)

    def _is_linked(self, temporary: Path, whole: Path) -> bool:
        try:
            os.link(temporary, whole)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise self._without_links() from error
        return True

    @override
    def check_put_if_absent(self) -> None:
        # A window does this when it starts: nothing is synced.
        if not self.has_links:
            raise self._without_links()

    def _without_links(self) -> StorageRootError:
        return StorageRootError(
            f"The file system of {self} has no hard links, so two writers of a file could replace"
            " each other's.",
            remedy="Choose a folder of a file system with hard links, or an object store.",
        )

    @override
    def names(self, folder: str) -> list[str]:
        # Each micro-batch lists the log: paths would cost three times as much as names.
        try:
            return os.listdir(self.folder / folder)  # noqa: PTH208
        except FileNotFoundError:
            return []

    @override
    def matching(self, pattern: str) -> list[str]:
        return [path.relative_to(self.folder).as_posix() for path in self.folder.glob(pattern)]

    @override
    def delete_unfinished(self, paths: Iterable[str], *, before_ms: int) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                if (self.folder / path).stat().st_mtime * 1000 < before_ms:
                    (self.folder / path).unlink()

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
    def sync_folders(self, paths: Iterable[str], *, missing_ok: bool = False) -> None:
        wanted = {self.folder}
        for path in paths:
            folder = self.folder / path
            wanted.update((folder, *folder.parents[: len(Path(path).parts)]))
        for folder in wanted:
            try:
                durable_files.sync(folder)
            except FileNotFoundError:
                if not missing_ok:
                    raise

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
    def modified_ms(self, folder: str) -> dict[str, int]:
        found = {}
        for path in self.files(folder):
            with suppress(FileNotFoundError):
                found[path] = (self.folder / path).stat().st_mtime_ns // 1_000_000
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
