"""Declaration of a consumer: a handler becomes an asset with checks, a job and a sensor.

``@spark_consumer`` handles its windows in Spark, ``@python_consumer`` in threads of the run's
process.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

import dagster as dg
import pyarrow as pa

from rmq_pipeline import extras, logs, span_export, tracing
from rmq_pipeline.consumer.window import run_window as run_python_window
from rmq_pipeline.flight.client import Client
from rmq_pipeline.group import OnFailure
from rmq_pipeline.handling.handler import Handler
from rmq_pipeline.handling.results import BatchReport, WindowReport
from rmq_pipeline.handling.spec import DEFAULT_BATCH_ROWS, ConsumerSpec
from rmq_pipeline.idempotency import Key
from rmq_pipeline.orchestration import consumer_report
from rmq_pipeline.orchestration.checks import Thresholds, Watched, watched_consumer
from rmq_pipeline.orchestration.consumer_report import ConsumerWatch
from rmq_pipeline.orchestration.declarations import (
    KIND,
    DeclaredGroup,
    DeclaredTopic,
    asset_key,
    check_callable,
    dead_letter_spec,
    identifier,
)
from rmq_pipeline.orchestration.resources import BrokerResource, LazyPySparkResource, SinkResource
from rmq_pipeline.orchestration.upkeep_assets import (
    NOTHING_ACKED_TAG,
    say_yielded,
    window_tags,
)
from rmq_pipeline.spark import session
from rmq_pipeline.spark.consumer import run_window as run_spark_window
from rmq_pipeline.spark.session import prepare_environment

log = logging.getLogger(__name__)

Materialized = Iterator[dg.MaterializeResult[Any]]
SPARK_TAG: Final = "rmq/spark"
PYTHON_TAG: Final = "rmq/python"
#: Tag of a traced run: the id of its trace.
TRACE_TAG: Final = "rmq/trace_id"


class ConsumerConfig(dg.Config):
    """Settings of one run of a consumer's window."""

    #: Seconds without a message after which the window ends.
    idle_seconds: float = 20.0
    #: Maximum length of the window in seconds.
    seconds: float = 600.0
    #: Maximum messages of a micro-batch; 0: as the consumer declares.
    max_batch: int = 0
    #: Tasks or threads of a micro-batch; 0: as the consumer declares.
    parallelism: int = 0


@dataclass(frozen=True)
class Consumer:
    """A consumer of a pipeline, with its Dagster definitions."""

    spec: ConsumerSpec
    group: DeclaredGroup
    publishes: tuple[DeclaredTopic, ...]
    asset: dg.AssetsDefinition
    checks: tuple[dg.AssetChecksDefinition, ...]
    #: Checks that the check sensor evaluates.
    watched: Watched
    dead_letters: dg.AssetSpec
    job: Any
    #: Resources that its windows need, and a function that returns what is missing to start one, or
    #: an empty string.
    resources: frozenset[str]
    lacks: Callable[[Any], str]

    @property
    def key(self) -> dg.AssetKey:
        """Key of its asset."""
        return self.asset.key


class RunWindow(Protocol):
    """Runs a window on an engine; implemented in spark.consumer and consumer.window."""

    def __call__(
        self,
        spec: ConsumerSpec,
        verbs: Client,
        *,
        owner: str,
        idle_s: float,
        length_s: float,
        on_batch: Callable[[BatchReport], None],
        parallelism: int,
    ) -> WindowReport:
        """Handle a group's messages until none come."""
        ...


class Hold(Protocol):
    """Runs one window of a consumer's asset on a given engine."""

    def __call__(
        self,
        context: dg.AssetExecutionContext,
        *,
        config: ConsumerConfig,
        broker: BrokerResource,
        sinks: SinkResource,
        run_window: RunWindow,
    ) -> Materialized:
        """Run one window."""
        ...


