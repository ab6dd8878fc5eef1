"""The entries of a commit log in a store with numbered slots, each of which takes one entry.

An entry is a claim of a broker to lead, a frame, a layout, or files that leaders hand on. It is put
only into a free slot, and only after the entry before it was seen. So numbers have no gaps, and
every entry is in the chain.

A claim takes the next number, as a frame does. The old leader's next put has the same number and is
refused, also if it comes late, and it never goes on to another number. Only frames are deleted, so
that a leader which sleeps for a month finds the claim.

A payload that is too long for one slot has its first bytes in parts, in the slots just before its
entry. Parts count for nothing until that entry is there: a claim that comes first ends them.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from rmq_pipeline.errors import HomeFormatError, LogStoreError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.log.engines.chain_entry import (
    FORMAT,
    HEADER_BYTES,
    NONE,
    UNPLACED,
    Entry,
    Kind,
    Slots,
    following,
    unpacked,
)
from rmq_pipeline.store.log.frame import crc32

#: First bytes of an entry that are read; longer entries take a second request.
_HEAD_BYTES: Final = MIB
#: Entries whose first bytes are read at the same time.
_AHEAD: Final = 8
#: Tries to put a claim before the next frame of a leader that writes.
_CLAIM_TRIES: Final = 100
#: Tries after which a claim that waits for no lease takes whatever number comes.
_POLITE_TRIES: Final = 3


class Taken(Exception):  # noqa: N818 it is an answer of the store
    """Another broker has begun to lead: its entry is at the next number."""


class Chain:
    """The entries of one log. Reads are for one thread at a time, puts and ``trim`` for all."""

    def __init__(self, slots: Slots, *, writer: bytes, home_format: int) -> None:
        """Prepare the chain; nothing is read.

        Args:
            writer: name of this broker, a new one in each process.
        """
        self._slots = slots
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
                raise LogStoreError(f"The epoch {epoch} in {self._slots.address} is over.")
            while not self._has(position, length=len(frame), crc=crc):
                self._put(Kind.FRAME, lambda: frame, crc=crc, position=position)

    def _has(self, position: int, *, length: int, crc: int) -> bool:
        tip = self._led()
        if tip.end == position:
            return False
        if tip.end < position:
            raise LogStoreError(
                f"The commit log in {self._slots.address} ends at {tip.end} and has lost frames"
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
            *parts, last = self._cut(payload)
            stays = kind != Kind.FRAME
            if all(
                self._put_entry(Kind.PART, part, length=len(part), crc=crc32(part), stays=stays)
                for part in parts
            ) and self._put_entry(kind, last, length=len(payload), crc=known, stays=stays):
                return

    def _cut(self, payload: bytes) -> list[bytes]:
        """Cut a payload into what slots take."""
        size = self._slots.slot_bytes - HEADER_BYTES
        if len(payload) <= size:
            return [payload]
        return [payload[at : at + size] for at in range(0, len(payload), size)]

    def _put_entry(self, kind: Kind, data: bytes, *, length: int, crc: int, stays: bool) -> bool:
        """Put an entry after the tip; return False if one in doubt of this broker is there."""
        mine = self._following(self._led(), kind, length=length, crc=crc)
        was_in_doubt, self._is_in_doubt = self._is_in_doubt, True
        is_stored = self._slots.put(mine.number, mine.packed() + data, stays=stays)
        if was_in_doubt and self._slots.first() > mine.number:
            raise Taken
        if is_stored:
            self.tip, self._is_in_doubt = mine, False
            return True
        found = self.entry(mine.number)
        if found is None:
            if self._slots.first() > mine.number:  # of another leader, which has deleted it
                raise Taken
            self._slots.last(self._led().number)  # raises if the store has lost its last entries
            # S3 refuses one of two puts at once, and takes it later.
            raise LogStoreError(f"A put to {self._slots.address} was refused for the moment.")
        if found.writer != self._writer:
            raise Taken
        # An entry of this broker whose answer was lost, now or earlier.
        self.tip, self.epoch = found, max(self.epoch, found.epoch)
        self._is_in_doubt = False
        return found == mine

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
        return following(
            tip,
            kind,
            number=self._slots.origin if tip is None else tip.number + 1,
            epoch=self.epoch if kind != Kind.CLAIM else (0 if tip is None else tip.epoch) + 1,
            length=length,
            crc=crc,
            home_format=self._home_format,
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
            for tries in range(_CLAIM_TRIES):
                mine = self._following(self.tip, Kind.CLAIM, length=len(payload), crc=crc)
                anywhere = mine._replace(number=UNPLACED).packed() + payload
                if force and tries >= _POLITE_TRIES:
                    seen = None if self.tip is None else self.tip.number
                    taken = self._slots.put_next(anywhere, after=seen)
                    if taken is None:
                        return False
                    mine = self.at(taken)
                elif not self._slots.put(mine.number, mine.packed() + payload, stays=True):
                    found = self.entry(mine.number)
                    if found is None:
                        return False
                    self.tip = found
                    if found.kind == Kind.CLAIM and found != mine and not force:
                        return False
                    if found != mine:  # a frame of a leader that writes, without a lease
                        continue
                # A put that was under way for long may have taken the slot of a deleted frame.
                if self._slots.first() > mine.number:
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

    def is_superseded(self, *, slots: Slots | None = None) -> bool:
        """Return True if another broker's entry follows those of this leader.

        Args:
            slots: the same slots, with a time limit of the caller's.
        """
        tip = self.tip
        if not self.epoch or tip is None:
            return True
        found = self.entry(tip.number + 1, slots=slots)
        if found is None:  # a claim is never deleted, but a frame of this leader's may be
            is_deleted = self._is_in_doubt and (slots or self._slots).first() > tip.number + 1
            return is_deleted and self.tip is tip
        return found.writer != self._writer

    def trim(self, before: int) -> None:
        """Delete frames that end at or before a log position; the last frame stays.

        Safe for all threads of the leader.
        """
        with self._trimming:
            tip, stop = self.tip, self._slots.first()
            if tip is not None and tip.frame != NONE:
                kept = self.at(min(self._search(before, by_end=True), tip.frame))
                stop = self._search(kept.position, by_end=False)  # with its parts
            self._slots.delete(stop, self._frames_in)

    def _frames_in(self, start: int, stop: int) -> Iterator[int]:
        """Yield the numbers of frames among entries, of which some may be deleted."""
        for some in range(start, stop, _AHEAD):
            for each in self._pool.map(self.entry, range(some, min(some + _AHEAD, stop))):
                if each and each.kind == Kind.FRAME:
                    yield each.number

    # -------------------------------------------------------------------------------------- reads

    def find_tip(self) -> Entry | None:
        """Return the newest entry; None if there is none.

        Raises:
            Taken: this broker leads, and another one's entries follow.
        """
        with self._putting:
            number = self._slots.last(None if self.tip is None else self.tip.number)
            if number is not None and (self.tip is None or self.tip.number != number):
                self._see(self.at(number))
            return self.tip

    def entry(self, number: int, *, slots: Slots | None = None) -> Entry | None:
        """Return the header of an entry; None if there is none."""
        data = (slots or self._slots).read(number, length=HEADER_BYTES)
        return None if data is None else self._unpacked(data, number, slots=slots)

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
        return self._completed(*found, parts=[])

    def walk(self, position: int) -> Iterator[tuple[Entry, bytes]]:
        """Yield entries with their payloads, from the first frame at or after a position on.

        The first bytes of several are read ahead: their numbers are known. The rest of a long entry
        is read when it is its turn, so that long ones take no more memory and time than one.
        """
        parts: list[bytes] = []
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
                    number, ahead, under_way, parts = self._left_from(number), 1, [], []
                    continue
                number += 1
                entry, payload = found[0], self._completed(*found, parts=parts)
                self._see(entry)
                self._cursor = (entry.end, number)
                if entry.kind == Kind.PART:
                    parts.append(payload)
                else:
                    parts = []
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
            self._slots.first()

    def _is_end(self, number: int) -> bool:
        """Return True unless an entry that was not found is one that was deleted or lost."""
        return self._slots.seen_first <= number and (self.tip is None or number > self.tip.number)

    def _left_from(self, number: int) -> int:
        """Return the first number that is left, from one on that was not found.

        Readers see that frames are missing by their positions.

        Raises:
            LogStoreError: the entry was not deleted.
        """
        if self._slots.first() <= number and self.entry(number) is None:
            raise self._damaged(number, "is lost")
        return max(number, self._slots.seen_first)

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
        low, high = self._slots.first(), 0 if tip is None else tip.number + 1
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
        """Return an entry and the first bytes of what its slot has; None if there is none."""
        data = self._slots.read(number, length=_HEAD_BYTES)
        return None if data is None else (self._unpacked(data, number), data[HEADER_BYTES:])

    def _completed(self, entry: Entry, data: bytes, *, parts: list[bytes]) -> bytes:
        """Return the payload of an entry, which matches its CRC.

        Args:
            data: first bytes of what its slot has.
            parts: what the slots before it have, as far as they were read; they are taken away.
        """
        left, at = entry.length - len(data), HEADER_BYTES + len(data)
        if left > 0 and at == _HEAD_BYTES:
            data += self._slots.read(entry.number, start=at, length=left) or b""
        pieces, number, left = [data], entry.number, entry.length - len(data)
        while left > 0 and entry.kind != Kind.PART:
            number -= 1
            pieces.append(parts.pop() if parts else self._part(number, of=entry))
            left -= len(pieces[-1])
        payload = b"".join(reversed(pieces)) if len(pieces) > 1 else data
        if len(payload) != entry.length or crc32(payload) != entry.crc:
            raise self._damaged(entry.number, "is damaged")
        return payload

    def _part(self, number: int, *, of: Entry) -> bytes:
        found = self._begun(number)
        if found is None or found[0].kind != Kind.PART:
            raise self._damaged(of.number, "is damaged, or has lost a part before it")
        return self._completed(*found, parts=[])

    def _unpacked(self, data: bytes, number: int, *, slots: Slots | None = None) -> Entry:
        try:
            written_as, entry = unpacked(data)
        except ValueError as error:
            raise self._damaged(number, str(error)) from error
        if written_as > FORMAT or entry.kind not in set(Kind):
            raise HomeFormatError(
                f"The entry {number} in {self._slots.address} has the format {written_as}.",
                remedy="Use the version of rmq_pipeline that wrote it, or a newer one.",
            )
        if entry.number == UNPLACED:
            entry = self._placed(entry, number, slots=slots)
        if entry.number != number or entry.log != self.log:
            raise self._damaged(number, "belongs to another log")
        return entry

    def _placed(self, claim: Entry, number: int, *, slots: Slots | None) -> Entry:
        """Return the header of a claim that took the number that came, after the entry before."""
        before = self.entry(number - 1, slots=slots)
        if before is None and (slots or self._slots).first() < number:
            raise self._damaged(number - 1, "is missing")
        return following(  # if it was deleted, the epoch is no more than a lower limit
            before,
            Kind.CLAIM,
            number=number,
            epoch=1 if before is None else before.epoch + 1,
            length=claim.length,
            crc=claim.crc,
            home_format=claim.home_format,
            writer=claim.writer,
            log=claim.log,
        )

    def _damaged(self, number: int, what: str) -> LogStoreError:
        return LogStoreError(
            f"{self._slots.name(number)} in {self._slots.address} {what}.",
            remedy="Restore the log_store from a backup, older versions or a replica.",
        )
