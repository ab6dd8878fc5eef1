"""TestBroker: a broker in this process, on a clock that the test moves, and a pipeline on it."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema, tracing
from rmq_pipeline.backup.forking import fork_home
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import RequestError, StorageError, TopicNotFoundError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.declarations import DeclaredTopic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.transaction_checker import TransactionChecker, checking_job
from rmq_pipeline.settings import Settings
from rmq_pipeline.testing.draining import OWNER, DrainResult, drain, placed, sink_rows
from rmq_pipeline.testing.forking import Moment, moment_ms
from rmq_pipeline.testing.sent_messages import Message, table_of
from rmq_pipeline.testing.virtual_time import Duration, VirtualTime, advance, milliseconds
from rmq_pipeline.topic import DLQ_PREFIX

#: Settings of a broker that lives for a test: a home of few bytes.
SMALL: Final = Settings(
    log_file_bytes=limits.MIB, reserve_bytes=limits.MIB, duckdb_memory_bytes=64 * limits.MIB
)
Messages: TypeAlias = pa.Table | Sequence[Message]


class TestBroker:
    """A broker of one test, in a temporary home; the fixture ``rmq``.

    Its clock stands still until ``advance``. It does no background work in between.
    """

    __test__: ClassVar = False  # pytest must not collect it

    def __init__(self, broker: Broker, *, clock: ManualClock, folder: Path) -> None:
        #: The broker itself, with all verbs.
        self.broker: Final = broker
        #: The broker's time: ``rmq.clock.now_ms()``. ``advance`` moves it.
        self.clock: Final = VirtualTime(clock)
        self._clock = clock
        self._sinks = folder / "sinks"
        #: What declarations take; the broker has the same verbs.
        self._client = cast("Client", broker)
        self._ensured: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def open(cls, *, settings: Settings | None = None) -> Iterator[Self]:
        """Open a broker in a temporary folder, which is deleted afterwards.

        Args:
            settings: None: the defaults, with small files.
        """
        clock = ManualClock()
        with tempfile.TemporaryDirectory(prefix="rmq-test-", ignore_cleanup_errors=True) as folder:
            home = Path(folder) / "home"
            shutil.copytree(_empty_home(), home)
            # Nothing has to survive the test: no answer waits for the disk.
            broker = Broker.open(
                home, clock=clock, upkeep="none", flush="async", settings=settings or SMALL
            )
            try:
                yield cls(broker, clock=clock, folder=Path(folder))
            finally:
                _discard(broker)

    @classmethod
    @contextmanager
    def fork(
        cls, home: Path | str, *, at: Moment | None = None, settings: Settings | None = None
    ) -> Iterator[Self]:
        """Open a broker with the state that a home had at a moment; its clock stands there.

        The home is only read, also while a broker has it open. The fork has all topics, groups,
        messages, leases and failures, and no users. Its sinks are empty.

        Args:
            home: folder of a broker's home, live or stopped.
            at: a datetime with a time zone, the same as ISO text, or ms since 1970; None: the last
                moment of the home's log.
            settings: None: the defaults, with small files.

        Raises:
            RequestError: this is no home, or it has no such moment.
            ConflictError: the log of the home no longer has its beginning.
        """
        at_ms, chosen = moment_ms(at), settings or SMALL
        with tempfile.TemporaryDirectory(prefix="rmq-fork-", ignore_cleanup_errors=True) as folder:
            forked = Path(folder) / "home"
            shutil.copytree(_empty_home(), forked)
            at_ms = fork_home(Path(home).absolute(), forked, at_ms=at_ms, settings=chosen)
            clock = ManualClock(at_ms)
            broker = Broker.open(forked, clock=clock, upkeep="none", flush="async", settings=chosen)
            try:
                yield cls(broker, clock=clock, folder=Path(folder))
            finally:
                _discard(broker)

    def advance(self, by: Duration) -> None:
        """Advance the broker's clock, and do the background work that falls due on the way.

        Scheduled messages are delivered, leases that have ended are revived, and checks of half
        messages are offered, each at its time.

        Args:
            by: "250ms", "10s", "5m", "1h" or "2d", a timedelta, or milliseconds.

        Raises:
            RequestError: ``by`` is no duration, or negative.
        """
        advance(self.broker, self._clock, by_ms=milliseconds(by))

    def create(self, pipeline: Pipeline) -> None:
        """Create the topics and groups of a pipeline.

        Not necessary for a test: the other methods create those that they are given.

        Raises:
            RequestError: a consumer or checker of the pipeline uses a topic that it does not list.
        """
        if not isinstance(pipeline, Pipeline):
            raise RequestError(
                f"{pipeline!r} is no pipeline.", remedy="Give what Pipeline(…) returns."
            )
        listed = {each.name for each in pipeline.topics}
        for user, topic in _uses(pipeline):
            if topic.name not in listed:
                raise RequestError(
                    f"{user} uses topic {topic.name}, which pipeline {pipeline.name} does not"
                    " list.",
                    remedy="Add it to the topics of the pipeline.",
                )
        for topic in pipeline.topics:
            self._topic(topic)
        for consumer in pipeline.consumers:
            self._ensure(consumer)

    def publish(
        self, topic: DeclaredTopic | str, messages: Messages, *, delay: Duration | None = None
    ) -> pa.Table:
        """Send messages to a topic.

        Args:
            topic: a declared topic, which is created if missing, or the name of a topic.
            messages: a list of bodies (bytes, text, or a dict that becomes JSON) or of dicts of
                columns of schema.SEND with the key ``body``; or a table.
            delay: deliver them this much later, except those with a deliver_at_ms.

        Returns:
            schema.SENT, row for row.

        Raises:
            RequestError: a message is invalid.
            TopicNotFoundError: there is no topic of this name.
        """
        name, table = self._topic(topic), self._table(messages, delay)
        span, carrying = tracing.begin_send(name, table)
        with span:
            return self.broker.send(name, carrying)

    def prepare(
        self,
        topic: DeclaredTopic | str,
        messages: Messages,
        *,
        producer_group: str = "test-producer",
    ) -> pa.Table:
        """Send half messages: no consumer sees one before it is committed.

        The first check is due after 6 s, unless the settings say otherwise.

        Args:
            topic: of type transaction or mixed; otherwise as for ``publish``.
            messages: as for ``publish``.
            producer_group: group of the transactions.

        Returns:
            schema.SENT_HALF, row for row.
        """
        name, table = self._topic(topic), self._table(messages, None)
        span, carrying = tracing.begin_send(name, table)
        with span:
            return self.broker.send_half(name, carrying, producer_group=producer_group)

    def check(self, checker: TransactionChecker) -> dict[str, int]:
        """Call a checker for the half messages whose check is due, and do as it says.

        Returns:
            The number of half messages by outcome: commit, rollback, unknown, and failed if the
            checker raised.
        """
        if not isinstance(checker, TransactionChecker):
            raise RequestError(
                f"{checker!r} is no transaction checker.",
                remedy="Give a function that is decorated with @transaction_checker(topic=…).",
            )
        self._topic(checker.topic)
        job = checking_job([checker])
        total: dict[str, int] = {}
        opened = self.broker.open_window(job.window, owner=OWNER, duration_ms=job.lease_ms)
        fence = (job.window, int(opened["epoch"]))
        try:
            while True:
                report = job.call(self._client, wait_ms=0, window=fence)
                counts: dict[str, int] = report["answers"][checker.topic.name]
                total = {outcome: total.get(outcome, 0) + n for outcome, n in counts.items()}
                if not any(counts.values()):
                    return total
        finally:
            self.broker.close_window(job.window, epoch=fence[1])

    def drain(
        self, consumer: Consumer, *, parallelism: int = 1, limit: int | None = None
    ) -> DrainResult:
        """Handle all messages that are visible to a consumer now.

        It runs windows of the consumer on threads of this process. It creates the consumer's topics
        and its group as declared. The sink is in a temporary folder.

        Args:
            consumer: what ``@python_consumer`` or ``@spark_consumer`` made.
            parallelism: number of threads; with 1, calls come in the same order every time.
            limit: number of deliveries at most; None: those that the topic's messages at the start
                can cause with all their attempts, and 200 more.

        Raises:
            RequestError: this is no consumer, or the limit is exceeded.
        """
        self._ensure(consumer)
        spec = placed(consumer.spec, self._sinks)
        return drain(self.broker, spec, parallelism=parallelism, limit=limit)

    def rows(self, consumer: Consumer) -> pa.Table:
        """Return all rows of a consumer's sink, in the order in which they were settled.

        Raises:
            RequestError: the consumer has no sink.
        """
        self._ensure(consumer)
        if consumer.spec.sink is None:
            raise RequestError(
                f"Consumer {consumer.spec.group} has no sink.",
                remedy="Declare one with sink=… and sink_schema=…, or look at what it published.",
            )
        return sink_rows(placed(consumer.spec, self._sinks))

    def messages(self, topic: DeclaredTopic | str) -> pa.Table:
        """Return the messages of a topic as schema.READ, sorted by queue and offset."""
        name = self._topic(topic)
        parts = [
            self.broker.read(
                name,
                queue["queue_id"],
                offset=queue["min_offset"],
                limit=queue["max_offset"] - queue["min_offset"],
            )
            for queue in self.broker.describe_topic(name)["offsets"]
            if queue["max_offset"] > queue["min_offset"]
        ]
        return pa.concat_tables(parts) if parts else schema.READ.empty_table()

    def dead_letters(self, consumer: Consumer) -> pa.Table:
        """Return the dead letters of a consumer: the view ``dead_letters``, and ``body``."""
        found = self._failed("dead_letters", consumer)
        return self._with_bodies(found, f"{DLQ_PREFIX}{consumer.spec.group}")

    def parked(self, consumer: Consumer) -> pa.Table:
        """Return the parked messages of a consumer: the view ``parked``, and ``body``."""
        return self._with_bodies(self._failed("parked", consumer), consumer.spec.topic)

    def sql(self, query: str) -> pa.Table:
        """Run one SELECT over the views of docs/sql.md."""
        return self.broker.sql(query)

    def _table(self, messages: Messages, delay: Duration | None) -> pa.Table:
        at_ms = None if delay is None else self.clock.now_ms() + milliseconds(delay)
        return table_of(messages, deliver_at_ms=at_ms)

    def _topic(self, topic: DeclaredTopic | str) -> str:
        """Return a topic's name; create the topic if it is a declared one."""
        if isinstance(topic, DeclaredTopic):
            if self._ensured.get(topic.name) != topic:
                topic.ensure(self._client)
                self._ensured[topic.name] = topic
            return topic.name
        if not isinstance(topic, str):
            raise RequestError(
                f"{topic!r} is no topic.", remedy="Give what topic(…) returns, or a name."
            )
        try:
            self.broker.describe_topic(topic)
        except TopicNotFoundError as error:
            raise TopicNotFoundError(
                f"There is no topic {topic!r}.",
                remedy="Give what topic(…) returns, which creates the topic, or create it:"
                f" rmq.broker.create_topic({topic!r}).",
            ) from error
        return topic

    def _ensure(self, consumer: Consumer) -> None:
        """Create a consumer's topics and its group, as declared."""
        _check_consumer(consumer)
        group = consumer.group
        for topic in (group.topic, *consumer.publishes):
            self._topic(topic)
        if self._ensured.get(f"group {group.name}") != group:
            group.ensure(self._client)
            self._ensured[f"group {group.name}"] = group

    def _failed(self, view: str, consumer: Consumer) -> pa.Table:
        self._ensure(consumer)
        found = self.broker.sql(f"FROM {view}")
        return found.filter(pc.equal(found["consumer_group"], consumer.spec.group))

    def _with_bodies(self, failed: pa.Table, topic: str) -> pa.Table:
        """Return the rows of failed messages with their bodies from their place in a topic."""
        places = zip(
            failed["queue_id"].to_pylist(), failed["queue_offset"].to_pylist(), strict=True
        )
        bodies = [
            self.broker.read(topic, queue_id, offset=offset, limit=1)["body"][0].as_py()
            for queue_id, offset in places
        ]
        return failed.append_column("body", pa.array(bodies, pa.binary()))


