"""Home of a broker: a folder that one process opens, in a format that this version reads.

Its segments are in the home, or in a root that no other home uses.
"""

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Self

from rmq_pipeline import durable_files
from rmq_pipeline.endpoint import LOCK_FILE, HomeMark
from rmq_pipeline.errors import ArchiveError, HomeFormatError, HomeLockedError, OperatorError
from rmq_pipeline.extras import MissingExtraError
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.local import UNFINISHED, LocalRoot
from rmq_pipeline.storage.place import at, opened
from rmq_pipeline.storage.root import Root, StorageRootError, address_of, shown, without_credentials
from rmq_pipeline.store.log.log_file import FULL
from rmq_pipeline.store.log.reserve import Reserve

logger = logging.getLogger(__name__)

FORMAT: Final = 5
#: Formats that this version reads; opening a home gives it the last one. Versions before format 5
#: fail on tables with more columns than they know; later ones say so.
FORMATS: Final = ("4", str(FORMAT))
FORMAT_FILE: Final = "format"
#: Exists while a process has the home open, or after it has died; names the folder at that time.
OPEN_FILE: Final = "open.json"
#: In the home: the root of its segments.
ARCHIVE_FILE: Final = "archive.json"
#: In that root: the id of the home that it belongs to.
ARCHIVE_MARK: Final = "_archive.json"


class CopiedHomeError(OperatorError):
    """The home is a copy made while a process had the original open."""

    remedy = "Stop the original's broker (`rmq stop`), copy the whole home, start it again."