@dataclass(frozen=True, kw_only=True)
class Declaration(ABC):
    """Decorator that makes a consumer of a handler (see rmq_pipeline.handling.handler)."""

    #: Kind of the asset in the UI, and tag of runs by which the instance limits them.
    engine: ClassVar[str]
    tag: ClassVar[str]
    #: Resources that a window needs before it is requested.
    resources: ClassVar[frozenset[str]] = frozenset()

    #: The topic that it reads.
    topic: DeclaredTopic
    #: The consumer group, created if missing; the asset has its name.
    group: str
    #: With message_group, messages of a group are handled in order and may have state.
    order_by: Literal["message_group"] | None = None
    #: Columns of a message group's state.
    state: pa.Schema | None = None
    #: Folder of the sink; a relative path is below the root of the sink resource.
    sink: str | Path | None = None
    sink_schema: pa.Schema | None = None
    #: The sink's column whose hour is a row's partition.
    partition_time: str = "born_at_ms"
    #: Sink rows name their message in the columns topic, queue_id and queue_offset. The handler
    #: returns the latter two with its rows; otherwise it is called with one message at a time.
    sink_offsets: bool = False
    #: Topics to which the handler publishes; their assets are downstream of this one.
    publishes: Sequence[DeclaredTopic] = ()
    #: Maximum deliveries of a message (default 17), and the delays between them. For these and the
    #: next two, None means not declared: an existing group keeps its setting.
    max_attempts: int | None = None
    backoff_ms: Sequence[int] | None = None
    backoff: str | Mapping[str, Any] | None = None
    #: Action when attempts are exhausted: dead-letter the message (default), park it with its
    #: successors, or quarantine its message group.
    on_failure: OnFailure | None = None
    #: Filter of the subscription: tags joined by ||, or with filter_type sql92 a condition.
    filter: str = "*"
    filter_type: Literal["tag", "sql92"] = "tag"
    #: Source of a message's idempotency key (docs/idempotency.md): a column, a property, or a
    #: function of the messages. The handler's messages then have the column seen_before.
    idempotency_key: Key | None = None
    #: Keys are remembered this long; default: a day.
    idempotency_window_ms: int | None = None
    #: Maximum messages of a micro-batch, and the tasks or threads that share it.
    max_batch: int = DEFAULT_BATCH_ROWS
    parallelism: int
    #: Limits above which its checks turn yellow.
    thresholds: Thresholds = field(default_factory=Thresholds)
    #: Shown with the asset; default: the first line of the handler's docstring.
    description: str = ""

    def __call__(self, handler: Handler) -> Consumer:
        """Create the consumer.

        Raises:
            ValueError: the declaration is inconsistent.
        """
        group = self._group()
        self._check()
        check_callable(
            handler, f"The handler of consumer {self.group}", takes=("messages", "state")
        )
        spec = self._spec(handler)
        asset = self._asset(spec, group)
        watched = watched_consumer(
            self.group,
            asset.key,
            window=spec.name,
            ordered=group.order != "none",
            thresholds=self.thresholds,
        )
        job = self._job(spec, asset.key)
        return Consumer(
            spec=spec,
            group=group,
            publishes=tuple(self.publishes),
            asset=asset,
            checks=tuple(watched.definitions()),
            watched=watched,
            dead_letters=dead_letter_spec(self.group, asset.key),
            job=job,
            resources=self.resources,
            lacks=self.lacks,
        )

    @abstractmethod
    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """Return the asset's function: ``hold`` on an engine, with the resources that it needs."""

    def lacks(self, resources: Any) -> str:  # noqa: ARG002
        """Return what is missing to start a window, and the remedy; empty if nothing is missing."""
        return ""

    def _check(self) -> None:
        """Check what neither the group nor the spec checks."""
        what = f"Consumer {self.group}"
        publishes: Sequence[Any] = self.publishes
        wrong = [each for each in publishes if not isinstance(each, DeclaredTopic)]
        if wrong:
            raise ValueError(f"{what} publishes to {wrong[0]!r}. Give what topic(...) returns.")
        if identifier(self.group) == identifier(self.topic.name):
            raise ValueError(
                f"{what} has the name of its topic: both would be the asset"
                f" {identifier(self.group)}. Rename one of them."
            )
        numbers: tuple[tuple[str, Any, int], ...] = (
            ("parallelism", self.parallelism, 1),
            ("max_batch", self.max_batch, 1),
            ("thresholds.dead_letters", self.thresholds.dead_letters, 0),
            ("thresholds.oldest_unread_minutes", self.thresholds.oldest_unread_minutes, 0),
        )
        for name, value, least in numbers:
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise ValueError(f"{what}: {name} is {value!r}. Give {least} or more.")
        for name, schema in (("state", self.state), ("sink_schema", self.sink_schema)):
            if schema is not None and not isinstance(schema, pa.Schema):
                raise ValueError(f"{what}: {name} is {schema!r}. Give a pyarrow.Schema.")

    def _spec(self, handler: Handler) -> ConsumerSpec:
        return ConsumerSpec(
            name=identifier(self.group),
            topic=self.topic.name,
            group=self.group,
            handler=handler,
            order_by=self.order_by,
            state=self.state,
            sink=self.sink,
            sink_schema=self.sink_schema,
            partition_time=self.partition_time,
            sink_offsets=self.sink_offsets,
            publishes=tuple(each.name for each in self.publishes),
            max_batch=self.max_batch,
            filter=self.filter,
            filter_type=self.filter_type,
            idempotency_key=self.idempotency_key,
        )

    def _group(self) -> DeclaredGroup:
        return DeclaredGroup(
            name=self.group,
            topic=self.topic,
            order=self.order_by or "none",
            max_attempts=self.max_attempts,
            backoff_ms=None if self.backoff_ms is None else tuple(self.backoff_ms),
            backoff=self.backoff,
            on_failure=self.on_failure,
            idempotency_window_ms=self.idempotency_window_ms,
        )

    def _asset(self, spec: ConsumerSpec, group: DeclaredGroup) -> dg.AssetsDefinition:
        first_line = (spec.handler.__doc__ or "").strip().partition("\n")[0]
        hold = partial(_hold, spec=spec, declared=self)
        return dg.asset(
            key=asset_key(spec.group),
            deps=[group.topic.key],
            kinds={KIND, self.engine} | ({"parquet"} if spec.sink else set()),
            description=self.description or first_line,
            metadata=_declared_metadata(spec),
            output_required=False,
        )(self.window(hold))

    def _job(self, spec: ConsumerSpec, key: dg.AssetKey) -> Any:
        return dg.define_asset_job(
            f"{spec.name}_window",
            # A sensor evaluates the checks, because Dagster skips the checks of a failed run.
            selection=dg.AssetSelection.assets(key).without_checks(),
            description=f"One window of consumer {spec.name}.",
            tags={**window_tags(spec.name), self.tag: spec.name},
            executor_def=dg.in_process_executor,
        )

    def ensure(self, client: Client) -> None:
        """Create the group and its topics at the broker if they are missing."""
        self._group().ensure(client)
        for topic in self.publishes:
            topic.ensure(client)