def _check_consumer(consumer: object) -> None:
    if isinstance(consumer, Consumer):
        return
    remedy = "Give a function that is decorated with @python_consumer or @spark_consumer."
    if isinstance(consumer, Pipeline):
        names = ", ".join(each.spec.group for each in consumer.consumers)
        remedy = f"Give one of the pipeline's consumers: {names}."
    raise RequestError(f"{consumer!r} is no consumer.", remedy=remedy)


def _uses(pipeline: Pipeline) -> Iterable[tuple[str, DeclaredTopic]]:
    """Yield the consumers and checkers of a pipeline with each topic that they use."""
    for consumer in pipeline.consumers:
        for topic in (consumer.group.topic, *consumer.publishes):
            yield f"Consumer {consumer.spec.group}", topic
    for checker in pipeline.checkers:
        yield f"The checker of {checker.topic.name}", checker.topic


def _discard(broker: Broker) -> None:
    """Close a broker without moving the last frames into DuckDB, which takes a tenth of a second.

    Its home is deleted next.
    """
    broker.engine.dispatcher.stop()
    with suppress(StorageError):  # those frames are missing
        broker.close()


@cache
def _empty_home() -> Path:
    """Return a closed home without topics, made once per process and deleted when it exits.

    Copying it takes a few milliseconds; making tables and views takes a quarter of a second.
    """
    folder = Path(tempfile.mkdtemp(prefix="rmq-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # The database has no frame, so a broker that opens a copy need not read its tables.
    _discard(Broker.open(folder / "home", clock=ManualClock(), upkeep="none", settings=SMALL))
    return folder / "home"
