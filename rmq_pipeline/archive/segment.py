"""Segments by name: consecutive messages of a queue, in one Parquet file.

    <topic>/<topic_id>/queue_id=<n>/<base>-<end>.parquet            current segments, for globs
    <topic>/<topic_id>/.segments/queue_id=<n>/<base>-<end>.kept     the same file
    <topic>/<topic_id>/.segments/queue_id=<n>/<base>-<end>.index    the index of its keys
    <topic>/<topic_id>/_manifest.json                               lists the current segments

If the commit log is in a store, ``-<epoch>`` follows ``<end>``: the epoch of the leader that wrote
the file. No two leaders write the same name, and a leader deletes no file of a later epoch.

Because of ``queue_id=``, DuckDB, Spark, pyarrow and pandas read a topic's folder as one table. The
files have no such column, as pyarrow and pandas refuse a column that is also in the path. When a
segment expires or a larger one replaces it, its first name is deleted at once and its second one
after a grace period. A glob therefore finds no offset twice, and readers of an older manifest
can finish. On a file system without hard links only the first name exists, and it stays for the
grace.
"""

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID

SUFFIX: Final = ".parquet"
#: The folder of the second names; tools that read a folder skip it, and these endings.
HIDDEN: Final = ".segments"
KEPT: Final = ".kept"
INDEX: Final = ".index"
#: Ending of a file that is still being written.
UNFINISHED: Final = ".new"
#: Names of files with an epoch: of a segment or its index, and of an unfinished one.
_EPOCH: Final = re.compile(
    r"(?:\d{20}-\d{20}-(?P<whole>\d+)|\.\d{20}-(?P<unfinished>\d+)-[0-9a-f]{8})\.[.a-z]+"
)

_LEFT_OUT: Final = frozenset({"topic_id", "queue_id"})
#: Topics whose messages wait for another topic.
_AIMED: Final = frozenset({SCHEDULE_TOPIC_ID, HALF_TOPIC_ID})


def columns_of(topic_id: int) -> pa.Schema:
    """Return the columns of a topic's segments: schema.MESSAGE without topic_id and queue_id.

    Only topics whose messages wait for another topic have target_topic_id.
    """
    without = _LEFT_OUT if topic_id in _AIMED else {*_LEFT_OUT, "target_topic_id"}
    return pa.schema([field for field in schema.MESSAGE if field.name not in without])


def topic_folder(topic: str, topic_id: int) -> str:
    """Return the folder of a topic's segments and manifest, relative to the root."""
    return f"{topic}/{topic_id}"


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """The offsets [base, end) of a queue, in one file."""

    topic: str
    topic_id: int
    queue_id: int
    base: int
    end: int
    #: Epoch of the leader that wrote the file; 0: only one home has the log.
    epoch: int = 0

    @property
    def rows(self) -> int:
        """Number of messages."""
        return self.end - self.base

    @property
    def folder(self) -> str:
        """The folder of the topic, relative to the root."""
        return topic_folder(self.topic, self.topic_id)

    @property
    def name(self) -> str:
        """The path relative to the topic's folder."""
        return f"queue_id={self.queue_id}/{self._range}{SUFFIX}"

    @property
    def relative(self) -> str:
        """The path relative to the root."""
        return f"{self.folder}/{self.name}"

    @property
    def kept_name(self) -> str:
        """The second name, relative to the topic's folder."""
        return f"{HIDDEN}/queue_id={self.queue_id}/{self._range}{KEPT}"

    @property
    def kept(self) -> str:
        """The second name, relative to the root."""
        return f"{self.folder}/{self.kept_name}"

    @property
    def index(self) -> str:
        """The path of the key index, relative to the root."""
        return f"{self.folder}/{HIDDEN}/queue_id={self.queue_id}/{self._range}{INDEX}"

    @property
    def _range(self) -> str:
        of_leader = f"-{self.epoch}" if self.epoch else ""
        return f"{self.base:020d}-{self.end:020d}{of_leader}"

    @classmethod
    def from_path(cls, relative: str) -> "Segment":
        """Return the segment with this ``relative`` path.

        Raises:
            ValueError: the path is not a segment's.
        """
        topic, topic_id, queue, name = relative.split("/")
        if topic in {"", ".", ".."} or "\0" in topic:
            raise ValueError(f"{topic!r} is not a topic name")
        base, end, *epoch = name.removesuffix(SUFFIX).split("-", 2)
        queue_id = int(queue.removeprefix("queue_id="))
        return cls(topic, int(topic_id), queue_id, int(base), int(end), *map(int, epoch))


def unfinished_name(base: int, *, epoch: int, attempt: str) -> str:
    """Return the name of a file that is still being written, without its folder."""
    of_leader = f"-{epoch}" if epoch else ""
    return f".{base:020d}{of_leader}-{attempt}{UNFINISHED}"


def epoch_of(path: str) -> int | None:
    """Return the epoch in the name of a segment, an index or an unfinished file; None: none is."""
    found = _EPOCH.fullmatch(path.rpartition("/")[2])
    return int(found["whole"] or found["unfinished"]) if found else None
