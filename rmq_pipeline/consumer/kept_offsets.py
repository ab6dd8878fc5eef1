"""Where a reader's offsets are kept: at the broker, or in a file of this machine."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from rmq_pipeline.consumer.message_queue import MessageQueue, by_topic
from rmq_pipeline.consumer.offset_file import OffsetFile
from rmq_pipeline.consumer.verbs import MembershipVerbs, OffsetVerbs
from rmq_pipeline.errors import RequestError, StorageError

#: Where a group begins in a topic that it has never read: after the last message, with the first,
#: or with the first stored at or after a time in ms since 1970.
StartFrom = Literal["last", "first"] | int


class Place(NamedTuple):
    """Where a reader's group is, as far as the reader knows."""

    #: The next offset to read; -1: wherever it is.
    offset: int
    #: How often somebody has put the group elsewhere; None: that does not matter.
    resets: int | None = None


#: By queue, from where a reader believes to be, and to where.
Moves = Mapping[MessageQueue, tuple[Place, int]]


class ReadingVerbs(MembershipVerbs, OffsetVerbs, Protocol):
    """What a reader by offset asks of the broker."""


class KeptOffsets(Protocol):
    """Committed offsets: the next one to read."""

    def start(self, queue: MessageQueue) -> Place:
        """The committed offset; a queue that has none gets one."""
        ...

    def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset."""
        ...

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        """Move offsets from where they are believed to be; where they are then."""
        ...

    def close(self) -> None:
        """No more of it."""
        ...


def checked_start(start_from: StartFrom) -> StartFrom:
    """A start that is one.

    Raises:
        RequestError: it is none.
    """
    is_time = isinstance(start_from, int) and not isinstance(start_from, bool)
    if start_from not in ("last", "first") and not is_time:
        raise RequestError(
            f"start_from is last, first, or ms since 1970 of a message, not {start_from!r}."
        )
    return start_from


def checked_interval(auto_commit_ms: int | None) -> int | None:
    """How often to commit, if that is a while.

    Raises:
        RequestError: it is none.
    """
    if auto_commit_ms is not None and auto_commit_ms < 1:
        raise RequestError(f"auto_commit_ms is 1 or more, or None, not {auto_commit_ms!r}.")
    return auto_commit_ms


class BrokerOffsets:
    """The group's offsets at the broker. A move that somebody else was faster with is not made."""

    def __init__(
        self, verbs: OffsetVerbs, *, group: str, client_id: str, start_from: StartFrom
    ) -> None:
        self._verbs, self._group, self._client_id = verbs, group, client_id
        self._start_from = checked_start(start_from)

    def start(self, queue: MessageQueue) -> Place:
        """The committed offset; queues of the topic that have none begin at ``start_from``."""
        place = self._place(queue)
        if place.offset < 0:
            self._verbs.start_offsets(self._group, queue.topic, where=self._start_from)
            place = self._place(queue)
        return place

    def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset; None when the group has read nothing of the queue."""
        found = self._place(queue).offset
        return None if found < 0 else found

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        """Move offsets that are where they are believed to be, and were not put there since.

        Raises:
            QueueLockedError: another member owns one of the queues.
        """
        found: dict[MessageQueue, int] = {}
        for topic, queues in by_topic(moves).items():
            places = {queue.queue_id: moves[queue][0] for queue in queues}
            now = self._verbs.commit_offsets(
                self._group,
                topic,
                offsets={q.queue_id: (moves[q][0].offset, moves[q][1]) for q in queues},
                client_id=self._client_id,
                resets={q: place.resets for q, place in places.items() if place.resets is not None},
            )
            found.update((queue, now[queue.queue_id]) for queue in queues)
        return found

    def close(self) -> None:
        """Nothing to close."""

    def _place(self, queue: MessageQueue) -> Place:
        found = self._verbs.committed_offsets(self._group, queue.topic)
        return Place(*found[queue.queue_id])


class FileOffsets:
    """A broadcasting consumer's own offsets; a StorageError says that they are not kept."""

    def __init__(self, verbs: ReadingVerbs, file: OffsetFile, *, start_from: StartFrom) -> None:
        self._verbs, self._file = verbs, file
        self._start_from = checked_start(start_from)

    def start(self, queue: MessageQueue) -> Place:
        """The offset in the file; a queue that has none there gets one."""
        kept = self._file.get(queue)
        if kept is None:
            kept = self._first_start(queue)
            self._put({queue: kept})
        return Place(kept)

    def committed(self, queue: MessageQueue) -> int | None:
        """The offset in the file."""
        return self._file.get(queue)

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        """Nobody else moves them: all moves are made."""
        found = {queue: to for queue, (_, to) in moves.items()}
        self._put(found)
        return found

    def close(self) -> None:
        """Let others have the file."""
        self._file.close()

    def _put(self, offsets: Mapping[MessageQueue, int]) -> None:
        try:
            self._file.put(offsets)
        except OSError as error:
            raise StorageError(f"Offsets are not kept in {self._file.path}: {error}.") from error

    def _first_start(self, queue: MessageQueue) -> int:
        if isinstance(self._start_from, int):
            return self._verbs.offset_at(queue.topic, queue.queue_id, at_ms=self._start_from)
        bounds = self._verbs.describe_topic(queue.topic)["offsets"][queue.queue_id]
        return int(bounds["max_offset" if self._start_from == "last" else "min_offset"])
