"""A home whose commit log is in a store: its broker leads the log, or follows it as a standby.

The store never forgets a frame. Access rules are in the store, and so is the address of the archive
in which leaders put segments and event files: without one, nothing is sealed.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rmq_pipeline import durable_files, extras
from rmq_pipeline.access import users
from rmq_pipeline.broker.work import shared_state
from rmq_pipeline.broker.work.home import FORMAT, Home, check_has_archive, claim_root
from rmq_pipeline.broker.work.shared_state import StateCopy
from rmq_pipeline.errors import LogHeldError, OperatorError, RequestError
from rmq_pipeline.log_address import is_bucket, is_nats
from rmq_pipeline.settings import Settings
from rmq_pipeline.storage.root import Root, shown, without_credentials
from rmq_pipeline.store.log import catching_up, log_file
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.log_store import LogStore
from rmq_pipeline.store.log.replication import Replication
from rmq_pipeline.store.log.shared_log import FollowingLog, LeadingLog, StoredFrame

log = logging.getLogger(__name__)

#: In the home: the id of the store of its log, and whether the home may have answered alone.
STORE_FILE: Final = "log_store.json"
#: In the store: where the archive of the log is.
_ARCHIVE_NAME: Final = "archive.json"
#: Longest wait after the end of the lease of a leader that has died.
_CLAIM_S: Final = 2.0


class OtherLogError(OperatorError):
    """The home and the store belong to different logs."""

    remedy = "Start with the store of this home, or with an empty home, which gets the store's log."


@dataclass
class Replicated:
    """A home whose broker leads the log in a store."""

    home: Path
    replication: Replication
    #: The home may have answered frames that the store lacks.
    answered_alone: bool
    #: Where the archive of the log is, as a leader gave it; None: the log has none.
    archive: str | None
    #: The copy of the state with which an empty home begins; None: the store has the whole log.
    copy: StateCopy | None

    @property
    def log_id(self) -> str:
        """The id of the store."""
        return self.replication.store.id

    def note_copy(self, copy: StateCopy) -> None:
        """Let homes begin with a copy of the state from now on.

        Raises:
            LogFencedError: another broker leads.
            LogStoreError: the store does not answer.
        """
        content = durable_files.dump_json(copy.to_json())
        self.replication.store.put_file(shared_state.NAME, content)
        self.copy = copy

    def claim_archive(self, root: Root, address: str) -> None:
        """Claim an archive for the log, before the first segment, and tell it the next leaders.

        Raises:
            ArchiveError: the log has another archive, or the root belongs to another log or home.
            OSError: it cannot be reached.
            LogFencedError: another broker leads.
            LogStoreError: the store does not answer.
        """
        check_has_archive(root, log_id=self.log_id, claimed=self.archive)
        claim_root(root, self.log_id)
        if self.archive is None:
            said = shown(without_credentials(address))
            content = durable_files.dump_json({"root": said})
            self.replication.store.put_file(_ARCHIVE_NAME, content)
            self.archive = said

    def open_log(self, folder: Path, **how: Any) -> CommitLog:
        """Open the log, and make the files and the store the same; see ``CommitLog.open``.

        Raises:
            LogStoreError: the store does not answer.
            LogFencedError: another broker leads.
        """
        commit_log = LeadingLog.open(
            folder, replication=self.replication, answered_alone=self.answered_alone, **how
        )
        # The home has the log of the store, before the broker answers anything.
        self.answered_alone = self.replication.mode == "async"
        _note(self.home, self.replication.store.id, answered_alone=self.answered_alone)
        return commit_log

    def share_access(self, rules: dict[str, Any]) -> None:
        """Store the access rules for the next leader."""
        self.replication.store.put_file(users.FILE_NAME, durable_files.dump_json(rules))

    def close(self) -> None:
        """Append what waits, as far as the time limit allows, and end the lease."""
        self.replication.close()


class Followed:
    """A home whose broker is a standby: another one leads the log. Thread-safe."""

    def __init__(
        self, home: Path, *, store: LogStore, settings: Settings, answered_alone: bool
    ) -> None:
        self._home, self._store, self._settings = home, store, settings
        self._answered_alone = answered_alone
        #: The store answers one thread at a time.
        self._asking = threading.Lock()
        #: Host and process of the broker that leads, as far as it is known.
        self.leader = store.lease().holder
        #: Why the store does not answer; None: it does.
        self.failing: str | None = None
        #: Where the archive of the log is; None: the log had none when this broker looked.
        self.archive = _archive_in(store)
        #: The copy of the state with which an empty home begins; None: there is none.
        self.copy = shared_state.named_in(store.file)

    @property
    def log_id(self) -> str:
        """The id of the store."""
        return self._store.id

    def check_archive(self, root: Root | None) -> None:
        """Check that this broker reaches the archive of the log, if the log has one by now.

        Args:
            root: of this broker; None: its settings name none.

        Raises:
            ArchiveError: it is another one.
            LogStoreError: the store does not answer.
        """
        with self._asking:
            self.archive = self.archive or _archive_in(self._store)
        try:
            check_has_archive(root, log_id=self.log_id, claimed=self.archive)
        except OSError as error:  # messages that are not sealed can be served
            log.warning("archive away root=%s why=%s", root, error)

    @property
    def address(self) -> str:
        """Address of the store, without secrets."""
        return self._store.address

    def open_log(self, folder: Path, **how: Any) -> CommitLog:
        """Open the log, and take over the frames that the files lack; see ``CommitLog.open``.

        Raises:
            LogStoreError: the store does not answer.
            DivergedLogError: the home has answered messages that the store lacks.
        """
        with self._asking:
            commit_log = FollowingLog.open(
                folder, store=self._store, answered_alone=self._answered_alone, **how
            )
            self._answered_alone = False
            _note(self._home, self._store.id, answered_alone=False)
        return commit_log

    def look(self) -> bool:
        """Return True if a broker leads; connect again after a failure.

        Raises:
            LogStoreError: the store does not answer.
        """
        with self._asking:
            if self.failing is not None:
                self._store.look()
            lease = self._store.lease()
        self.leader = lease.holder
        return lease.runs

    def missing(self, start: int, *, most_bytes: int) -> list[StoredFrame]:
        """Return the next frames of the store, at least one of them if there are any.

        Raises:
            LogStoreError: the store does not answer.
        """
        found: list[StoredFrame] = []
        with self._asking:
            for frame in catching_up.missing(self._store, start):
                found.append(StoredFrame(*frame))
                most_bytes -= len(found[-1].data)
                if most_bytes <= 0:
                    break
        return found

    def take_access(self) -> bool:
        """Take the access rules of the leader; return True if they have changed."""
        with self._asking:
            return _take_access(self._home, self._store)

    def lead(self, *, force: bool) -> Replicated:
        """Begin to lead, if no other broker does.

        Args:
            force: begin also while another broker leads.

        Raises:
            LogHeldError: another broker leads.
            LogStoreError: the store does not answer.
        """
        with self._asking:
            self._store.claim(seconds=None, force=force)
            return _leading(
                self._home,
                store=self._store,
                settings=self._settings,
                answered_alone=self._answered_alone,
            )

    def report(self, end: int) -> dict[str, Any]:
        """Return the facts for the broker's status.

        Args:
            end: end of the log in the home.
        """
        return {
            "role": "standby",
            "store": self.address,
            "leader": self.leader,
            "end": end,
            "failing": self.failing,
        }

    def close(self) -> None:
        """End the connections."""
        with self._asking:
            self._store.close()


def shared_log(home: Home, settings: Settings, *, standby: bool) -> Replicated | Followed | None:
    """Begin to lead the log in the store that the settings name; None if they name none.

    Args:
        standby: if another broker leads, follow it.

    Raises:
        OtherLogError: the home has a log of its own, or that of another store.
        RequestError: the settings cannot be combined.
        LogHeldError: another broker leads.
        LogStoreError: the store does not answer, or cannot be used.
    """
    known = _known(home.path / STORE_FILE)
    if settings.log_store is None:
        _check_alone(home, known, standby=standby)
        return None
    if known is None and any(home.log.glob(f"*{log_file.SUFFIX}")):
        raise OtherLogError(f"{home.path} has a log of its own, which no store has.")
    store = _store_of(settings)
    try:
        if known is not None and known["store"] != store.id:
            raise OtherLogError(f"{home.path} does not belong to the log in {store.address}.")
        alone = bool(known and known["answered_alone"])
        try:
            store.claim(seconds=None if standby else _CLAIM_S)
        except LogHeldError:
            if not standby:
                raise
            return _following(home.path, store=store, settings=settings, answered_alone=alone)
        return _leading(home.path, store=store, settings=settings, answered_alone=alone)
    except BaseException:
        store.close()
        raise


def _check_alone(home: Home, known: dict[str, Any] | None, *, standby: bool) -> None:
    if known is not None:
        raise OtherLogError(
            f"The log of {home.path} is in a store, and log_store is not set.",
            remedy="Start with --log ADDRESS. A home that went on alone would begin a second"
            " history.",
        )
    if standby:
        raise RequestError(
            "A standby needs the log of the broker that leads.",
            remedy="Start it with --log and the address that the other broker has.",
        )


def _store_of(settings: Settings) -> LogStore:
    assert settings.log_store is not None, "a home with a store"
    store = engine_of(settings.log_store)(
        settings.log_store,
        timeout_s=settings.log_timeout_ms / 1000,
        lease_s=settings.log_lease_ms / 1000,
        home_format=FORMAT,
    )
    try:
        store.look()
    except BaseException:
        store.close()
        raise
    return store


def engine_of(address: str) -> Callable[..., LogStore]:
    """Return the kind of store at an address; only its packages are needed."""
    if is_bucket(address):
        extras.check("objects")
        from rmq_pipeline.store.log.engines.object_store_log import ObjectStoreLog

        return ObjectStoreLog
    if is_nats(address):
        extras.check("nats")
        from rmq_pipeline.store.log.engines.jetstream_log import JetStreamLog

        return JetStreamLog
    extras.check("postgres")
    from rmq_pipeline.store.log.engines.postgres_store import PostgresStore

    return PostgresStore


def _leading(
    home: Path, *, store: LogStore, settings: Settings, answered_alone: bool
) -> Replicated:
    """Return the replication to a store that was claimed; it keeps the lease from now on."""
    replication = Replication(
        store,
        mode=settings.replication,
        lease_s=settings.log_lease_ms / 1000,
        timeout_s=settings.log_timeout_ms / 1000,
        behind_bytes=settings.replication_behind_bytes,
        gather_s=settings.log_gather_s(),
    )
    try:
        replication.start()
        # Before the first frame. The flag stays until the home has met the store.
        _note(home, store.id, answered_alone=answered_alone)
        _take_access(home, store)
        archive, copy = _archive_in(store), shared_state.named_in(store.file)
        if store.file(users.FILE_NAME) is None and (home / users.FILE_NAME).exists():
            store.put_file(users.FILE_NAME, (home / users.FILE_NAME).read_bytes())
    except BaseException:
        replication.close()
        raise
    return Replicated(home, replication, answered_alone, archive, copy)


def _following(
    home: Path, *, store: LogStore, settings: Settings, answered_alone: bool
) -> Followed:
    store.look()  # a refused claim drops the connection
    _note(home, store.id, answered_alone=answered_alone)
    _take_access(home, store)
    return Followed(home, store=store, settings=settings, answered_alone=answered_alone)


def _archive_in(store: LogStore) -> str | None:
    """Return where the archive of the log is, as a leader gave it; None: the log has none."""
    content = store.file(_ARCHIVE_NAME)
    return None if content is None else str(durable_files.load_json(content)["root"])


def _take_access(home: Path, store: LogStore) -> bool:
    """Take the access rules of the last leader; return False if the home has them already."""
    path, rules = home / users.FILE_NAME, store.file(users.FILE_NAME)
    if rules is None or (path.exists() and path.read_bytes() == rules):
        return False
    durable_files.replace(path, rules, mode=durable_files.FOR_OWNER)
    return True


def _note(home: Path, store: str, *, answered_alone: bool) -> None:
    said = {"store": store, "answered_alone": answered_alone}
    if _known(home / STORE_FILE) != said:
        durable_files.write_json(home / STORE_FILE, said)


def _known(path: Path) -> dict[str, Any] | None:
    try:
        found = durable_files.load_json(path.read_bytes())
        return {"store": found["store"], "answered_alone": found["answered_alone"]}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise durable_files.DamagedFileError(f"{path} is damaged: {error}.") from error
