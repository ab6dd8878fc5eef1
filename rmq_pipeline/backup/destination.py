"""Where backups are: a folder or an object store, with content by checksum and manifests.

    _backup.json                        the home whose backups these are
    manifests/<20-digit number>.json    one for each backup, written last
    objects/<2 digits>/<sha256>         content of files and of parts of the log

An object is named by the checksum of its content, so it is stored once, and a backup that was
interrupted leaves nothing that a later one could take for whole. Objects that no manifest names
are deleted after the next backup, once they are a day old.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from rmq_pipeline import durable_files
from rmq_pipeline.backup.manifest import Manifest
from rmq_pipeline.errors import ConflictError, OperatorError, RequestError
from rmq_pipeline.storage.local import UNFINISHED, LocalRoot
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import Root, address_of, shown

log = logging.getLogger(__name__)

MARK: Final = "_backup.json"
MANIFESTS: Final = "manifests"
OBJECTS: Final = "objects"
PIECE_BYTES: Final = 8 << 20
#: An object that no manifest names may be of a backup that is running; after this it is not.
UNNAMED_MS: Final = 86_400_000

_MANIFEST: Final = re.compile(f"{MANIFESTS}/[0-9]{{20}}[.]json")

#: Returns the content of a file, piece by piece; each call begins again.
Reader = Callable[[], Iterator[bytes]]


class DamagedBackupError(OperatorError):
    """A file of a backup is missing, or does not match its checksum."""

    remedy = "Delete the incomplete home, and restore an older backup: give a --to-time before it."


class Destination:
    """Backups of one home."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._sizes: dict[str, int] = {}
        #: What was published here since ``claim``.
        self.published: list[Manifest] = []

    def __str__(self) -> str:
        """Return the address without secrets."""
        return str(self._root)

    @property
    def folder(self) -> Path | None:
        """The local folder; None: it is elsewhere."""
        return self._root.folder if isinstance(self._root, LocalRoot) else None

    @classmethod
    def open(cls, address: str) -> Self:
        """Return the destination at a path or a URI; nothing is created.

        Raises:
            RequestError: the address cannot be used.
        """
        try:
            place = address_of(address)
            return cls(at(place.absolute() if isinstance(place, Path) else place))
        except (ValueError, OSError) as error:
            raise RequestError(
                f"{shown(address)} cannot be used: {error}.", remedy="Give a path or a URI."
            ) from error

    def claim(self, home_id: str) -> None:
        """Begin a backup of a home; an empty destination belongs to the first home.

        Raises:
            ConflictError: it has the backups of another home, or other files.
            StorageRootError: two writers of a manifest could replace each other's file.
        """
        root, self.published = self._root, []
        root.create_folder()
        if not root.exists(MARK):
            strangers = [path for path in root.files("") if not path.endswith(UNFINISHED)]
            if strangers:
                raise ConflictError(
                    f"{self} is not empty, and no backup.", remedy="Give an empty folder."
                )
            root.check_put_if_absent()
            root.put_if_absent(MARK, durable_files.dump_json({"home_id": home_id}))
        if isinstance(root, LocalRoot):
            for name in (OBJECTS, MANIFESTS):
                durable_files.make_folder(root.folder / name)
                # The state has hashes of passwords, and tls/ a private key.
                (root.folder / name).chmod(0o700)
        if self._owner() != home_id:
            raise ConflictError(
                f"{self} has the backups of another home.",
                remedy="Give each home a destination of its own; so does a restored one.",
            )
        self._sizes = root.files(OBJECTS)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep backups of copies of the home away, which have its id; only of a local folder.

        Raises:
            ConflictError: one is running.
        """
        if self.folder is None:
            yield
            return
        mark = os.open(self.folder / MARK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConflictError(
                    f"Another backup to {self} is running.", remedy="Wait until it has ended."
                ) from error
            yield
        finally:
            os.close(mark)

    def holds(self, manifest: Manifest) -> bool:
        """Return True if all objects of a manifest were there when the backup began."""
        return not _missing(manifest, self._sizes)

    def has(self, name: str, size: int) -> bool:
        """Return True if the object was there when the backup began, or was stored since."""
        return self._sizes.get(_path_of(name)) == size

    def _owner(self) -> object:
        try:
            return durable_files.load_json(self._root.read(MARK))["home_id"]
        except (ValueError, KeyError) as error:
            raise DamagedBackupError(
                f"{self}/{MARK} is damaged: {error}.", remedy="Back up to an empty folder."
            ) from error

    def manifests(self) -> list[Manifest]:
        """Return all backups, oldest first; a damaged manifest is logged and left out.

        Raises:
            RequestError: there is no backup.
        """
        if not self._root.exists(MARK):
            raise RequestError(f"{self} has no backup.", remedy="Take one: `rmq backup DEST`.")
        found = []
        for name in sorted(self._root.names(MANIFESTS)):
            if name.startswith(".") or not name.endswith(".json"):
                continue
            try:
                found.append(Manifest.parse(self._root.read(f"{MANIFESTS}/{name}")))
            except ValueError as error:
                log.warning("%s/%s/%s is damaged and left out: %s", self, MANIFESTS, name, error)
        return found

    def next_number(self) -> int:
        """Return the number of the next manifest."""
        names = [name for name in self._root.names(MANIFESTS) if name[:1].isdigit()]
        return max((int(name.partition(".")[0]) for name in names), default=0) + 1

    def put(self, read: Reader) -> tuple[str, int, int]:
        """Store content unless it is there.

        Returns:
            Its checksum, its size, and how many bytes were written.

        Raises:
            OSError: it cannot be read or written, or changed meanwhile.
        """
        digest, size = hashlib.sha256(), 0
        for piece in read():
            digest.update(piece)
            size += len(piece)
        name = digest.hexdigest()
        path = _path_of(name)
        if self.has(name, size):
            return name, size, 0
        self._write(path, read, name=name)
        self._sizes[path] = size
        return name, size, size

    def _write(self, path: str, read: Reader, *, name: str) -> None:
        digest = hashlib.sha256()

        def fill(file: Any) -> None:
            for piece in read():
                digest.update(piece)
                file.write(piece)
            if digest.hexdigest() != name:
                raise OSError("A file changed while it was copied.")

        root = self._root
        if not isinstance(root, LocalRoot):
            try:
                with root.create(path) as file:  # an object exists once the stream is closed
                    fill(file)
            except BaseException:  # which closes the stream, too
                root.delete(path)
                raise
            return
        part = f"{OBJECTS}/{secrets.token_hex(8)}{UNFINISHED}"
        try:
            root.write(part, fill)
            root.rename(part, path)
        except BaseException:
            root.delete(part)
            raise

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, once all that it names is on disk.

        Raises:
            ConflictError: another backup took the number, or an object of it was deleted meanwhile.
        """
        self._check_whole(manifest)
        paths = {_path_of(name).rpartition("/")[0] for name in manifest.objects()}
        self._root.sync_folders(paths)
        path, content = _path(manifest), manifest.content()
        taken = not self._root.put_if_absent(path, content)
        # The answer to a put that succeeded may be lost, and then the name is taken.
        if taken and self._root.read(path) != content:
            raise ConflictError(
                f"Another backup wrote {self}/{path} meanwhile.", remedy="Run one at a time."
            )
        try:
            self._check_whole(manifest)
        except ConflictError:
            self._root.delete(path)
            raise
        self.published.append(manifest)

    def _check_whole(self, manifest: Manifest) -> None:
        self._sizes = self._root.files(OBJECTS)
        if missing := _missing(manifest, self._sizes):
            raise ConflictError(
                f"{self} has lost {len(missing)} objects while the backup ran, such as"
                f" {missing[0]}.",
                remedy="Find out what deletes them, such as another backup or a rule of the bucket."
                " Then repeat the command: it stores them again.",
            )

    def age_ms(self) -> dict[int, int]:
        """Return how long before the newest manifest each one was written, as the store says."""
        written = {
            int(Path(path).stem): at_ms
            for path, at_ms in self._root.modified_ms(MANIFESTS).items()
            if _MANIFEST.fullmatch(path)
        }
        newest_ms = written[max(written)] if written else 0
        return {number: newest_ms - at_ms for number, at_ms in written.items()}

    def forget(
        self, manifests: Sequence[Manifest], *, kept: Sequence[Manifest], unnamed_ms: int
    ) -> int:
        """Delete manifests, then the objects that none names; return the number of objects.

        Manifests that could not be read may name any object: nothing is deleted then.

        Args:
            manifests: to be deleted.
            kept: the others; the last one has just been written.
            unnamed_ms: younger objects stay, by the times of the store.
        """
        for each in manifests:
            self._root.delete(_path(each))
        names = {name for name in self._root.names(MANIFESTS) if name.endswith(".json")}
        if {f"{MANIFESTS}/{name}" for name in names} != {_path(each) for each in kept}:
            log.warning("%s has a manifest that is damaged or new: no object is deleted.", self)
            return 0
        now_ms = self._root.modified_ms(MANIFESTS).get(_path(kept[-1]), 0)
        named = {_path_of(name) for each in kept for name in each.objects()}
        gone = [
            path
            for path, at_ms in self._root.modified_ms(OBJECTS).items()
            if path not in named and now_ms - at_ms >= unnamed_ms
        ]
        for path in gone:
            with suppress(FileNotFoundError):
                self._root.delete(path)
        return len(gone)

    def damage(self, manifests: Sequence[Manifest]) -> Iterator[tuple[int, str]]:
        """Read all that backups name; yield each damaged object, and the first backup that has it.

        A manifest that cannot be read is not among them: ``manifests`` logs it.
        """
        seen: set[str] = set()
        for manifest in manifests:
            for name, size in sorted(manifest.sizes()):
                if name in seen:
                    continue
                seen.add(name)
                try:
                    for _ in self.content(name, size):
                        pass
                except DamagedBackupError as error:
                    yield manifest.number, error.message

    def content(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of an object; the caller uses it only after the last piece.

        Raises:
            DamagedBackupError: it is missing, or does not match its checksum.
        """
        path, digest, left = _path_of(name), hashlib.sha256(), size
        try:
            with self._root.open(path) as file:
                while left and (piece := file.read(min(PIECE_BYTES, left))):
                    digest.update(piece)
                    left -= len(piece)
                    yield piece
        except FileNotFoundError as error:
            raise DamagedBackupError(f"{self}/{path} is missing.") from error
        if left or digest.hexdigest() != name:
            raise DamagedBackupError(f"{self}/{path} does not match its checksum.")


def _path(manifest: Manifest) -> str:
    return f"{MANIFESTS}/{manifest.number:020d}.json"


def _missing(manifest: Manifest, sizes: dict[str, int]) -> list[str]:
    """Return the objects of a manifest that are not there with their size."""
    return sorted(name for name, size in manifest.sizes() if sizes.get(_path_of(name)) != size)


def _path_of(name: str) -> str:
    return f"{OBJECTS}/{name[:2]}/{name}"
