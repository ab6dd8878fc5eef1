"""The commit log in an object store: one object an entry, put only if its name is free.

The store needs conditional puts (If-None-Match), and reads that see the last put. Listings may lag:
names have no gaps, so the end is found by asking for names. Credentials come from the environment:
an address with a secret is refused, because settings and command lines are shown.

    log.json         which log this is; put once
    entries/NUMBER   the chain
    first/NUMBER     a mark: frames before an entry are deleted
    lease.json       last sign of life of the leader

The name of a deleted object is free again: a put that comes late finds that the mark is newer.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from typing_extensions import override

from rmq_pipeline import durable_files
from rmq_pipeline.errors import HomeFormatError, LogStoreError
from rmq_pipeline.limits import MIB
from rmq_pipeline.log_address import check_log_store
from rmq_pipeline.storage.bucket import Bucket, BucketError
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import StorageRootError, shown
from rmq_pipeline.store.log.engines.chain_entry import FORMAT
from rmq_pipeline.store.log.engines.chained_log import (
    FRAME_BYTES_MAX,
    ID_BYTES,
    ChainedLog,
    lease_request_s,
)

_LOG: Final = "log.json"
_LEASE: Final = "lease.json"
#: Names of the folder that are looked at before a new log is begun.
_LOOKED_AT: Final = 20
#: Bytes per second that a slow connection is given, beyond the time limit of every request.
_SLOWEST: Final = 4 * MIB
_DELETE_NAMES: Final = 1000
#: Names that are tried one after the other for an entry that takes the next free one.
_NEXT_TRIES: Final = 1000


class BucketSlots:
    """Slots whose entries are objects, numbered by their names; see ``chain.Slots``."""

    origin = 0
    slot_bytes = FRAME_BYTES_MAX + MIB

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Prepare the slots; nothing is read.

        Args:
            timeout_s: longest time of a request, in addition to the time of large entries.
        """
        self.address = shown(address)
        self.bucket = Bucket(address, timeout_s=timeout_s)
        self._patient = Bucket(address, timeout_s=timeout_s + FRAME_BYTES_MAX / _SLOWEST)
        self._patient_from = max(MIB, int(timeout_s * _SLOWEST))
        #: Newest mark.
        self._mark = 0
        self.seen_first = 0
        self._marking = threading.Lock()
        #: All frames before this entry are deleted, as far as this process knows.
        self._swept = 0

    def name(self, number: int) -> str:
        """See Slots."""
        return f"The object {name_of(number)}"

    def put(self, number: int, data: bytes, *, stays: bool) -> bool:
        """See Slots. A deletion reads from its header whether an object stays."""
        del stays
        with answering():
            return self._bucket_of(len(data)).put_if_absent(name_of(number), data)

    def put_next(self, data: bytes, *, after: int | None) -> int | None:
        """See Slots. A name that is taken is refused faster than a leader puts an object."""
        start = self.origin if after is None else after + 1
        for number in range(start, start + _NEXT_TRIES):
            if self.put(number, data, stays=True):
                return self._without_gap(number, data, start=start)
        return None

    def _without_gap(self, number: int, data: bytes, *, start: int) -> int:
        """Put an entry also into free slots just before it; return the first number that has it.

        Of two puts at once a store may refuse both, and leave the name free.
        """
        for _ in range(_NEXT_TRIES):
            if number == start or self._exists(name_of(number - 1)):
                return number
            if self.put(number - 1, data, stays=True):
                number -= 1
        raise LogStoreError(f"{self.address} refuses puts to names that are free.")

    def read(self, number: int, *, start: int = 0, length: int) -> bytes | None:
        """See Slots."""
        with answering():
            return self._bucket_of(length).read(name_of(number), start=start, length=length)

    def _bucket_of(self, size: int) -> Bucket:
        return self.bucket if size < self._patient_from else self._patient

    def last(self, seen: int | None) -> int | None:
        """See Slots."""
        while True:
            first = self.first()
            low = first
            if seen is not None and seen > first:
                low = seen
            elif not self._exists(name_of(first)):
                if first == 0:
                    return None
                if self.first() == first:
                    raise LogStoreError(
                        f"{self.name(first)} in {self.address} is missing.",
                        remedy="Restore it from an older version or a replica.",
                    )
                continue
            low = self._last_from(low, name_of)
            # Frames that were deleted meanwhile would look like the end.
            if self.first() == first or low >= self.seen_first:
                return low

    def first(self) -> int:
        """See Slots."""
        mark = self._mark
        if self._exists(_mark_name(mark + 1)):
            mark = self._last_from(mark + 1, _mark_name)
            self._note_mark(mark, self._marked(mark))
        return self.seen_first

    def _last_from(self, low: int, name_of: Callable[[int], str]) -> int:
        """Return the last number that has an object, from one on that has; there are no gaps."""
        step = 1
        while self._exists(name_of(low + step)):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self._exists(name_of(middle)):
                low = middle
            else:
                high = middle
        return low

    def _exists(self, name: str) -> bool:
        with answering():
            return self.bucket.exists(name)

    def _marked(self, mark: int) -> int:
        """Return the first entry that a mark leaves; 0 for the time before the first mark."""
        if not mark:
            return 0
        with answering():
            content = self.bucket.read(_mark_name(mark))
        try:
            return int(content or b"")
        except ValueError as error:
            raise LogStoreError(
                f"The object {_mark_name(mark)} in {self.address} is none of a commit log.",
                remedy="Restore it from an older version or a replica.",
            ) from error

    def _note_mark(self, mark: int, first: int) -> None:
        with self._marking:
            self._mark, self.seen_first = max(self._mark, mark), max(self.seen_first, first)

    def delete(self, stop: int, frames_in: Callable[[int, int], Iterator[int]]) -> None:
        """See Slots. A mark says what goes before it goes, so that no reader misses it."""
        first = self.first()
        if self._swept < first:  # a deletion may have ended halfway, also an earlier leader's
            self._delete(frames_in(self._marked(self._mark - 1), first))
            self._swept = first
        if stop > first:
            self._put_mark(stop)
            self._delete(frames_in(first, stop))
            self._swept = stop

    def _put_mark(self, first: int) -> None:
        while self.first() < first:
            mark = self._mark + 1
            with answering():
                if self.bucket.put_if_absent(_mark_name(mark), b"%d" % first):
                    self._note_mark(mark, first)

    def _delete(self, numbers: Iterator[int]) -> None:
        names: list[str] = []
        with answering():
            for number in numbers:
                names.append(name_of(number))
                if len(names) == _DELETE_NAMES:
                    self.bucket.delete(names)
                    names.clear()
            self.bucket.delete(names)


