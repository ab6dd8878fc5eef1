"""The local files of a log and its store, when the log is opened: one catches up with the other.

A frame's header names the position up to which both had the log when it was written. So only frames
from the header of the last local frame on can differ from the store.

    local frames that the store lacks     this process failed to append them: cut
                                          an earlier process wrote them: append them now
    frames of the store that are missing  write them to the local files
    different frames at one position      one frame that was never answered: cut, then as above
                                          others: another broker led meanwhile, refuse
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol

from rmq_pipeline.errors import CorruptLogError, LogStoreError
from rmq_pipeline.store.log.frame import crc32
from rmq_pipeline.store.log.log_store import Layout, LogStore, Stored

log = logging.getLogger(__name__)

#: Bytes of frames that are written locally between two syncs.
_SYNC_BYTES: Final = 64 << 20
#: Bytes of frames of a store that are kept until their layouts are read.
_READ_BYTES: Final = 32 << 20


class DivergedLogError(CorruptLogError):
    """The home has frames of its own where the store has those of another leader."""

    remedy = (
        "Start with an empty home, which gets the log from the store. With replication = async the "
        "other home's last messages are only there: keep it to read them."
    )


class LocalLog(Protocol):
    """The local files, as they are compared and completed."""

    #: End of the last frame.
    end: int

    @property
    def first(self) -> int:
        """Position of the first frame."""
        ...

    def confirmed(self) -> int:
        """Return the position up to which the store surely had the log."""
        ...

    def stored_at(self, position: int) -> Stored | None:
        """Return the frame at a position; None if no frame begins there."""
        ...

    def bytes_at(self, frame: Stored) -> bytes:
        """Return the bytes of a frame."""
        ...

    def layout_at(self, position: int) -> Layout:
        """Return the layout of the frame at a position, or of the next frame at the end."""
        ...

    def pulling(self) -> AbstractContextManager[None]:
        """Mark what ``take_over`` writes as incomplete until the block ends."""
        ...

    def take_over(self, position: int, frame: bytes, *, layout: Layout) -> None:
        """Write a frame of the store at the end, in a file of its layout."""
        ...

    def cut(self, position: int) -> None:
        """Drop all frames from a position on."""
        ...

    def sync(self) -> None:
        """Sync what ``take_over`` has written."""
        ...


def meet(
    local: LocalLog,
    store: LogStore,
    *,
    failed_from: int | None,
    answered_alone: bool,
    dispatched: int,
) -> int:
    """Make the local files and the store the same; return the end of both.

    Args:
        local: the log's files, checked.
        store: leads under its newest epoch, so no other broker appends.
        failed_from: frames from here on failed in this process, and no caller was answered; None:
            the process has just started.
        answered_alone: the home may have answered frames that the store lacks (async).
        dispatched: position that DuckDB has reached.

    Raises:
        DivergedLogError: another broker has led, and the local frames cannot be dropped.
    """
    last = store.last()
    start = min(local.confirmed(), last.position if last else 0)
    if start < local.first:
        raise DivergedLogError(
            f"The home has the log from position {local.first} on, and the store ends before."
        )
    end = last.end if last else 0
    parted = _parting(local, store, start=start)
    if parted is not None:
        _check_unanswered(local, parted, answered_alone=answered_alone, dispatched=dispatched)
        log.warning("cut a frame that was never answered: position=%d", parted)
        local.cut(parted)
    if local.end > end and failed_from is not None and end >= failed_from and not answered_alone:
        log.warning("cut what was not stored: position=%d bytes=%d", end, local.end - end)
        local.cut(end)
    if local.end > end:
        _push(local, store, start=end)
    elif local.end < end:
        _pull(local, store)
    _tell_layout(store, local.layout_at(local.end))  # of the frames that this process will write
    return local.end


def follow(local: LocalLog, store: LogStore, *, answered_alone: bool, dispatched: int) -> int:
    """Make the local files a copy of a store that another broker leads; return their end.

    The leader may append meanwhile. A local frame that the store lacks was written by an earlier
    process of this home. Its epoch is over, so the store never gets it.

    Args:
        answered_alone: see ``meet``.
        dispatched: see ``meet``.

    Raises:
        DivergedLogError: see ``meet``.
    """
    last = store.last()
    end = last.end if last else 0
    parted = _parting(local, store, start=min(local.confirmed(), last.position if last else 0))
    if parted is None and local.end > end:
        parted = end
    if parted is not None:
        _check_unanswered(local, parted, answered_alone=answered_alone, dispatched=dispatched)
        log.warning("cut a frame that was never answered: position=%d", parted)
        local.cut(parted)
    _pull(local, store)
    return local.end


def missing(store: LogStore, start: int) -> Iterator[tuple[Stored, bytes, Layout]]:
    """Yield the frames of a store from a position on, without gaps, and their layouts."""
    some: list[tuple[Stored, bytes]] = []
    size = 0
    for found in _dense(store, start):
        some.append(found)
        size += len(found[1])
        if size >= _READ_BYTES:
            yield from _with_layouts(store, some)
            some, size = [], 0
    yield from _with_layouts(store, some)


def _with_layouts(
    store: LogStore, frames: list[tuple[Stored, bytes]]
) -> Iterator[tuple[Stored, bytes, Layout]]:
    """Yield frames with their layouts, read after them: a leader stores a layout before a frame."""
    layouts = store.layouts() if frames else []
    for stored, frame in frames:
        layout = _layout_at(layouts, stored.position)
        if layout is None:
            raise _unsound(store, f"no layout of the frame at position {stored.position}")
        yield stored, frame, layout


def _tell_layout(store: LogStore, layout: Layout) -> None:
    """Store the layout of the frames from its start on, unless they are like those before."""
    if not layout.is_as(_layout_at(store.layouts(), layout.start)):
        store.put_layout(layout)


def _layout_at(layouts: list[Layout], position: int) -> Layout | None:
    return next((each for each in reversed(layouts) if each.start <= position), None)


def _parting(local: LocalLog, store: LogStore, *, start: int) -> int | None:
    """Return the first position at which both have a frame and these differ; None if there is none.

    Raises:
        LogStoreError: the store lacks a frame in between.
    """
    at = start
    for stored in store.headers(start):
        if at >= local.end:
            return None
        if stored.position != at:
            _check_begins_before(store, at)
            raise _unsound(store, f"no frame at position {at}, but one at {stored.position}")
        if local.stored_at(at) != stored:
            return at
        at = stored.end
    return None


def _check_unanswered(
    local: LocalLog, parted: int, *, answered_alone: bool, dispatched: int
) -> None:
    """Check that the local frame at a position is the last one, and that no caller was answered."""
    frame = local.stored_at(parted)
    is_last = frame is not None and frame.end == local.end
    if answered_alone or not is_last or dispatched > parted:
        raise DivergedLogError(
            f"The home and the store differ from position {parted} on; the home has"
            f" {local.end - parted} bytes of its own there."
        )


def _push(local: LocalLog, store: LogStore, *, start: int) -> None:
    at, layout = start, None
    while at < local.end:
        frame = local.stored_at(at)
        if frame is None:
            raise DivergedLogError(f"No frame of the home begins at {at}, where the store ends.")
        if not local.layout_at(at).is_as(layout):
            _tell_layout(store, layout := local.layout_at(at))
        store.append(at, local.bytes_at(frame))
        at = frame.end
    log.info("the store has the log of the home: from=%d to=%d", start, at)


def _pull(local: LocalLog, store: LogStore) -> None:
    start, unsynced = local.end, 0
    with local.pulling():
        for stored, frame, layout in missing(store, start):
            local.take_over(stored.position, frame, layout=layout)
            unsynced += len(frame)
            if unsynced >= _SYNC_BYTES:
                local.sync()
                unsynced = 0
        local.sync()
    log.info("the home has the log of the store: from=%d to=%d", start, local.end)


def _dense(store: LogStore, start: int) -> Iterator[tuple[Stored, bytes]]:
    """Yield the frames of the store from a position on, without gaps."""
    at = start
    for stored, frame in store.frames(start):
        if stored.position != at or crc32(frame) != stored.crc:
            _check_begins_before(store, at)  # or it was trimmed while it was read
            raise _unsound(store, f"no sound frame at position {at}")
        at = stored.end
        yield stored, frame


def _check_begins_before(store: LogStore, position: int) -> None:
    """Check that the store has not been trimmed beyond a position that a home needs.

    Raises:
        DivergedLogError: it has.
    """
    first = next(store.headers(0), None)
    if first is not None and first.position > position:
        raise DivergedLogError(
            f"The store {store.address} begins at position {first.position}, and the home needs"
            f" the log from {position} on: it was away for too long.",
            remedy="Start with an empty home, which begins with a copy of the state.",
        )


def _unsound(store: LogStore, what: str) -> LogStoreError:
    return LogStoreError(
        f"The store {store.address} has {what}.",
        remedy="Restore the database, bucket or stream of log_store from its standby, backup or"
        " versions.",
    )
