"""The entries of a commit log in an object store: numbered objects, each written once.

    entries/NUMBER   a claim of a broker to lead, a frame, a layout, or files that leaders hand on
    first/NUMBER     a mark: frames before an entry are deleted

An entry is put only if its name is free, and only after the entry before it was seen. So names have
no gaps, every object is in the chain, and a reader finds the end by names alone: listings may lag.

A claim takes the next number, as a frame does. The old leader's next put has the same name and is
refused, also if it comes late, and it never goes on to another number. So claims are never deleted:
the name of a deleted object is free again.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from rmq_pipeline.errors import HomeFormatError, LogStoreError
from rmq_pipeline.limits import MIB
from rmq_pipeline.storage.bucket import Bucket
from rmq_pipeline.store.log.frame import crc32

#: Format of the entries' headers.
FORMAT: Final = 1
_MAGIC: Final = b"RMQENTRY"
#: Magic, format, kind, format of homes, number, epoch, position, length and CRC of the payload,
#: numbers of other entries, writer, log; then the CRC of all these.
_HEADER: Final = Struct("<8sHHIQQQQIqqqq16s16s")
_CRC: Final = Struct("<I")
_HEADER_BYTES: Final = _HEADER.size + _CRC.size
#: First part of an entry that is read; longer entries take a second request.
_PART_BYTES: Final = MIB
#: Bytes per second that a slow connection is given, beyond the time limit of every request.
_SLOWEST: Final = 4 * MIB
#: Entries whose first parts are read at the same time.
_AHEAD: Final = 8
#: Tries to put a claim before the next frame of a leader that writes.
_CLAIM_TRIES: Final = 100
_DELETE_NAMES: Final = 1000
_NONE: Final = -1


class Kind(IntEnum):
    """Kinds of entries."""

    CLAIM = 1
    FRAME = 2
    LAYOUT = 3
    FILES = 4


class Taken(Exception):  # noqa: N818 it is an answer of the store
    """Another broker has begun to lead: its entry is at the next number."""


class Entry(NamedTuple):
    """Header of an entry. It names the newest entry of each other kind: none is searched."""

    kind: Kind
    #: Newest format of homes that have led.
    home_format: int
    number: int
    epoch: int
    #: Log position of the frame, or of the next frame.
    position: int
    length: int
    crc: int
    #: Newest frame, layout, claim and files up to this entry; -1: none.
    frame: int
    layout: int
    claim: int
    files: int
    writer: bytes
    log: bytes

    @property
    def end(self) -> int:
        """Log position of the next frame."""
        return self.position + self.length if self.kind == Kind.FRAME else self.position

    def packed(self) -> bytes:
        """Return the bytes of the header."""
        data = _HEADER.pack(_MAGIC, FORMAT, *self)
        return data + _CRC.pack(crc32(data))


class Chain:
    """The entries of one log. Reads are for one thread at a time, puts and ``trim`` for all."""

    def __init__(
        self, bucket: Bucket, patient: Bucket, *, timeout_s: float, writer: bytes, home_format: int
    ) -> None:
        """Prepare the chain; nothing is read.

        Args:
            patient: the same bucket, with a time limit for the longest entries.
            timeout_s: time limit of ``bucket``.
            writer: name of this broker, a new one in each process.
        """
        self._bucket, self._patient = bucket, patient
        self._patient_from = max(MIB, int(timeout_s * _SLOWEST))
        self._writer = writer
        self._home_format = home_format
        #: Id of the log, which all entries have.
        self.log = b""
        #: Newest entry that this broker has seen; None: it has seen none.
        self.tip: Entry | None = None
        #: Epoch that this broker leads under; 0: it leads nothing.
        self.epoch = 0
        #: An entry was sent, and its outcome is not known. If it was stored, another leader may
        #: have deleted it meanwhile: its name is free again, though claims of others follow.
        self._is_in_doubt = False
        #: Held while an entry is put, until its outcome is known or in doubt.
        self._putting = threading.RLock()
        #: Newest mark, and the first entry that it leaves.
        self._mark = self._first = 0
        self._marking = threading.Lock()
        #: All frames before this entry are deleted, as far as this process knows.
        self._swept = 0
        self._trimming = threading.Lock()
        #: Where the last read has ended: a log position, and the number of the next entry.
        self._cursor = (0, 0)
        self._pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="rmq-log-reads")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------- writes

    def put(self, kind: Kind, payload: Callable[[], bytes]) -> None:
        """Put an entry of this leader at the end of the chain.

        After an error the entry is in doubt: the next call finds it, or takes its number.

        Args:
            payload: makes the payload of an entry after the tip; called again for another tip.

        Raises:
            Taken: another broker leads.
            LogStoreError: the store does not answer.
        """
        with self._putting:
            self._put(kind, payload)

    def put_frame(self, position: int, frame: bytes, *, epoch: int) -> None:
        """Put a frame at a log position, unless it is there.

        Args:
            epoch: of the leadership in which the frame was begun. A frame that was given up before
                its thread has run must not follow the claim that ended it.

        Raises:
            Taken: another broker leads, or the position has another frame.
            LogStoreError: the store does not answer, or lacks frames before this one, or the epoch
                is over.
        """
        crc = crc32(frame)
        with self._putting:
            if self.epoch and self.epoch != epoch:
                raise LogStoreError(f"The epoch {epoch} in {self._bucket.address} is over.")
            while not self._has(position, length=len(frame), crc=crc):
                self._put(Kind.FRAME, lambda: frame, crc=crc, position=position)

    def _has(self, position: int, *, length: int, crc: int) -> bool:
        tip = self._led()
        if tip.end == position:
            return False
        if tip.end < position:
            raise LogStoreError(
                f"The commit log in {self._bucket.address} ends at {tip.end} and has lost frames"
                f" before {position}."
            )
        stored = tip if tip.frame == tip.number else self.at(tip.frame)
        same = (position, length, crc, self._writer)
        if (stored.position, stored.length, stored.crc, stored.writer) != same:
            raise Taken
        return True

    def _put(
        self,
        kind: Kind,
        made: Callable[[], bytes],
        *,
        crc: int | None = None,
        position: int | None = None,
    ) -> None:
        """Put an entry; the caller holds the lock.

        Args:
            crc: of the payload, if it is known.
            position: of a frame. Nothing more is put if a frame in doubt turns out to be there.
        """
        while True:
            tip = self._led()
            if position is not None and tip.end != position:
                return
            payload = made()
            known = crc32(payload) if crc is None else crc
            mine = self._following(tip, kind, length=len(payload), crc=known)
            was_in_doubt, self._is_in_doubt = self._is_in_doubt, True
            is_stored = self._bucket_of(len(payload)).put_if_absent(
                name_of(mine.number), mine.packed() + payload
            )
            if was_in_doubt and self.first() > mine.number:
                raise Taken
            if is_stored:
                self.tip, self._is_in_doubt = mine, False
                return
            found = self.entry(mine.number)
            if found is None:  # S3 refuses one of two puts at once, and takes it later
                raise LogStoreError(f"A put to {self._bucket.address} was refused for the moment.")
            if found.writer != self._writer:
                raise Taken
            # An entry of this broker whose answer was lost, now or earlier.
            self.tip, self.epoch = found, max(self.epoch, found.epoch)
            self._is_in_doubt = False
            if found == mine:
                return

    def _led(self) -> Entry:
        if not self.epoch:  # a claim has failed meanwhile
            raise Taken
        assert self.tip is not None, "a chain that this broker leads"
        return self.tip

    def _see(self, entry: Entry) -> None:
        """Take an entry for the newest one that was seen, unless it is not.

        A leader must not: after the entry of another broker it would go on under its old epoch.

        Raises:
            Taken: this broker leads, and the entry is another's.
        """
        if self.tip is not None and entry.number <= self.tip.number:
            return
        if self.epoch and entry.writer != self._writer:
            raise Taken
        self.tip = entry

    def _following(self, tip: Entry | None, kind: Kind, *, length: int, crc: int) -> Entry:
        """Return the header of the entry after another one."""
        number = 0 if tip is None else tip.number + 1
        epoch = self.epoch if kind != Kind.CLAIM else (0 if tip is None else tip.epoch) + 1

        def newest(of: Kind, before: int) -> int:
            return number if kind == of else before

        return Entry(
            kind=kind,
            home_format=max(self._home_format, 0 if tip is None else tip.home_format),
            number=number,
            epoch=epoch,
            position=0 if tip is None else tip.end,
            length=length,
            crc=crc,
            frame=newest(Kind.FRAME, _NONE if tip is None else tip.frame),
            layout=newest(Kind.LAYOUT, _NONE if tip is None else tip.layout),
            claim=newest(Kind.CLAIM, _NONE if tip is None else tip.claim),
            files=newest(Kind.FILES, _NONE if tip is None else tip.files),
            writer=self._writer,
            log=self.log,
        )

    def claim(self, payload: bytes, *, after: int, force: bool) -> bool:
        """Put a claim after the newest entry, and lead under its epoch.

        Args:
            after: epoch whose lease is over; 0: there was none.
            force: also after a claim of another broker that came first.

        Returns:
            False if another broker has claimed meanwhile, or frames always came first.
        """
        crc = crc32(payload)
        with self._putting:
            self.epoch = 0
            tip = self.find_tip()
            if not force and tip is not None and tip.epoch != after:
                return False
            for _ in range(_CLAIM_TRIES):
                mine = self._following(self.tip, Kind.CLAIM, length=len(payload), crc=crc)
                if not self._bucket.put_if_absent(name_of(mine.number), mine.packed() + payload):
                    found = self.entry(mine.number)
                    if found is None:
                        return False
                    self.tip = found
                    if found.kind == Kind.CLAIM and found != mine and not force:
                        return False
                    if found != mine:  # a frame of a leader that writes, without a lease
                        continue
                # A put that was under way for long may have taken the name of a deleted frame. Its
                # mark is older than its deletion.
                if self.first() > mine.number:
                    self.tip = None
                    return False
                self.tip, self.epoch = mine, mine.epoch
                return True
        return False

    def reclaim(self, payload: bytes) -> None:
        """Lead under a new epoch; a put of this broker that is under way has no effect from now on.

        Raises:
            Taken: another broker leads.
        """
        with self._putting:
            self._put(Kind.CLAIM, lambda: payload)
            self.epoch = self._led().epoch

    def is_superseded(self, *, bucket: Bucket | None = None) -> bool:
        """Return True if another broker's entry follows those of this leader.

        Args:
            bucket: the same bucket, with a time limit of the caller's.
        """
        tip = self.tip
        if not self.epoch or tip is None:
            return True
        found = self.entry(tip.number + 1, bucket=bucket)
        if found is None:
            is_deleted = self._is_in_doubt and self.first() > tip.number + 1
            return is_deleted and self.tip is tip
        return found.writer != self._writer

    def trim(self, before: int) -> None:
        """Delete frames that end at or before a log position; the last frame stays.

        Claims, layouts and files stay. Safe for all threads of the leader.
        """
        with self._trimming:
            first, tip = self.first(), self.tip
            if self._swept < first:  # a deletion may have ended halfway, also an earlier leader's
                self._delete_frames(self._marked(self._mark - 1), first)
                self._swept = first
            if tip is None or tip.frame == _NONE:
                return
            stop = min(self._search(before, by_end=True), tip.frame)
            if stop > first:
                self._put_mark(stop)
                self._delete_frames(first, stop)
                self._swept = stop

    def _delete_frames(self, start: int, stop: int) -> None:
        """Delete the frames among entries that a mark has given up; some may be gone."""
        doomed: list[str] = []
        for some in range(start, stop, _AHEAD):
            found = self._pool.map(self.entry, range(some, min(some + _AHEAD, stop)))
            doomed += [name_of(each.number) for each in found if each and each.kind == Kind.FRAME]
            if len(doomed) > _DELETE_NAMES - _AHEAD:
                self._bucket.delete(doomed)
                doomed.clear()
        self._bucket.delete(doomed)

    def _put_mark(self, first: int) -> None:
        while self.first() < first:
            mark = self._mark + 1
            if self._bucket.put_if_absent(_mark_name(mark), b"%d" % first):
                self._note_mark(mark, first)

    # -------------------------------------------------------------------------------------- reads

    def first(self) -> int:
        """Return the number of the first entry that no mark has given up. Safe for all threads."""
        mark = self._mark
        if self._bucket.exists(_mark_name(mark + 1)):
            mark = self._last_from(mark + 1, _mark_name)
            self._note_mark(mark, self._marked(mark))
        return self._first

    def _marked(self, mark: int) -> int:
        """Return the first entry that a mark leaves; 0 for the time before the first mark."""
        if not mark:
            return 0
        content = self._bucket.read(_mark_name(mark))
        try:
            return int(content or b"")
        except ValueError as error:
            raise LogStoreError(
                f"The object {_mark_name(mark)} in {self._bucket.address} is none of a commit log.",
                remedy="Restore it from an older version or a replica.",
            ) from error

    def _note_mark(self, mark: int, first: int) -> None:
        with self._marking:
            self._mark, self._first = max(self._mark, mark), max(self._first, first)

    def find_tip(self) -> Entry | None:
        """Return the newest entry; None if there is none.

        Raises:
            Taken: this broker leads, and another one's entries follow.
        """
        with self._putting:
            while True:
                first = self.first()
                low = first
                if self.tip is not None and self.tip.number > first:
                    low = self.tip.number
                elif not self._bucket.exists(name_of(first)):
                    if first == 0:
                        return None
                    if self.first() == first:
                        raise self._damaged(first, "is missing")
                    continue
                low = self._last_from(low, name_of)
                # Frames that were deleted meanwhile would look like the end.
                if self.first() == first or low >= self._first:
                    if self.tip is None or self.tip.number != low:
                        self._see(self.at(low))
                    return self.tip

    def _last_from(self, low: int, name_of: Callable[[int], str]) -> int:
        """Return the last number that has an object, from one on that has; there are no gaps."""
        step = 1
        while self._bucket.exists(name_of(low + step)):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self._bucket.exists(name_of(middle)):
                low = middle
            else:
                high = middle
        return low

    def entry(self, number: int, *, bucket: Bucket | None = None) -> Entry | None:
        """Return the header of an entry; None if there is none."""
        data = (bucket or self._bucket).read(name_of(number), length=_HEADER_BYTES)
        return None if data is None else self._unpacked(data, number)

    def at(self, number: int) -> Entry:
        """Return the header of an entry that must be there."""
        found = self.entry(number)
        if found is None:
            raise self._damaged(number, "is missing")
        return found

    def payload(self, number: int) -> bytes:
        """Return the payload of an entry that must be there."""
        found = self._begun(number)
        if found is None:
            raise self._damaged(number, "is missing")
        return self._completed(*found)

    def walk(self, position: int) -> Iterator[tuple[Entry, bytes]]:
        """Yield entries with their payloads, from the first frame at or after a position on.

        The first parts of several are read ahead: their names are known. The rest of a long entry
        is read when it is its turn, so that long ones take no more memory and time than one.
        """
        number, ahead = self._number_at(position), 1
        under_way: list[Future[tuple[Entry, bytes] | None]] = []
        try:
            while True:
                while len(under_way) < ahead:
                    reading = self._pool.submit(self._begun, number + len(under_way))
                    under_way.append(reading)
                found = under_way.pop(0).result()
                if found is None:
                    if self._is_end(number):
                        return
                    for each in under_way:
                        each.cancel()
                    number, ahead, under_way = self._left_from(number), 1, []
                    continue
                number += 1
                entry, payload = found[0], self._completed(*found)
                self._see(entry)
                self._cursor = (entry.end, number)
                yield entry, payload
                ahead = min(2 * ahead, _AHEAD)
        finally:
            for each in under_way:
                each.cancel()

    def headers(self, position: int) -> Iterator[Entry]:
        """Yield the headers of the entries from the first frame at or after a position on."""
        tip = self.find_tip()
        number = self._number_at(position)
        while tip is not None and number <= tip.number:
            some = range(number, min(number + _AHEAD, tip.number + 1))
            for entry in self._pool.map(self.entry, some):
                if entry is None:
                    number = self._left_from(number)
                    break
                number += 1
                yield entry

    def note(self, number: int) -> None:
        """Look for deleted entries, if another broker says that it has put one."""
        if self.tip is not None and number > self.tip.number:
            self.first()

    def _is_end(self, number: int) -> bool:
        """Return True unless an entry that was not found is one that was deleted or lost."""
        return self._first <= number and (self.tip is None or number > self.tip.number)

    def _left_from(self, number: int) -> int:
        """Return the first number that is left, from one on that was not found.

        Readers see that frames are missing by their positions.

        Raises:
            LogStoreError: no mark says that the entry was deleted.
        """
        if self.first() <= number and not self._bucket.exists(name_of(number)):
            raise self._damaged(number, "is lost")
        return max(number, self._first)

    def _number_at(self, position: int) -> int:
        """Return the number of the first entry from which on all frames at or after it are."""
        at, number = self._cursor
        return number if at == position and number else self._search(position, by_end=False)

    def _search(self, position: int, *, by_end: bool) -> int:
        """Return the number of the first entry that begins at a position or later.

        Args:
            by_end: that ends later than it, instead.
        """
        tip = self.tip or self.find_tip()
        low, high = self.first(), 0 if tip is None else tip.number + 1
        while low < high:
            middle = (low + high) // 2
            entry = self.entry(middle)
            if entry is None:  # deleted meanwhile
                low = self._left_from(middle)
            elif entry.end > position if by_end else entry.position >= position:
                high = middle
            else:
                low = middle + 1
        return low

    def _begun(self, number: int) -> tuple[Entry, bytes] | None:
        """Return an entry and the first part of its payload; None if there is none."""
        data = self._bucket.read(name_of(number), length=_PART_BYTES)
        return None if data is None else (self._unpacked(data, number), data[_HEADER_BYTES:])

    def _completed(self, entry: Entry, payload: bytes) -> bytes:
        """Return the payload of an entry, which matches its CRC, for its first part."""
        left, at = entry.length - len(payload), _HEADER_BYTES + len(payload)
        if left > 0 and at == _PART_BYTES:
            rest = self._bucket_of(left).read(name_of(entry.number), start=at, length=left)
            payload += rest or b""
        if len(payload) != entry.length or crc32(payload) != entry.crc:
            raise self._damaged(entry.number, "is damaged")
        return payload

    def _unpacked(self, data: bytes, number: int) -> Entry:
        if len(data) < _HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
            raise self._damaged(number, "is none of a commit log")
        fields, (crc,) = data[: _HEADER.size], _CRC.unpack_from(data, _HEADER.size)
        if crc32(fields) != crc:
            raise self._damaged(number, "is damaged")
        _, written_as, kind, *others = _HEADER.unpack(fields)
        if written_as > FORMAT or kind not in set(Kind):
            raise HomeFormatError(
                f"The entry {number} in {self._bucket.address} has the format {written_as}.",
                remedy="Use the version of rmq_pipeline that wrote it, or a newer one.",
            )
        entry = Entry(Kind(kind), *others)
        if entry.number != number or entry.log != self.log:
            raise self._damaged(number, "belongs to another log")
        return entry

    def _damaged(self, number: int, what: str) -> LogStoreError:
        return LogStoreError(
            f"The object {name_of(number)} in {self._bucket.address} {what}.",
            remedy="Restore the objects of log_store from older versions or a replica.",
        )

    def _bucket_of(self, size: int) -> Bucket:
        return self._bucket if size < self._patient_from else self._patient


def patient_s(timeout_s: float, frame_bytes_max: int) -> float:
    """Return the time limit of requests for the longest frames."""
    return timeout_s + frame_bytes_max / _SLOWEST


def name_of(number: int) -> str:
    """Return the name of the object of an entry."""
    return f"entries/{number:020}"


def _mark_name(mark: int) -> str:
    return f"first/{mark:010}"
