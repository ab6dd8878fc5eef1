"""Segments by name: consecutive messages of a queue, in one Parquet file.

    <topic>/<topic_id>/queue_id=<n>/<base>-<end>.parquet            what counts now, for globs
    <topic>/<topic_id>/.segments/queue_id=<n>/<base>-<end>.kept     the same file
    <topic>/<topic_id>/.segments/queue_id=<n>/<base>-<end>.index    where its keys are
    <topic>/<topic_id>/_manifest.json                               lists the files that count

``queue_id=`` makes DuckDB, Spark, pyarrow and pandas read the folder of a topic as one table, so
that column is not in the files: the last two refuse one that is in both. When a segment is replaced
by a larger one or expires, its first name goes at once and the second one after a grace: a glob
finds no offset twice, and who began with the manifest reads on undisturbed. Where a file system has
no hard links there is only the first name, and it stays for the grace.
"""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID

SUFFIX: Final = ".parquet"
#: The folder of second names; tools that read a folder pass over it, and over these endings.
HIDDEN: Final = ".segments"
KEPT: Final = ".kept"
INDEX: Final = ".index"
#: A file on its way to its name.
UNFINISHED: Final = ".new"

_LEFT_OUT: Final = frozenset({"topic_id", "queue_id"})
#: Their messages are for another topic.
_AIMED: Final = frozenset({SCHEDULE_TOPIC_ID, HALF_TOPIC_ID})


def columns_of(topic_id: int) -> pa.Schema:
    """What the segments of a topic hold: schema.MESSAGE but topic_id and queue_id.

    Only those of the topics in which messages wait for another one have target_topic_id.
    """
    without = _LEFT_OUT if topic_id in _AIMED else {*_LEFT_OUT, "target_topic_id"}
    return pa.schema([field for field in schema.MESSAGE if field.name not in without])


def topic_folder(topic: str, topic_id: int) -> str:
    """Where the segments of a topic are, and their manifest."""
    return f"{topic}/{topic_id}"


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """The offsets [base, end) of a queue, in one file."""

    topic: str
    topic_id: int
    queue_id: int
    base: int
    end: int

    @property
    def rows(self) -> int:
        """How many messages it holds."""
        return self.end - self.base

    @property
    def folder(self) -> str:
        """The folder of its topic."""
        return topic_folder(self.topic, self.topic_id)

    @property
    def name(self) -> str:
        """Its path inside the folder of the topic."""
        return f"queue_id={self.queue_id}/{self._range}{SUFFIX}"

    @property
    def relative(self) -> str:
        """Its path inside the folder of all topics."""
        return f"{self.folder}/{self.name}"

    @property
    def kept_name(self) -> str:
        """Its second name inside the folder of the topic."""
        return f"{HIDDEN}/queue_id={self.queue_id}/{self._range}{KEPT}"

    @property
    def kept(self) -> str:
        """Its second name inside the folder of all topics."""
        return f"{self.folder}/{self.kept_name}"

    @property
    def index(self) -> str:
        """Where its keys are, inside the folder of all topics."""
        return f"{self.folder}/{HIDDEN}/queue_id={self.queue_id}/{self._range}{INDEX}"

    @property
    def _range(self) -> str:
        return f"{self.base:020d}-{self.end:020d}"

    @classmethod
    def from_path(cls, relative: str) -> "Segment":
        """What ``relative`` gave.

        Raises:
            ValueError: it is no such path.
        """
        topic, topic_id, queue, name = relative.split("/")
        base, end = name.removesuffix(SUFFIX).split("-")
        return cls(topic, int(topic_id), int(queue.removeprefix("queue_id=")), int(base), int(end))
