"""An entry of a commit log in numbered slots: its header, and what the slots of a store must do."""

from collections.abc import Callable, Iterator
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple, Protocol

from rmq_pipeline.store.log.frame import crc32

#: Format of the entries' headers.
FORMAT: Final = 1
_MAGIC: Final = b"RMQENTRY"
#: Magic, format, kind, format of homes, number, epoch, position, length and CRC of the payload,
#: numbers of other entries, writer, log; then the CRC of all these.
_HEADER: Final = Struct("<8sHHIQQQQIqqqq16s16s")
_CRC: Final = Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
NONE: Final = -1
#: Number in the header of a claim that took whatever number came.
UNPLACED: Final = (1 << 64) - 1


class Kind(IntEnum):
    """Kinds of entries."""

    CLAIM = 1
    FRAME = 2
    LAYOUT = 3
    FILES = 4
    #: First bytes of the payload of one of the others.
    PART = 5


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


def following(
    before: Entry | None,
    kind: Kind,
    *,
    number: int,
    epoch: int,
    length: int,
    crc: int,
    home_format: int,
    writer: bytes,
    log: bytes,
) -> Entry:
    """Return the header of the entry after another one."""

    def newest(of: Kind, seen: int) -> int:
        return number if kind == of else seen

    return Entry(
        kind=kind,
        home_format=max(home_format, 0 if before is None else before.home_format),
        number=number,
        epoch=epoch,
        position=0 if before is None else before.end,
        length=length,
        crc=crc,
        frame=newest(Kind.FRAME, NONE if before is None else before.frame),
        layout=newest(Kind.LAYOUT, NONE if before is None else before.layout),
        claim=newest(Kind.CLAIM, NONE if before is None else before.claim),
        files=newest(Kind.FILES, NONE if before is None else before.files),
        writer=writer,
        log=log,
    )


def unpacked(data: bytes) -> tuple[int, Entry]:
    """Return the format and the header of an entry; a newer format may have other kinds.

    Raises:
        ValueError: it is no header.
    """
    if len(data) < HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("is none of a commit log")
    fields, (crc,) = data[: _HEADER.size], _CRC.unpack_from(data, _HEADER.size)
    if crc32(fields) != crc:
        raise ValueError("is damaged")
    _, written_as, kind, *others = _HEADER.unpack(fields)
    return written_as, Entry(Kind(kind) if kind in set(Kind) else kind, *others)


class Slots(Protocol):
    """Numbered slots of a store. All methods are thread-safe and raise LogStoreError."""

    #: Address without secrets, for people.
    address: str
    #: Number of the first slot.
    origin: int
    #: What ``first`` has last returned.
    seen_first: int

    @property
    def slot_bytes(self) -> int:
        """Most bytes that a slot takes."""
        ...

    def put(self, number: int, data: bytes, *, stays: bool) -> bool:
        """Put an entry into a free slot after all others; return False if the store refuses it.

        After a lost answer, False may mean the caller's own entry: read it.

        Args:
            stays: no deletion takes it, as it is no frame and no part of one.
        """
        ...

    def put_next(self, data: bytes, *, after: int | None) -> int | None:
        """Put an entry that stays after all others, while others are put; return its number.

        After a lost answer it may come late, or twice.

        Args:
            after: number of an entry that is there; None: there is none.

        Returns:
            None if others always came first.
        """
        ...

    def read(self, number: int, *, start: int = 0, length: int) -> bytes | None:
        """Return some bytes of an entry; None if the slot is free, or its entry was deleted."""
        ...

    def first(self) -> int:
        """Return the number of the first entry after all frames that were given up."""
        ...

    def last(self, seen: int | None) -> int | None:
        """Return the number of the newest entry; None if there has been none.

        Args:
            seen: number of an entry that this broker has seen; None: it has seen none.
        """
        ...

    def delete(self, stop: int, frames_in: Callable[[int, int], Iterator[int]]) -> None:
        """Give up the frames before an entry, and delete them with their parts.

        Args:
            frames_in: yields the numbers of frames among entries.
        """
        ...

    def name(self, number: int) -> str:
        """Return the name of a slot, for people."""
        ...