class Home:
    """Folders of a locked home, and its lock."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.log = path / "log"
        self.database = path / "state.duckdb"
        self.topics = path / "topics"
        self.events = path / "events"
        self.handoff = path / "handoff"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock the home; create a new one, synced to disk with all that a start needs.

        Raises:
            HomeLockedError: another process has it open; names the process.
            HomeFormatError: another version wrote it, in another format.
            CopiedHomeError: it is a copy made while a process had the original open.
        """
        path = path.absolute()
        durable_files.make_folder(path)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise HomeLockedError(f"{path} is open in {_holder(path)}.") from error
        home = cls(path, lock)
        try:
            home._check_format()
            home._check_mark()
            home._write_format()
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            os.fsync(lock)
            for folder in (home.topics, home.events, home.handoff):
                folder.mkdir(exist_ok=True)
        except BaseException:
            home.close()
            raise
        return home

    def _check_format(self) -> None:
        # Empty: a new home; or one of an older version, which did not sync the file, after a power
        # cut. The log files hold their own format.
        if (text := self._format()) and text not in FORMATS:
            raise HomeFormatError(
                f"{self.path} has format {text!r}; this version reads {' and '.join(FORMATS)}."
            )

    def _write_format(self) -> None:
        if (before := self._format()) != str(FORMAT):
            durable_files.replace(self.path / FORMAT_FILE, f"{FORMAT}\n".encode())
            if not before:  # the creator of the folder may not have synced its name
                durable_files.sync_names_in(self.path.parent)

    def _format(self) -> str:
        file = self.path / FORMAT_FILE
        return file.read_bytes().strip(b"\0 \n").decode(errors="replace") if file.exists() else ""

    def _check_mark(self) -> None:
        file = self.path / OPEN_FILE
        try:
            said = durable_files.load_json(file.read_bytes())
            mark = HomeMark(**said["mark"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return
        if not mark.is_of(self.path):
            raise CopiedHomeError(
                f"{self.path} is a copy of {said.get('home')}. It was made while process"
                f" {said.get('pid')} had the original open, or after it had died: its files may be"
                " of different moments. If no process wrote to the original meanwhile, delete"
                f" {file}."
            )

    def note_open(self) -> None:
        """Record that this process writes to the home from now on, and sync the record.

        Raises:
            OSError: writing failed, for example on a full disk.
        """
        mark = HomeMark.of(self.path)
        assert mark is not None
        said = {"home": str(self.path), "pid": os.getpid(), "mark": asdict(mark)}
        durable_files.write_json(self.path / OPEN_FILE, said)

    def note_closed(self) -> None:
        """Record that no process writes to the home: from now on it may be copied."""
        with suppress(OSError):  # then it counts as open in a dead process, which is harmless
            (self.path / OPEN_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the home."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _holder(path: Path) -> str:
    """Return the process that has the home open, as far as its files name it."""
    pid = (path / LOCK_FILE).read_text().strip() or "unknown"
    try:
        endpoint = json.loads((path / "endpoint.json").read_text())
        return f"process {pid}, a broker at {endpoint.get('flight')}"
    except (OSError, ValueError):
        return f"process {pid}"


def part_of(reserve_bytes: int) -> int:
    """Return the bytes of a reserve to release at a time."""
    return max(1, reserve_bytes // 8)


def give_up_reserve(folder: Path, reserve_bytes: int) -> None:
    """Release a part of the reserve before the log is open.

    Raises:
        StoreFullError: nothing of the reserve is left.
    """
    reserve = Reserve(folder, wanted_bytes=reserve_bytes)
    try:
        reserve.draw(part_of(reserve_bytes))
    finally:
        reserve.close()


def note_open(home: Home, settings: Settings) -> None:
    """Mark a home as open; on a full disk, release parts of the reserve for that."""
    while True:
        try:
            home.note_open()
        except OSError as error:
            if error.errno not in FULL:
                raise
            give_up_reserve(home.log, settings.reserve_bytes)
        else:
            return


def archive_of(home: Home, address: str | None) -> tuple[Root, Callable[[], None] | None]:
    """Return the archive of a home, and a check that is still to be made; None: it was made.

    The store of the archive may be away when a home opens that has claimed its root before.

    Args:
        home: a locked home.
        address: path, or URI of a pyarrow file system; None: in the home.

    Raises:
        ArchiveError: the home's segments are elsewhere, the root belongs to another home, or a new
            home cannot reach it.
    """
    kept = home.path / ARCHIVE_FILE
    known = _known(kept)
    is_claimed = known is not None
    if known is None:
        known = {"root": address, "id": secrets.token_hex(16)}
    elif without_credentials(known["root"]) != without_credentials(address):
        raise ArchiveError(
            f"{home.path} has its segments in {shown(known['root'] or 'its own folder')},"
            f" not in {shown(address or 'its own folder')}."
        )
    root, claim = opened(home.topics), None
    if address is not None:
        root, claim = _marked(address, str(known["id"]), is_claimed=is_claimed)
    if not is_claimed or known["root"] != address:
        durable_files.write_json(kept, {**known, "root": address})
    return root, claim


def archive_of_log(home: Home, address: str | None, *, log_id: str, claimed: str | None) -> Root:
    """Return the archive of a log that is in a store.

    All homes of the log have the same archive, perhaps by different paths: its mark has the id of
    the log. As long as the log has none, its messages stay in the log.

    Args:
        home: a locked home.
        address: of the archive; None: this broker seals nothing.
        log_id: the id of the store.
        claimed: address of the archive that the log has, as a leader gave it; None: it has none.

    Raises:
        ArchiveError: the log has an archive, and the address is not that one, or missing.
    """
    if address is None:
        check_has_archive(None, log_id=log_id, claimed=claimed)
        return opened(home.topics)
    root = _root_at(address)
    try:
        check_has_archive(root, log_id=log_id, claimed=claimed)
    except OSError as error:
        if isinstance(root, LocalRoot):
            raise ArchiveError(f"{shown(address)} cannot be used: {error}.") from error
        logger.warning("archive away root=%s why=%s", root, error)
    known = {"root": address, "id": log_id}
    if _known(kept := home.path / ARCHIVE_FILE) != known:
        durable_files.write_json(kept, known)
    return root


def check_has_archive(root: Root | None, *, log_id: str, claimed: str | None) -> None:
    """Check that a root is the archive of a log, if the log has one.

    Raises:
        ArchiveError: it is another one, or there is none.
        OSError: it cannot be reached.
    """
    if claimed is None:
        return
    if root is None:
        raise ArchiveError(
            f"The log has its sealed messages in {claimed}, and archive_root is not set.",
            remedy="Set archive_root to that place, as this machine reaches it.",
        )
    try:
        owner = _owner_of(root)
    except FileNotFoundError:
        owner = None
    if owner != log_id:
        raise ArchiveError(
            f"{root} is not the archive of this log, which is in {claimed}.",
            remedy="Set archive_root to that place, as this machine reaches it.",
        )


def _known(file: Path) -> dict[str, str | None] | None:
    try:
        known = durable_files.load_json(file.read_bytes())
        return {"root": known["root"], "id": known["id"]}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise durable_files.DamagedFileError(f"{file} is damaged: {error}.") from error


def _marked(
    address: str, home_id: str, *, is_claimed: bool
) -> tuple[Root, Callable[[], None] | None]:
    root = _root_at(address)
    try:
        claim_root(root, home_id)
    except OSError as error:
        if not is_claimed or isinstance(root, LocalRoot) or isinstance(error, FileNotFoundError):
            raise ArchiveError(f"{shown(address)} cannot be used: {error}.") from error
        logger.warning("archive away root=%s why=%s", root, error)
        return root, partial(claim_root, root, home_id)
    return root, None


def _root_at(address: str) -> Root:
    try:
        place = address_of(address)
        return at(place.absolute() if isinstance(place, Path) else place)
    except (ValueError, OSError) as error:
        # pyarrow asks Amazon for the region of a bucket if no variable names it.
        raise ArchiveError(f"{shown(address)} cannot be used: {error}.") from error


def claim_root(root: Root, home_id: str) -> None:
    """Check that a root belongs to a home; an empty one belongs to the first that claims it.

    Args:
        root: of an archive.
        home_id: of the home, or of the store of its log.

    Raises:
        ArchiveError: it belongs to another home, or has other files.
        OSError: it cannot be reached.
    """
    root.create_folder()
    if not root.exists(ARCHIVE_MARK):
        # The file that another home is about to link to the mark's name is no stranger.
        strangers = [path for path in root.files("") if not path.endswith(UNFINISHED)]
        if strangers and strangers != [ARCHIVE_MARK]:
            raise ArchiveError(f"{root} is not empty and not an archive.")
        mark = durable_files.dump_json({"id": home_id})
        try:
            root.put_if_absent(ARCHIVE_MARK, mark)
        except (StorageRootError, MissingExtraError):
            # Without conditional puts the last of several homes gets the root.
            root.replace(ARCHIVE_MARK, mark)
    if _owner_of(root) != home_id:
        raise ArchiveError(f"{root} is the archive of another home.")


def _owner_of(root: Root) -> str:
    try:
        return str(durable_files.load_json(root.read(ARCHIVE_MARK))["id"])
    except (ValueError, KeyError) as error:
        raise durable_files.DamagedFileError(
            f"{root}/{ARCHIVE_MARK} is damaged: {error}."
        ) from error