def _hold(
    context: dg.AssetExecutionContext,
    *,
    spec: ConsumerSpec,
    declared: Declaration,
    config: ConsumerConfig,
    broker: BrokerResource,
    sinks: SinkResource,
    run_window: RunWindow,
) -> Materialized:
    """Run one window of a consumer's asset."""
    logs.set_up_library()
    key = asset_key(spec.group)
    with span_export.exporting(), broker.client() as client:
        watch = ConsumerWatch(context, client, spec=spec, key=key)
        declared.ensure(client)
        # The span ends before anything is yielded: Dagster may go on in another context.
        with _traced(context, spec, key=key):
            report = run_window(
                _placed(spec, sinks=sinks, config=config),
                client,
                owner=context.run.run_id,
                idle_s=config.idle_seconds,
                length_s=config.seconds,
                on_batch=watch.batch,
                parallelism=config.parallelism or declared.parallelism,
            )
        if report.yielded_to:
            say_yielded(context, key, to=report.yielded_to)
        else:
            if not report.acked:
                context.instance.add_run_tags(context.run.run_id, {NOTHING_ACKED_TAG: "true"})
            if spec.sink is not None:
                consumer_report.report_sink_hours(
                    context, client, group=spec.group, topic=declared.topic
                )
            yield dg.MaterializeResult(metadata=watch.metadata(report))


