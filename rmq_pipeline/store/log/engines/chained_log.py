"""The commit log in a store of numbered slots: claims, frames and files in one chain.

chain.py has the entries, and says why no clock decides anything. The lease is the last sign of life
of the leader, beside the chain: a wrong one costs time, never a message.
"""

import base64
import json
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final

from typing_extensions import override

from rmq_pipeline import durable_files
from rmq_pipeline.errors import HomeFormatError, LogFencedError, LogStoreError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log.engines.chain import Chain, Taken
from rmq_pipeline.store.log.engines.chain_entry import Entry, Kind, Slots
from rmq_pipeline.store.log.leadership import Held, LeadableStore, holder
from rmq_pipeline.store.log.log_store import Layout, Lease, Stored

#: Longest frame. A store could take more, but the broker has the whole request in memory.
FRAME_BYTES_MAX: Final = 256 * MIB
ID_BYTES: Final = 16
#: Shortest time limit of a request of a renewal: a new connection needs that much.
_LEASE_REQUEST_S: Final = 0.2


class ChainedLog(LeadableStore):
    """A log whose entries are in numbered slots, for one broker."""

    frame_bytes_max = FRAME_BYTES_MAX

    def __init__(
        self, address: str, *, slots: Slots, hurried: Slots, lease_s: float, home_format: int
    ) -> None:
        """Prepare the store; ``look`` reads from it.

        Args:
            address: without secrets, for people.
            hurried: the same slots, for the requests of a renewal.
            lease_s: time after the last renewal at which another broker may lead.
            home_format: format of this broker's home, which says how the frames are applied.
        """
        super().__init__(address, home_format=home_format)
        self._lease_s = lease_s
        self._slots, self._hurried = slots, hurried
        self._chain = Chain(slots, writer=bytes.fromhex(self._writer), home_format=home_format)
        self._appends = ThreadPoolExecutor(1, thread_name_prefix="rmq-log-append")
        self._under_way: Future[None] | None = None
        self._leads = False
        self._renewals = 0
        self._lease_lock = threading.Lock()
        self._files_lock = threading.Lock()
        #: The lease and the epoch as last seen, and when they were first seen so.
        self._seen: tuple[bytes | None, int] | None = None
        self._seen_at = 0.0
        self._layouts: tuple[int, list[Layout]] = (-1, [])
        self._files: tuple[int, dict[str, bytes]] = (-1, {})

    # ------------------------------------------------------------------------------- leadership

    @abstractmethod
    def _find_log(self) -> tuple[str, int]:
        """Return the id and the seed of the log; begin one if there is none."""

    @abstractmethod
    def _read_lease(self) -> bytes | None:
        """Return the last lease; None if there is none."""

    @abstractmethod
    def _write_lease(self, content: bytes, *, is_hurried: bool) -> bool:
        """Replace the lease; return False if a newer leader's was seen to be there."""

    def look(self) -> None:
        """See LogStore."""
        with self._answering():
            id_, seed = self._find_log()
            if self.id and id_ != self.id:
                raise LogFencedError(f"{self.address} has another log than before.")
            self.id, self.seed, self._chain.log = id_, seed, bytes.fromhex(id_)
            tip = self._chain.find_tip()
            self._check_home_format(0 if tip is None else tip.home_format)

    def lease(self) -> Lease:
        """See LogStore."""
        with self._answering():
            said, runs = self._look_at_lease()
            self._chain.note(said["number"])
        return Lease(said["holder"], runs)

    def _look_at_lease(self) -> tuple[dict[str, Any], bool]:
        """Return the last lease, and whether it runs.

        No clock is shared: a lease runs for its time after this broker has first seen it, or a new
        epoch. One that another epoch has ended counts for nothing.
        """
        content, tip = self._read_lease(), self._chain.tip
        epoch = 0 if tip is None else tip.epoch
        if self._seen != (content, epoch):
            self._seen, self._seen_at = (content, epoch), time.monotonic()
        said = lease_of(content, lease_ms=round(self._lease_s * 1000))
        if tip is None or (said["released"] and said["epoch"] == epoch):
            return said, False
        return said, time.monotonic() - self._seen_at < said["lease_ms"] / 1000

    @override
    def _try_to_lead(self, *, force: bool) -> Held | None:
        with self._answering():
            tip = self._chain.find_tip()
            self._check_home_format(0 if tip is None else tip.home_format)
            looked_at = 0 if tip is None else tip.epoch
            said, runs = self._look_at_lease()
            if runs and said["writer"] != self._writer and not force:
                return Held(said["holder"], lease_ms=said["lease_ms"], mark=self._seen)
            if not self._chain.claim(self._claim(), after=looked_at, force=force):
                return Held(said["holder"], lease_ms=said["lease_ms"], mark=object())
            self.epoch, self._leads = self._chain.epoch, True
            # Without this lease another broker would wait for its time, and lead then.
            with suppress(LogStoreError):
                self._put_lease(is_hurried=False)
        return None

    def reclaim(self) -> None:
        """See LogStore."""
        with self._answering():
            self._chain.reclaim(self._claim())
        self.epoch = self._chain.epoch

    def _claim(self) -> bytes:
        return durable_files.dump_json({"holder": holder(), "salt": secrets.token_hex(8)})

    def renew(self) -> bool:
        """See LogStore."""
        with self._lease_lock, self._answering():
            is_old = self._chain.is_superseded(slots=self._hurried)
            if is_old or not self._put_lease(is_hurried=True):
                self._leads = False
        return self._leads

    def _put_lease(self, *, is_hurried: bool, released: bool = False) -> bool:
        self._renewals += 1
        tip = self._chain.tip
        said = {
            "writer": self._writer,
            "holder": holder(),
            "epoch": self._chain.epoch,
            "lease_ms": round(self._lease_s * 1000),
            "released": released,
            "number": 0 if tip is None else tip.number,
            "renewals": self._renewals,
        }
        return self._write_lease(durable_files.dump_json(said), is_hurried=is_hurried)

    def close(self) -> None:
        """See LogStore."""
        self.abandon()
        with self._lease_lock:
            if self._leads:
                self._leads = False
                with suppress(LogStoreError, HomeFormatError):
                    if not self._chain.is_superseded(slots=self._hurried):
                        self._put_lease(is_hurried=True, released=True)
        self._appends.shutdown(wait=True)
        self._chain.close()

    # ---------------------------------------------------------------------------------- appends

    def begin(self, position: int, frame: bytes) -> None:
        """See LogStore."""
        try:
            self._under_way = self._appends.submit(
                self._put_frame, position, frame, epoch=self._chain.epoch
            )
        except RuntimeError as error:
            raise LogStoreError(f"The commit log in {self.address} is closed.") from error

    def finish(self) -> None:
        """See LogStore."""
        assert self._under_way is not None, "a frame that begin has sent"
        self._under_way.result()
        self._under_way = None

    @override
    def append(self, position: int, frame: bytes) -> None:
        self._put_frame(position, frame, epoch=self._chain.epoch)

    def settle(self, position: int, frame: bytes) -> None:
        """See LogStore: a put of the same frame into the same slot cannot double it."""
        self._put_frame(position, frame, epoch=self._chain.epoch)

    def _put_frame(self, position: int, frame: bytes, *, epoch: int) -> None:
        with self._answering():
            self._chain.put_frame(position, frame, epoch=epoch)

    def abandon(self) -> None:
        """See LogStore. A put that is under way ends by itself; the next one waits for it."""
        self._under_way = None

    # ------------------------------------------------------------------------------------ reads

    def last(self) -> Stored | None:
        """See LogStore."""
        with self._answering():
            tip = self._chain.find_tip()
            if tip is None or tip.frame < 0:
                return None
            return _stored(tip if tip.frame == tip.number else self._chain.at(tip.frame))

    def headers(self, start: int) -> Iterator[Stored]:
        """See LogStore."""
        with self._answering():
            for entry in self._chain.headers(start):
                if entry.kind == Kind.FRAME and entry.position >= start:
                    yield _stored(entry)

    def frames(self, start: int) -> Iterator[tuple[Stored, bytes]]:
        """See LogStore."""
        with self._answering():
            for entry, payload in self._chain.walk(start):
                if entry.kind == Kind.FRAME and entry.position >= start:
                    yield _stored(entry), payload

    def layouts(self) -> list[Layout]:
        """See LogStore."""
        tip = self._chain.tip
        number = -1 if tip is None else tip.layout
        if number != self._layouts[0]:
            with self._answering():
                said = json.loads(self._chain.payload(number)) if number >= 0 else []
            found = [Layout(start, version, bytes.fromhex(hex_)) for start, version, hex_ in said]
            self._layouts = (number, found)
        return list(self._layouts[1])

    def put_layout(self, layout: Layout) -> None:
        """See LogStore."""

        def payload() -> bytes:
            # One at the same start has no frame yet: its leader died before its first one.
            found = [each for each in self.layouts() if each.start < layout.start] + [layout]
            said = [[each.start, each.version, each.fingerprint.hex()] for each in found]
            return json.dumps(said).encode()

        with self._answering():
            self._chain.put(Kind.LAYOUT, payload)

    def trim(self, before: int) -> None:
        """See LogStore. The last frame stays."""
        with self._answering():
            if self._chain.is_superseded():
                raise self._fenced()
            self._chain.trim(before)

    def file(self, name: str) -> bytes | None:
        """See LogStore."""
        with self._answering():
            return self._files_now().get(name)

    def put_file(self, name: str, content: bytes) -> None:
        """See LogStore. Files are entries, so an old leader's put cannot come late."""

        def payload() -> bytes:  # with a file of an earlier put that was in doubt
            files = {**self._files_now(), name: content}
            said = {each: base64.b64encode(data).decode() for each, data in files.items()}
            return json.dumps(said).encode()

        with self._files_lock, self._answering():
            self._chain.put(Kind.FILES, payload)

    def _files_now(self) -> dict[str, bytes]:
        tip = self._chain.tip
        number = -1 if tip is None else tip.files
        if number != self._files[0]:
            said = json.loads(self._chain.payload(number)) if number >= 0 else {}
            self._files = (number, {name: base64.b64decode(data) for name, data in said.items()})
        return self._files[1]

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Translate the answer of the chain that another broker leads."""
        try:
            yield
        except Taken as error:
            raise self._fenced() from error


def lease_request_s(lease_s: float, *, timeout_s: float) -> float:
    """Return the time limit of a request of a renewal: two of them take half a lease."""
    return min(timeout_s, max(lease_s / 4, _LEASE_REQUEST_S))


def _stored(entry: Entry) -> Stored:
    return Stored(entry.position, entry.length, entry.crc)


def lease_of(content: bytes | None, *, lease_ms: int) -> dict[str, Any]:
    """Return what a lease says; an unreadable one runs for its time, as others do."""
    said: dict[str, Any] = {
        "writer": "",
        "holder": "",
        "epoch": 0,
        "lease_ms": lease_ms,
        "released": False,
        "number": 0,
    }
    with suppress(ValueError, AttributeError, RecursionError):
        read = durable_files.load_json(content) if content is not None else {}
        same = {name: read[name] for name in said if type(read.get(name)) is type(said[name])}
        said.update(same)
    return said
