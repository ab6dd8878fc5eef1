"""Publication by a replay: copies of a range in another topic, and the handler's own messages.

A message of the handler without an id gets an id derived from its origin (see
``handling/handler.py``). A repeated replay, of the same hours or others, therefore sends the same
ids. A topic that suppresses repetitions stores each message once.
"""

import hashlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import checked_parquet, limits, schema
from rmq_pipeline.errors import BusyError, RequestError, TopicNotFoundError
from rmq_pipeline.filter.expression import Filter, compile_filter
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.replay.topic_log import Range, TopicLog, frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[str, dict[str, Any]], None]

#: Maximum number of messages per send.
BATCH_ROWS: Final = 1_000
#: Type of the side topic by type of the source. Scheduled times and transactions are not replayed,
#: so other types become normal.
_TYPES: Final = {"fifo": "fifo", "mixed": "mixed", "lite": "mixed"}
_SENT: Final = ("body", "tag", "keys", "message_group", "born_at_ms", "properties")
_TELL_EVERY_S: Final = 5.0
_PAUSE_S: Final = 0.25
_TRIES: Final = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """Selection of messages, and their target.

    Raises:
        RequestError: the plan is inconsistent.
    """

    topic: str
    from_ms: int
    to_ms: int
    side_topic: str
    filter: str = "*"
    filter_type: str = "tag"
    #: 0: no limit.
    rate_per_s: float = 0.0
    #: Retention of sealed messages in a side topic created here; 0: unlimited.
    ttl_ms: int = 0
    #: Copies sent under the same id within a day are stored once.
    replay_id: str
    folder: Path

    def __post_init__(self) -> None:
        if not self.side_topic or self.side_topic == self.topic:
            raise RequestError(
                f"The side topic {self.side_topic!r} is not another topic than {self.topic}.",
                remedy="Give mode side_topic the name of another topic.",
            )
        compile_filter(self.filter, self.filter_type)


@dataclass(slots=True)
class TopicReport:
    """Results of a replay into a side topic."""

    side_topic: str
    #: Messages of the range, those that match the filter, and those stored now; the others were
    #: stored before.
    messages: int = 0
    wanted: int = 0
    stored: int = 0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


def publish_again(
    plan: TopicPlan,
    client: Client,
    *,
    spark: "Callable[[], SparkSession]",
    on_progress: Progress = lambda _what, _facts: None,
) -> TopicReport:
    """Send the messages of a range to the side topic, in the order they were stored.

    A copy keeps body, tag, keys, message group, properties and birth time. Its message id is
    derived from the replay's id, the topic's id and the place of the original. A message is
    therefore stored once, however often the replay runs, and a backfill may copy several topics
    into one.

    Args:
        plan: selection and target.
        client: client of the broker.
        spark: returns the session.
        on_progress: called with every step and its counts.

    Raises:
        RequestError: the side topic exists and does not deduplicate by message_id.
    """
    started = time.monotonic()
    report = TopicReport(plan.side_topic)
    log = TopicLog(client, plan.topic)
    ensure_side_topic(client, plan, source=log.described)
    origin = f"{plan.replay_id}/{log.described['topic_id']}"
    plan.folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="replay-", dir=plan.folder))
    pace = _Pace(plan.rate_per_s)
    wanted = compile_filter(plan.filter, plan.filter_type)
    told = started
    try:
        for page in _pages(plan, log, spark=spark, scratch=scratch):
            report.messages += page.num_rows
            for batch in _batches(page, wanted, rows=pace.batch_rows):
                report.wanted += batch.num_rows
                pace.wait(batch.num_rows)
                report.stored += send(client, plan.side_topic, messages=copies(batch, origin))
                if time.monotonic() - told >= _TELL_EVERY_S:
                    told = time.monotonic()
                    on_progress("sent", {"messages": report.stored})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report.seconds = time.monotonic() - started
    on_progress("sent", {"messages": report.stored})
    return report


def ensure_side_topic(client: Client, plan: TopicPlan, *, source: dict[str, Any]) -> None:
    """Create the side topic like its source, or check that the existing one deduplicates."""
    try:
        found = client.describe_topic(plan.side_topic)
    except TopicNotFoundError:
        client.create_topic(
            plan.side_topic,
            type=_TYPES.get(source["type"], "normal"),
            queues=source["queues"],
            partition_time=source["partition_time"],
            deduplicate="message_id",
            deduplicate_window_ms=limits.DEDUPLICATE_WINDOW_MAX_MS,
            retention_ms=plan.ttl_ms or None,
        )
        return
    if found["deduplicate"] != "message_id":
        raise RequestError(
            f"Topic {plan.side_topic} does not deduplicate by message_id: a repeated replay would"
            " store its copies twice.",
            remedy=f"Use another topic, or `rmq topic alter {plan.side_topic} --deduplicate"
            " message_id`.",
        )


