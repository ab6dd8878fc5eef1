"""Plan of a replay, and its report."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pyarrow as pa

from rmq_pipeline.errors import RequestError
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.spark.replay.sinks import SideRange, hour_partitions
from rmq_pipeline.storage.root import Address

#: replace: the sink's own partitions; side_sink: another folder; dry_run: only report changes.
Mode = Literal["replace", "side_sink", "dry_run"]
_COLUMNS: Final = {"stored": "stored_at_ms", "born": "born_at_ms"}

#: Columns of messages whose outcome has changed.
OUTCOMES: Final = pa.schema(
    [
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("message_id", pa.string()),
        ("message_group", pa.string()),
        ("was", pa.string()),
        ("would_be", pa.string()),
        ("reason", pa.string()),
    ]
)
#: Fields of the report that are neither numbers nor names.
_TABLES: Final = frozenset(
    {"outcomes", "changed", "later", "behind_rows", "not_published", "published"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A range of a consumer's topic, and how to apply its rows.

    Raises:
        RequestError: the plan is inconsistent.
    """

    spec: ConsumerSpec
    #: Whole hours of the topic's partition time, half-open.
    from_ms: int
    to_ms: int
    mode: Mode
    #: Identity of the replay: work done under an id is not repeated.
    replay_id: str
    #: Folder for reports and for files exchanged by tasks; the driver and Spark must reach it.
    folder: Address
    #: Folder of the side sink; only for mode side_sink.
    side_sink: Address | None = None
    #: Number of calls for a message before its failure is final.
    tries: int = 1
    #: The sink's partitions contain the rows of messages of the same hour, although the names of
    #: the times differ.
    partitions_match: bool = False
    #: Publish the handler's messages, to topics that suppress repetitions; each is stored once.
    publish: bool = False
    #: Minimum number of tasks.
    parallelism: int = 2

    def __post_init__(self) -> None:
        try:
            hour_partitions(self.from_ms, self.to_ms)
        except ValueError as error:
            remedy = "Give a range of whole hours."
            raise RequestError(f"A replay takes whole hours: {error}", remedy=remedy) from error
        if self.spec.idempotency_key is not None:
            raise RequestError(
                f"Consumer {self.spec.name} has effects outside the broker, once per key; a replay"
                " would repeat them.",
                remedy="Replay a consumer without idempotency_key.",
            )
        if self.mode != "dry_run" and self.spec.sink is None:
            raise RequestError(
                f"Consumer {self.spec.name} has no sink.",
                remedy="Give it a sink, or use mode dry_run.",
            )
        if (self.mode == "side_sink") != (self.side_sink is not None):
            raise RequestError(
                f"Mode {self.mode} and side_sink {self.side_sink} do not fit.",
                remedy="Give side_sink a folder in mode side_sink, and in no other mode.",
            )
        if self.side_sink is not None and self.side_sink == self.spec.sink:
            raise RequestError(
                f"The side sink {self.side_sink} is the sink of the consumer.",
                remedy="Give another folder.",
            )
        if self.publish and self.mode == "dry_run":
            raise RequestError(
                "A dry run publishes nothing.", remedy="Omit publish, or use another mode."
            )
        if self.tries < 1:
            raise RequestError(f"tries is {self.tries}.", remedy="Give 1 or more.")

    @property
    def label(self) -> str:
        """Label in the file names; for a side sink, all replays of the range share the label."""
        if self.mode == "side_sink":
            return self.side_range.label
        text = f"{self.spec.group}/{self.replay_id}/{self.from_ms}/{self.to_ms}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def side_range(self) -> SideRange:
        """The range in the form of a side sink."""
        return SideRange(self.spec.group, self.from_ms, self.to_ms)

    @property
    def replacement_id(self) -> str:
        """Id of the replacement at the broker."""
        return f"replay/{self.replay_id}/{self.from_ms}-{self.to_ms}"

    def publication_of(self, topic_id: int) -> str:
        """Return the prefix of published messages' ids; empty if none are published.

        The prefix does not contain the range: a replay of other hours with the same id publishes
        each message once. A backfill may cover several groups, which share the replay's id.

        Args:
            topic_id: id of the replayed topic; a new topic of the same name has another id.
        """
        if not self.publish:
            return ""
        text = f"{self.replay_id}/{self.spec.group}/{topic_id}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def partitions(self) -> list[str]:
        """The sink's partitions that the range fills."""
        return hour_partitions(self.from_ms, self.to_ms)

    def check_partitions(self, partition_time: str) -> None:
        """Check that the sink's partitions are those of the topic.

        Raises:
            RequestError: the names differ, and ``partitions_match`` is not set.
        """
        named = _COLUMNS.get(partition_time, partition_time)
        same = self.spec.partition_time in (named, f"{named}_ms")
        if self.spec.sink is not None and not (same or self.partitions_match):
            raise RequestError(
                f"The sink of {self.spec.name} is partitioned by {self.spec.partition_time}, the"
                f" topic by {partition_time}: a partition may hold rows of other messages.",
                remedy="Set partitions_match if each partition has the rows of its own hour.",
            )


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """Results of a replay; a dry run reports the results that a replay would have."""

    mode: Mode
    replay_id: str
    from_ms: int
    to_ms: int
    #: Settled messages of the range, messages walked before it to build its state, and messages
    #: behind it.
    messages: int = 0
    warm_up: int = 0
    behind: int = 0
    #: Messages of the range that are not settled; the group handles them itself.
    not_settled: int = 0
    #: Messages that end as dead letters, parked, or held behind a parked message.
    failed: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    #: Files that were replaced.
    replaced_files: int = 0
    #: topic -> messages that the handler would publish, if the replay publishes none.
    not_published: dict[str, int] = field(default_factory=dict)
    #: topic -> messages published now, without those published by an earlier attempt.
    published: dict[str, int] = field(default_factory=dict)
    #: Dry run: why mode replace would be refused.
    replace_refused: str = ""
    #: Dry run: rows that only the replay or only the sink has; by partition in ``changed``.
    rows_added: int = 0
    rows_removed: int = 0
    changed: dict[str, int] = field(default_factory=dict)
    outcomes: pa.Table = field(default_factory=OUTCOMES.empty_table)
    #: Partitions behind the range with messages of groups whose state differs from the recorded
    #: state.
    later: list[str] = field(default_factory=list)
    #: Rows behind the range that this code and state would make and the sink lacks, by partition;
    #: only messages settled together with the range were examined.
    behind_rows: dict[str, int] = field(default_factory=dict)
    #: Message groups whose final state differs from the recorded state.
    states_differ: int = 0
    #: Message groups that begin without state although earlier messages of theirs may have expired.
    states_unknown: int = 0
    #: Parquet files with differing rows and outcomes.
    rows_report: str = ""
    outcomes_report: str = ""
    #: The replay was done before under its id; nothing was done now.
    repeated: bool = False
    spark_s: float = 0.0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return its numbers and names, without tables."""
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _TABLES
        }
