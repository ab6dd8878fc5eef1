"""Stored offsets of a reader: at the broker, or in a file of this machine.

A broadcasting consumer has ``<folder>/<client id>/<group>/offsets.json``:
``{topic: {queue_id: next offset}}``. The file is replaced atomically: after a crash it has either
the old or the new offsets.
"""

import fcntl
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol
from urllib.parse import quote

from rmq_pipeline import durable_files, limits
from rmq_pipeline.consumer.message_queue import MessageQueue, by_topic
from rmq_pipeline.errors import ConsumerUsageError, RequestError, StorageError
from rmq_pipeline.verbs import Verbs


class DamagedOffsetsError(ConsumerUsageError):
    """The offset file of a consumer is damaged; it was left unchanged."""

    remedy = "Restore it, or remove it to start at start_from."


def offsets_folder() -> Path:
    """Return the default folder of offset files."""
    return Path.home() / ".rocketmq_offsets"


class OffsetFile:
    """Offsets of one client in one group; thread-safe."""

    def __init__(self, client_id: str, group: str, *, folder: Path | str | None = None) -> None:
        """Open and lock the file.

        Raises:
            ConsumerUsageError: another consumer has the file open.
            DamagedOffsetsError: the file does not parse.
        """
        names = quote(client_id, safe="@#"), quote(group, safe="%|")
        self.path = Path(folder or offsets_folder()).joinpath(*names, "offsets.json")
        self._lock = threading.Lock()
        self._owned = self._own()
        try:
            self._offsets = self._read()
        except BaseException:
            self.close()
            raise

    def get(self, queue: MessageQueue) -> int | None:
        """Return the next offset; None if the file has none for the queue."""
        with self._lock:
            return self._offsets.get(queue.topic, {}).get(queue.queue_id)

    def put(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Write offsets; they are synced when the call returns."""
        with self._lock:
            before = {topic: queues.copy() for topic, queues in self._offsets.items()}
            for queue, offset in offsets.items():
                self._offsets.setdefault(queue.topic, {})[queue.queue_id] = offset
            if self._offsets != before:
                self._write()

    def close(self) -> None:
        """Unlock the file."""
        self._owned.close()

    def _own(self) -> IO[bytes]:
        durable_files.make_folder(self.path.parent)
        file = self.path.with_suffix(".lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConsumerUsageError(
                f"Another consumer has the offset file {self.path} open.",
                remedy="Give each consumer its own client_id.",
            ) from error
        return file

    def _read(self) -> dict[str, dict[int, int]]:
        try:
            found = json.loads(self.path.read_text("utf-8"))
            return {
                topic: {int(queue_id): _offset(offset) for queue_id, offset in queues.items()}
                for topic, queues in found.items()
            }
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError) as error:
            raise DamagedOffsetsError(f"{self.path} is damaged.") from error

    def _write(self) -> None:
        durable_files.replace(self.path, json.dumps(self._offsets).encode())


def _offset(kept: object) -> int:
    if not isinstance(kept, int) or isinstance(kept, bool) or kept < 0:
        raise ValueError(f"{kept!r} is not an offset")
    return kept


#: Start of a group in a topic that it has never read: after the last message, at the first, or at
#: the first stored at or after a time in ms since 1970.
StartFrom = Literal["last", "first"] | int


class Place(NamedTuple):
    """Committed offset of a group in a queue, as the reader knows it."""

    #: Next offset to read; -1 in a commit: any.
    offset: int
    #: Number of resets of the group in this queue; None: resets are not checked.
    resets: int | None = None


#: By queue: the expected place, and the new offset.
Moves = Mapping[MessageQueue, tuple[Place, int]]


class OffsetStore(Protocol):
    """Store of committed offsets, each the next offset to read."""

    def start(self, queue: MessageQueue) -> Place:
        """Return the committed offset; commit the start offset if the queue has none."""
        ...

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset; None if the queue has none."""
        ...

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        """Commit offsets whose expected places are current; return the offsets after it."""
        ...

    def close(self) -> None:
        """Release the store."""
        ...


def checked_start(start_from: StartFrom) -> StartFrom:
    """Check a start and return it.

    Raises:
        RequestError: the start is not "last", "first", or a time in range.
    """
    is_time = isinstance(start_from, int) and not isinstance(start_from, bool)
    is_moment = is_time and 0 <= int(start_from) <= limits.TIME_MAX_MS
    if start_from not in ("last", "first") and not is_moment:
        raise RequestError(
            f"start_from is last, first, or ms since 1970, from 0 to {limits.TIME_MAX_MS} (the"
            f" year 9999), not {start_from!r}.",
            remedy="Check how the time was computed; 'last' begins at the end.",
        )
    return start_from


def checked_interval(auto_commit_ms: int | None) -> int | None:
    """Check an interval between commits and return it.

    Raises:
        RequestError: the interval is below 1 ms.
    """
    if auto_commit_ms is not None and auto_commit_ms < 1:
        raise RequestError(
            f"auto_commit_ms is {auto_commit_ms!r}.",
            remedy="Give 1 or more, or None to commit explicitly only.",
        )
    return auto_commit_ms


class BrokerOffsets:
    """Offsets of the group at the broker; a commit has no effect if another one was faster."""

    def __init__(self, verbs: Verbs, *, group: str, client_id: str, start_from: StartFrom) -> None:
        self._verbs, self._group, self._client_id = verbs, group, client_id
        self._start_from = checked_start(start_from)

    def start(self, queue: MessageQueue) -> Place:
        """Return the committed offset; start queues of the topic without one at ``start_from``."""
        place = self._place(queue)
        if place.offset < 0:
            self._verbs.start_offsets(self._group, queue.topic, where=self._start_from)
            place = self._place(queue)
        return place

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the committed offset; None if the group has read nothing of the queue."""
        found = self._place(queue).offset
        return None if found < 0 else found

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        """Commit offsets whose expected offset and number of resets are current.

        Returns:
            The committed offset of each queue after the call.

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
        """Do nothing: the broker holds the offsets."""

    def _place(self, queue: MessageQueue) -> Place:
        found = self._verbs.committed_offsets(self._group, queue.topic)
        return Place(*found[queue.queue_id])


class FileOffsets:
    """Offsets of a broadcasting consumer in a file; a failed write raises StorageError."""

    def __init__(self, verbs: Verbs, file: OffsetFile, *, start_from: StartFrom) -> None:
        self._verbs, self._file = verbs, file
        self._start_from = checked_start(start_from)

    def start(self, queue: MessageQueue) -> Place:
        """Return the offset in the file; write the start offset if the queue has none."""
        kept = self._file.get(queue)
        if kept is None:
            kept = self._first_start(queue)
            self._put({queue: kept})
        return Place(kept)

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the offset in the file; None if the queue has none."""
        return self._file.get(queue)

    def commit(self, moves: Moves) -> dict[MessageQueue, int]:
        """Write all offsets: the file has no other writer, so places are not compared."""
        found = {queue: to for queue, (_, to) in moves.items()}
        self._put(found)
        return found

    def close(self) -> None:
        """Unlock the file for other consumers."""
        self._file.close()

    def _put(self, offsets: Mapping[MessageQueue, int]) -> None:
        try:
            self._file.put(offsets)
        except OSError as error:
            raise StorageError(
                f"Offsets could not be written to {self._file.path}: {error}.",
                remedy="Check the folder's permissions and the free space of the disk.",
            ) from error

    def _first_start(self, queue: MessageQueue) -> int:
        if isinstance(self._start_from, int):
            return self._verbs.offset_at(queue.topic, queue.queue_id, at_ms=self._start_from)
        bounds = self._verbs.describe_topic(queue.topic)["offsets"][queue.queue_id]
        return int(bounds["max_offset" if self._start_from == "last" else "min_offset"])