class ObjectStoreLog(ChainedLog):
    """A log in a folder of a bucket, for one broker."""

    def __init__(self, address: str, *, timeout_s: float, lease_s: float, home_format: int) -> None:
        """Prepare the store; ``look`` reads from it.

        Args:
            address: URI without secrets, ``s3://BUCKET/PREFIX``.
            timeout_s: longest time of a request, in addition to the time of large frames.
            lease_s: time after the last renewal at which another broker may lead.
            home_format: format of this broker's home, which says how the frames are applied.
        """
        check_log_store(address)
        limit_s = lease_request_s(lease_s, timeout_s=timeout_s)
        slots = BucketSlots(address, timeout_s=timeout_s)
        hurried = BucketSlots(address, timeout_s=limit_s)
        super().__init__(
            slots.address,
            slots=slots,
            hurried=hurried,
            lease_s=lease_s,
            home_format=home_format,
        )
        self._place = address
        self._bucket, self._lease_bucket = slots.bucket, hurried.bucket
        self._is_tried = False

    @override
    def _find_log(self) -> tuple[str, int]:
        with answering():
            found = self._bucket.read(_LOG)
            if found is None:
                found = self._made()
        id_, seed = self._read(found)
        if not self._is_tried:
            self._try_conditions()
            self._is_tried = True
        return id_, seed

    def _made(self) -> bytes:
        """Make the log in a folder without objects, and return what the maker has said of it."""
        found_names = self._bucket.some(_LOOKED_AT)  # consoles make an object for the folder itself
        others = [name for name in found_names if name and not name.startswith(".")]
        found = self._bucket.read(_LOG)  # another broker may have made it meanwhile
        if found is None and others:
            raise LogStoreError(
                f"{self.address} has no commit log, but other objects: {', '.join(others[:3])}.",
                remedy="Use a prefix of its own for the log, without objects.",
            )
        if found is None:
            self._try_conditions()
            self._is_tried = True
            log = {
                "format": FORMAT,
                "id": secrets.token_hex(ID_BYTES),
                "seed": secrets.randbits(32),
            }
            self._bucket.put_if_absent(_LOG, durable_files.dump_json(log))
            found = self._bucket.read(_LOG)
        if found is None:
            raise LogStoreError(f"{self.address} does not have what was just put there.")
        return found

    def _read(self, content: bytes) -> tuple[str, int]:
        try:
            log = durable_files.load_json(content)
            written_as, seed, id_ = int(log["format"]), int(log["seed"]), str(log["id"])
            if len(bytes.fromhex(id_)) != ID_BYTES:
                raise ValueError(f"id {id_}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LogStoreError(
                f"The object {_LOG} in {self.address} is none of a commit log: {error}.",
                remedy="Use a prefix of its own for the log, without objects.",
            ) from error
        if written_as > FORMAT:
            raise HomeFormatError(
                f"The commit log in {self.address} has the format {written_as}; this version"
                f" reads {FORMAT}.",
                remedy="Use the version of rmq_pipeline that made it, or an empty prefix.",
            )
        return id_, seed

    def _try_conditions(self) -> None:
        """Check that the store keeps conditions of puts: without them there could be two logs."""
        try:
            at(self._place).check_put_if_absent()
        except (StorageRootError, ValueError) as error:
            raise LogStoreError(
                f"{self.address} cannot have a commit log: {error}",
                remedy="Use a store that honours If-None-Match, such as Amazon S3, MinIO or"
                " SeaweedFS, or PostgreSQL (postgresql://HOST/DATABASE).",
            ) from error
        except OSError as error:
            raise LogStoreError(f"The commit log in {self.address} cannot be used: {error}") from (
                error
            )

    @override
    def _read_lease(self) -> bytes | None:
        with answering():
            return self._bucket.read(_LEASE)

    @override
    def _write_lease(self, content: bytes, *, is_hurried: bool) -> bool:
        with answering():
            (self._lease_bucket if is_hurried else self._bucket).put(_LEASE, content)
        return True


@contextmanager
def answering() -> Iterator[None]:
    """Translate the errors of a bucket."""
    try:
        yield
    except BucketError as error:
        raise LogStoreError(error.message, remedy=error.remedy) from error


def name_of(number: int) -> str:
    """Return the name of the object of an entry."""
    return f"entries/{number:020}"


def _mark_name(mark: int) -> str:
    return f"first/{mark:010}"
