"""Opening of a home whose commit log is in a store: what must agree, and what leaders hand on.

The store never forgets a frame, and the broker neither seals nor drops the log: segments and event
files are local, and the next leader would lack them. Access rules are in the store.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rmq_pipeline import durable_files, extras
from rmq_pipeline.access import users
from rmq_pipeline.broker.work.home import FORMAT, Home
from rmq_pipeline.errors import OperatorError, RequestError
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.log import log_file
from rmq_pipeline.store.log.replication import Replication

#: In the home: the id of the store of its log, and whether the home may have answered alone.
STORE_FILE: Final = "log_store.json"
#: Longest wait after the end of the lease of a leader that has died.
_CLAIM_S: Final = 2.0


class OtherLogError(OperatorError):
    """The home and the store belong to different logs."""

    remedy = "Start with the store of this home, or with an empty home, which gets the store's log."


@dataclass
class Replicated:
    """The replication of an open home."""

    home: Path
    replication: Replication
    #: The home may have answered frames that the store lacks.
    answered_alone: bool

    def met(self) -> None:
        """Record that the home has the log of the store, before the broker answers anything."""
        self.answered_alone = self.replication.mode == "async"
        _note(self.home, self.replication.store.id, answered_alone=self.answered_alone)

    def share_access(self, rules: dict[str, Any]) -> None:
        """Store the access rules for the next leader."""
        self.replication.store.put_file(users.FILE_NAME, durable_files.dump_json(rules))


def replicated(home: Home, settings: Settings) -> Replicated | None:
    """Begin to lead the log in the store that the settings name; None if they name none.

    Raises:
        OtherLogError: the home has a log of its own, or that of another store.
        RequestError: the settings cannot be combined.
        LogHeldError: another broker leads.
        LogStoreError: the store does not answer, or cannot be used.
    """
    known = _known(home.path / STORE_FILE)
    if settings.log_store is None:
        if known is not None:
            raise OtherLogError(
                f"The log of {home.path} is in a store, and log_store is not set.",
                remedy="Start with --log ADDRESS. A home that went on alone would begin a second"
                " history.",
            )
        return None
    if settings.archive_root is not None:
        raise RequestError(
            "archive_root and log_store cannot be combined yet: with a store nothing is sealed.",
            remedy="Leave one of them out.",
        )
    if known is None and any(home.log.glob(f"*{log_file.SUFFIX}")):
        raise OtherLogError(f"{home.path} has a log of its own, which no store has.")
    extras.check("postgres")
    from rmq_pipeline.store.log.postgres_store import PostgresStore

    lease_s, timeout_s = settings.log_lease_ms / 1000, settings.log_timeout_ms / 1000
    store = PostgresStore(
        settings.log_store, timeout_s=timeout_s, lease_s=lease_s, home_format=FORMAT
    )
    store.look()
    if known is not None and known["store"] != store.id:
        store.close()
        raise OtherLogError(f"{home.path} does not belong to the log in {store.address}.")
    store.claim(seconds=_CLAIM_S)
    replication = Replication(
        store,
        mode=settings.replication,
        lease_s=lease_s,
        timeout_s=timeout_s,
        behind_bytes=settings.replication_behind_bytes,
    )
    try:
        replication.start()
        alone = bool(known and known["answered_alone"])
        if known is None:  # before the first frame
            _note(home.path, store.id, answered_alone=False)
        _take_access(home.path, replication)
    except BaseException:
        replication.close()
        raise
    return Replicated(home.path, replication, alone)


def _take_access(home: Path, replication: Replication) -> None:
    """Take the access rules of the last leader; the first one gives its own."""
    path, store = home / users.FILE_NAME, replication.store
    shared = store.file(users.FILE_NAME)
    if shared is not None:
        if not path.exists() or path.read_bytes() != shared:
            durable_files.replace(path, shared, mode=durable_files.FOR_OWNER)
    elif path.exists():
        store.put_file(users.FILE_NAME, path.read_bytes())


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
