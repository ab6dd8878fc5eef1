"""What is to be replayed and how, and what a replay reports."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from rmq_pipeline.errors import RequestError
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.spark.replay.comparison import OUTCOMES
from rmq_pipeline.spark.replay.side_sink import SideRange
from rmq_pipeline.spark.replay.staged import hours

#: replace: the same partitions of the sink; side_sink: another folder; dry_run: what would change.
Mode = Literal["replace", "side_sink", "dry_run"]
_COLUMNS: Final = {"stored": "stored_at_ms", "born": "born_at_ms"}

#: What of a report is no number and no name.
_TABLES: Final = frozenset(
    {"outcomes", "changed", "later", "behind_rows", "not_published", "published"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A range of a consumer's topic, and what becomes of its rows.

    Raises:
        RequestError: what is asked for does not fit together.
    """

    spec: ConsumerSpec
    #: Whole hours of the topic's partition time, half-open.
    from_ms: int
    to_ms: int
    mode: Mode
    #: The same again is the same replay: what it has done it does not do twice.
    replay_id: str
    #: Reports lie here, and what tasks hand to each other; the driver and Spark reach it.
    folder: Path
    #: Of mode side_sink.
    side_sink: Path | None = None
    #: Calls of a message before its failure is final.
    tries: int = 1
    #: The sink's partitions hold the rows of messages of the same hour, though names do not say so.
    partitions_match: bool = False
    #: What the handler publishes is sent: to topics that drop repetitions, so it is there once.
    publish: bool = False
    #: Tasks, at least.
    parallelism: int = 2

    def __post_init__(self) -> None:
        try:
            hours(self.from_ms, self.to_ms)
        except ValueError as error:
            raise RequestError(f"A replay takes whole hours: {error}") from error
        if self.spec.idempotency_key is not None:
            raise RequestError(
                f"Consumer {self.spec.name} has effects outside, done once per key: a replay would"
                " do them again."
            )
        if self.mode != "dry_run" and self.spec.sink is None:
            raise RequestError(f"Consumer {self.spec.name} has no sink to write to.")
        if (self.mode == "side_sink") != (self.side_sink is not None):
            raise RequestError("Mode side_sink needs a folder, and no other mode takes one.")
        if self.side_sink is not None and self.side_sink == self.spec.sink:
            raise RequestError(f"The side sink {self.side_sink} is the sink of the consumer.")
        if self.publish and self.mode == "dry_run":
            raise RequestError("A dry run publishes nothing.")
        if self.tries < 1:
            raise RequestError(f"tries is {self.tries} and must be positive.")

    @property
    def label(self) -> str:
        """The name of its files; of a side sink the same for every replay of the range."""
        if self.mode == "side_sink":
            return self.side_range.label
        text = f"{self.spec.group}/{self.replay_id}/{self.from_ms}/{self.to_ms}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def side_range(self) -> SideRange:
        """The range as a side sink knows it."""
        return SideRange(self.spec.group, self.from_ms, self.to_ms)

    @property
    def replacement_id(self) -> str:
        """Under which the broker knows the replacement."""
        return f"replay/{self.replay_id}/{self.from_ms}-{self.to_ms}"

    @property
    def partitions(self) -> list[str]:
        """The partitions of the sink that the range fills."""
        return hours(self.from_ms, self.to_ms)

    def check_partitions(self, partition_time: str) -> None:
        """See to it that the sink's partitions are those of the topic.

        Raises:
            RequestError: nobody says that they are.
        """
        named = _COLUMNS.get(partition_time, partition_time)
        same = self.spec.partition_time in (named, f"{named}_ms")
        if self.spec.sink is not None and not (same or self.partitions_match):
            raise RequestError(
                f"The sink of {self.spec.name} is partitioned by {self.spec.partition_time}, the"
                f" topic by {partition_time}: a partition may hold rows of other messages. Say"
                " partitions_match when it does not."
            )


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What a replay did, or in a dry run would have done."""

    mode: Mode
    replay_id: str
    from_ms: int
    to_ms: int
    #: Settled messages of the range; walked before it to reach its state, and behind it.
    messages: int = 0
    warm_up: int = 0
    behind: int = 0
    #: Messages of the range that the group is not done with: they are left to it.
    not_settled: int = 0
    #: Messages that end as dead letters, parked, or behind a parked one.
    failed: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    #: Files that count no longer.
    replaced_files: int = 0
    #: topic -> messages that the handler would send, where the replay sends none.
    not_published: dict[str, int] = field(default_factory=dict)
    #: topic -> messages sent now; those that an earlier attempt had sent are left out.
    published: dict[str, int] = field(default_factory=dict)
    #: Rows that are only in the replay, and only in the sink, by partition; dry runs alone.
    rows_added: int = 0
    rows_removed: int = 0
    changed: dict[str, int] = field(default_factory=dict)
    outcomes: pa.Table = field(default_factory=OUTCOMES.empty_table)
    #: Partitions behind the range with messages of groups whose state is not the recorded one.
    later: list[str] = field(default_factory=list)
    #: Rows of messages behind the range that this code and state would make and the sink lacks, by
    #: partition; only what was settled together with the range was looked at.
    behind_rows: dict[str, int] = field(default_factory=dict)
    #: Message groups whose state at the end is not the recorded one.
    states_differ: int = 0
    #: Message groups that begin without state, though earlier messages of theirs may have expired.
    states_unknown: int = 0
    #: Parquet: rows that differ, and outcomes that do.
    rows_report: str = ""
    outcomes_report: str = ""
    #: It was done before under its id; nothing was done now.
    repeated: bool = False
    spark_s: float = 0.0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Its numbers and names, without tables."""
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _TABLES
        }