@contextmanager
def _traced(
    context: dg.AssetExecutionContext, spec: ConsumerSpec, *, key: dg.AssetKey
) -> Iterator[None]:
    """Make a span of the window, and tag the run with its trace."""
    run_id = context.run.run_id
    about = {
        "dagster.run_id": run_id,
        "dagster.job_name": context.run.job_name,
        "dagster.asset_key": key.to_user_string(),
        "messaging.system": "rocketmq",
        "messaging.destination.name": spec.topic,
        "messaging.consumer.group.name": spec.group,
    }
    with tracing.window(spec.name, about) as span:
        if span.trace_id is not None:
            try:
                context.instance.add_run_tags(run_id, {TRACE_TAG: span.trace_id})
            except Exception:  # a tag must not fail the window
                log.warning("run %s has no tag of its trace", run_id, exc_info=True)
        yield


def _declared_metadata(spec: ConsumerSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "topic": spec.topic,
        "consumer_group": spec.group,
        "order_by": spec.order_by or "nothing",
    }
    if spec.sink_schema is not None:
        found["dagster/column_schema"] = dg.TableSchema(
            columns=[dg.TableColumn(field.name, str(field.type)) for field in spec.sink_schema]
        )
    return found


def _placed(spec: ConsumerSpec, *, sinks: SinkResource, config: ConsumerConfig) -> ConsumerSpec:
    return replace(
        spec,
        sink=None if spec.sink is None else sinks.folder(spec.sink),
        max_batch=config.max_batch or sinks.most() or spec.max_batch,
    )


@dataclass(frozen=True, kw_only=True)
class spark_consumer(Declaration):  # noqa: N801 - read as a decorator
    """Decorator that makes a consumer of a handler; Spark's workers import the handler by name."""

    engine: ClassVar[str] = "pyspark"
    tag: ClassVar[str] = SPARK_TAG
    resources: ClassVar[frozenset[str]] = frozenset({"spark"})

    parallelism: int = 2

    def lacks(self, resources: Any) -> str:
        """Return why Spark cannot start a JVM here; Spark Connect needs none here."""
        try:
            extras.check("spark")
        except extras.MissingExtraError as error:
            return str(error)
        settings = getattr(resources.spark, "spark_config", None)
        if settings is None or "spark.remote" in settings or "SPARK_REMOTE" in os.environ:
            return ""
        return session.java_lacks()

    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """Return a window function that uses the session of the resource ``spark``."""

        def window(
            context: dg.AssetExecutionContext,
            *,
            config: ConsumerConfig,
            broker: BrokerResource,
            sinks: SinkResource,
            spark: LazyPySparkResource,
        ) -> Materialized:
            prepare_environment(spark.spark_config)
            in_spark = partial(run_spark_window, spark=lambda: spark.spark_session)
            yield from hold(context, config=config, broker=broker, sinks=sinks, run_window=in_spark)

        return window


@dataclass(frozen=True, kw_only=True)
class python_consumer(Declaration):  # noqa: N801 - read as a decorator
    """Decorator that makes a consumer of a handler, like ``spark_consumer`` but without a JVM.

    The handler is called by up to ``parallelism`` threads at once, each for another message group.
    """

    engine: ClassVar[str] = "python"
    tag: ClassVar[str] = PYTHON_TAG

    parallelism: int = 8
    #: Small enough that finished messages are settled at short intervals.
    max_batch: int = 20_000

    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """Return a window function that needs only the broker."""

        def window(
            context: dg.AssetExecutionContext,
            *,
            config: ConsumerConfig,
            broker: BrokerResource,
            sinks: SinkResource,
        ) -> Materialized:
            yield from hold(
                context, config=config, broker=broker, sinks=sinks, run_window=run_python_window
            )

        return window