def copies(messages: pa.Table, origin: str) -> pa.Table:
    """Return copies of messages to send, with columns of schema.SEND.

    Args:
        messages: messages of one topic.
        origin: identifies the replay and the topic in the ids.
    """
    replay = hashlib.sha256(origin.encode()).hexdigest()[:16]
    places = zip(
        messages["queue_id"].to_pylist(), messages["queue_offset"].to_pylist(), strict=True
    )
    ids = [f"{replay}-{queue_id}-{offset}" for queue_id, offset in places]
    columns = {name: messages[name].cast(schema.SEND.field(name).type) for name in _SENT}
    return pa.table({**columns, "message_id": pa.array(ids, pa.string())})


class _Pace:
    """Rate limit in messages per second, without bursts."""

    def __init__(self, rate_per_s: float) -> None:
        self._rate = rate_per_s
        self._sent = 0
        self._began = time.monotonic()
        self._pause = threading.Event()
        tenth = max(1, int(rate_per_s / 10))
        self.batch_rows = min(BATCH_ROWS, tenth) if rate_per_s else BATCH_ROWS

    def wait(self, n: int) -> None:
        """Wait until the next n messages may be sent."""
        if self._rate:
            ahead_s = self._began + self._sent / self._rate - time.monotonic()
            if ahead_s > 0:
                self._pause.wait(ahead_s)
        self._sent += n


def _pages(
    plan: TopicPlan, log: TopicLog, *, spark: "Callable[[], SparkSession]", scratch: Path
) -> Iterator[pa.Table]:
    """Yield the messages of the range in the order they were stored."""
    wanted = Range(
        topic=plan.topic,
        from_ms=plan.from_ms,
        to_ms=plan.to_ms,
        partition_time=str(log.described["partition_time"]),
    )
    tail = log.tail(scratch / "tail", wanted=wanted, whole=False)
    segments = [segment for segment in log.segments if segment.may_hold(wanted)]
    messages = frame(spark(), log, segments=segments, tail=tail, folder=scratch / "tail")
    if messages is None:
        return
    ordered = messages.filter(wanted.holds()).orderBy("stored_at_ms", "queue_id", "queue_offset")
    ordered.write.parquet(str(scratch / "sorted"))
    for part in sorted((scratch / "sorted").glob("part-*.parquet")):
        with checked_parquet.open_file(part) as file:
            for batch in file.iter_batches(10 * BATCH_ROWS):
                yield pa.Table.from_batches([batch])


def _batches(page: pa.Table, wanted: Filter, *, rows: int) -> Iterator[pa.Table]:
    if wanted.columns:
        page = page.set_column(
            page.column_names.index("properties"),
            "properties",
            page["properties"].cast(schema.PROPERTIES),
        )
        page = page.filter(wanted.matches(page))
    for start in range(0, page.num_rows, rows):
        yield page.slice(start, rows)


def send(client: Client, topic: str, *, messages: pa.Table) -> int:
    """Send to a topic that suppresses repetitions; return how many were not stored before."""
    pause = threading.Event()
    for tries_left in reversed(range(_TRIES)):
        try:
            sent = client.send(topic, messages)
        except BusyError:
            # Repeating is safe: the topic recognizes stored messages by id.
            if not tries_left:
                raise
            pause.wait(_PAUSE_S)
        else:
            return int(sent.num_rows - pc.sum(sent["duplicate"].fill_null(False)).as_py())
    raise AssertionError("unreachable")


def check_publish_topics(client: Client, topics: Iterable[str]) -> None:
    """Check that a repeated replay changes nothing in these topics.

    Raises:
        RequestError: a topic does not deduplicate by message_id.
    """
    for topic in topics:
        if client.describe_topic(topic)["deduplicate"] != "message_id":
            raise RequestError(
                f"Topic {topic} does not deduplicate by message_id: a repeated replay would store"
                " its messages twice.",
                remedy=f"Replay without publish, or `rmq topic alter {topic} --deduplicate"
                " message_id`.",
            )


def send_published(client: Client, messages: Mapping[str, list[pa.Table]]) -> dict[str, int]:
    """Send published messages; return topic -> number of messages that were not stored before.

    Args:
        client: client of the broker.
        messages: topic -> schema.SEND.
    """
    stored: dict[str, int] = {}
    for topic, tables in messages.items():
        stored[topic] = 0
        for table in tables:
            for start in range(0, table.num_rows, BATCH_ROWS):
                stored[topic] += send(client, topic, messages=table.slice(start, BATCH_ROWS))
    return stored
