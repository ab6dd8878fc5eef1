"""Drain: windows of a consumer on threads of this process, until nothing is visible."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import checked_parquet
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.errors import ConflictError, RequestError
from rmq_pipeline.handling.results import BatchReport
from rmq_pipeline.handling.sink import sink_files
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.lake.manifest import within
from rmq_pipeline.verbs import Verbs

OWNER: Final = "test kit"
#: Deliveries of a drain beyond those that the topic's messages at its start can cause.
EXTRA_DELIVERIES: Final = 200
#: Longer than any test, in seconds.
_LENGTH_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """A delivery that failed, and why."""

    message_id: str
    message_group: str | None
    queue_id: int
    queue_offset: int
    body: bytes
    #: 1 for the first delivery.
    delivery_attempt: int
    #: retry, which the broker may answer with the dead letters, or dead_letter.
    outcome: str
    #: The last line of the traceback, or the handler's reason.
    reason: str
    #: The class of the error; empty if the handler gave a result.
    error_type: str
    #: Of failures of a batch that are alike, only the first has it.
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What the windows of one drain did."""

    #: Deliveries: of these are acked, retried, dead_lettered, parked and released ones.
    delivered: int = 0
    acked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    parked: int = 0
    #: Not tried, because an earlier message of the message group failed.
    released: int = 0
    #: In the order of the deliveries.
    failures: tuple[FailedMessage, ...] = ()
    #: Messages that the handler published, by topic: columns of schema.SEND.
    published: Mapping[str, pa.Table] = field(default_factory=dict, repr=False)
    #: Rows that were added to the sink; without a sink a table without columns.
    rows: pa.Table = field(default_factory=lambda: pa.table({}), repr=False)


class Recorder:
    """The broker's verbs, and what passes through a window's receives and settles.

    A receive never waits: the broker's clock stands still, so a wait would not end.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._received: list[pa.Table] = []
        self.failures: list[FailedMessage] = []
        self._published: dict[str, list[pa.Table]] = {}

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._broker, verb)

    def receive(self, group: str, topic: str, **how: Any) -> pa.Table:
        """Receive what is visible now."""
        received = self._broker.receive(group, topic, **{**how, "wait_ms": 0})
        if received.num_rows:
            self._received.append(received)
        return received

    def settle(self, group: str, outcomes: pa.Table, **what: Any) -> dict[str, Any]:
        """Settle, and record the failures and the published messages."""
        answer = self._broker.settle(group, outcomes, **what)
        self.failures.extend(self._failed(outcomes))
        for topic, table in (what.get("publish") or {}).items():
            self._published.setdefault(topic, []).append(table)
        return answer

    def published(self) -> dict[str, pa.Table]:
        """Return the published messages by topic."""
        return {topic: pa.concat_tables(tables) for topic, tables in self._published.items()}

    def _failed(self, outcomes: pa.Table) -> Iterator[FailedMessage]:
        failed = outcomes.filter(pc.not_equal(outcomes["outcome"], "ack"))
        if not failed.num_rows:
            return
        received = pa.concat_tables(self._received)
        at = pc.index_in(failed["receipt_handle"], received["receipt_handle"])
        messages = received.take(at).to_pylist()
        for message, outcome in zip(messages, failed.to_pylist(), strict=True):
            found: dict[str, Any] = {name: message[name] for name in _OF_MESSAGE}
            found.update({name: outcome[name] or "" for name in _OF_OUTCOME})
            yield FailedMessage(**found)


_OF_MESSAGE: Final = (
    *("message_id", "message_group", "queue_id", "queue_offset", "body"),
    "delivery_attempt",
)
_OF_OUTCOME: Final = ("outcome", "reason", "error_type", "traceback")


def drain(
    broker: Broker, spec: ConsumerSpec, *, parallelism: int, limit: int | None
) -> DrainResult:
    """Run a window of a consumer until nothing is visible to it.

    Args:
        broker: has the consumer's topics and group.
        spec: the consumer, with its sink in a temporary folder.
        parallelism: number of threads.
        limit: deliveries at most; None: those that the topic's messages at the start can cause, and
            EXTRA_DELIVERIES more.

    Raises:
        RequestError: the limit is exceeded.
        ConflictError: another window of the group is open.
    """
    recorder = Recorder(broker)
    before = _files(spec)
    report = run_window(
        spec,
        cast("Verbs", recorder),
        parallelism=parallelism,
        owner=OWNER,
        idle_s=0.0,
        length_s=_LENGTH_S,
        on_batch=_bounded(spec, _most_deliveries(broker, spec) if limit is None else limit),
    )
    if report.ended != "idle":
        raise ConflictError(
            f"The window of consumer {spec.group} ended as {report.ended}: {report.yielded_to}"
            " has it.",
            remedy=f"Close the window {spec.window}, or let its lease end: rmq.advance.",
        )
    return DrainResult(
        delivered=report.messages,
        acked=report.acked,
        retried=report.retried,
        dead_lettered=report.dead_lettered,
        parked=report.parked,
        released=report.released,
        failures=tuple(recorder.failures),
        published=recorder.published(),
        rows=sink_rows(spec, but=before),
    )


def _most_deliveries(broker: Broker, spec: ConsumerSpec) -> int:
    offsets = broker.describe_topic(spec.topic)["offsets"]
    messages = sum(int(each["max_offset"] - each["min_offset"]) for each in offsets)
    attempts = int(broker.describe_group(spec.group)["max_attempts"])
    return messages * attempts + EXTRA_DELIVERIES


def _bounded(spec: ConsumerSpec, limit: int) -> Callable[[BatchReport], None]:
    """Return a function that raises when a window's batches have more messages than this."""
    delivered = 0

    def count(batch: BatchReport) -> None:
        nonlocal delivered
        delivered += batch.messages
        if delivered <= limit:
            return
        own = spec.topic in spec.publishes
        why = f" Its handler publishes to {spec.topic}, which it reads." if own else ""
        raise RequestError(
            f"The drain of consumer {spec.group} has had {delivered} deliveries, more than"
            f" {limit}, and does not end.{why}",
            remedy="Let the handler end, or allow more: rmq.drain(consumer, limit=…).",
        )

    return count


def sink_rows(spec: ConsumerSpec, *, but: frozenset[str] = frozenset()) -> pa.Table:
    """Return the rows of a sink's files, but of these, in the order in which they were settled."""
    if spec.sink is None or spec.sink_schema is None:
        return pa.table({})
    # A file is named for its window's epoch and its batch; its folder for the hour of its rows.
    paths = sorted(_files(spec) - but, key=lambda path: (Path(path).name, path))
    parts = [checked_parquet.read(str(within(spec.sink, path))) for path in paths]
    return pa.concat_tables(parts) if parts else spec.sink_schema.empty_table()


def _files(spec: ConsumerSpec) -> frozenset[str]:
    if spec.sink is None:
        return frozenset()
    return frozenset(sink_files(spec.sink)["path"].to_pylist())


def placed(spec: ConsumerSpec, sinks: Path) -> ConsumerSpec:
    """Return the consumer with its sink, if it has one, below a folder."""
    return spec if spec.sink is None else replace(spec, sink=sinks / spec.name)
