"""Offsets of a broadcasting consumer, in a file of its own machine.

``<folder>/<client id>/<group>/offsets.json``: ``{topic: {queue_id: next offset}}``. It is replaced
whole, so that a reader finds the old one or the new one, whenever the machine stops.
"""

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO
from urllib.parse import quote

from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.errors import ConsumerUsageError


class DamagedOffsetsError(ConsumerUsageError):
    """The file of a consumer's offsets cannot be read; it was left as it is."""

    remedy = "Restore it, or remove it and begin where start_from says."


def offsets_folder() -> Path:
    """Where they are unless somebody says otherwise."""
    return Path.home() / ".rocketmq_offsets"


class OffsetFile:
    """Reads and writes the offsets of one client in one group; any thread may."""

    def __init__(self, client_id: str, group: str, *, folder: Path | str | None = None) -> None:
        """Open it for this process alone.

        Raises:
            ConsumerUsageError: another consumer has it open.
            DamagedOffsetsError: it is no file of offsets.
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
        """The next offset; None when nothing was kept of the queue."""
        with self._lock:
            return self._offsets.get(queue.topic, {}).get(queue.queue_id)

    def put(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Keep offsets; they are on disk when it returns."""
        with self._lock:
            before = {topic: queues.copy() for topic, queues in self._offsets.items()}
            for queue, offset in offsets.items():
                self._offsets.setdefault(queue.topic, {})[queue.queue_id] = offset
            if self._offsets != before:
                self._write()

    def close(self) -> None:
        """Let others open it."""
        self._owned.close()

    def _own(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.with_suffix(".lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConsumerUsageError(
                f"Another consumer keeps its offsets in {self.path}: give each a client_id of its"
                " own."
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
        new = self.path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as file:
            json.dump(self._offsets, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _offset(kept: object) -> int:
    if not isinstance(kept, int) or isinstance(kept, bool) or kept < 0:
        raise ValueError(f"{kept!r} is no offset")
    return kept
