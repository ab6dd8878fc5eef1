"""File with the offsets of a broadcasting consumer, on its own machine.

``<folder>/<client id>/<group>/offsets.json``: ``{topic: {queue_id: next offset}}``. The file is
replaced atomically: after a crash it has either the old or the new offsets.
"""

import fcntl
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO
from urllib.parse import quote

from rmq_pipeline import durable_files
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.errors import ConsumerUsageError


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
