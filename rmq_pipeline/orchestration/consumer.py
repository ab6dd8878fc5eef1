"""What a declared consumer is: a handler made an asset, its checks, its job and its sensor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import dagster as dg
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.flight.client import Client
from rmq_pipeline.group import OnFailure
from rmq_pipeline.handling.handler import Handler
from rmq_pipeline.handling.report import BatchReport, WindowReport
from rmq_pipeline.handling.spec import DEFAULT_BATCH_ROWS, ConsumerSpec
from rmq_pipeline.idempotency import Key
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.checks import Thresholds, consumer_checks
from rmq_pipeline.orchestration.consumer_watch import ConsumerWatch
from rmq_pipeline.orchestration.dead_letters import dead_letter_spec
from rmq_pipeline.orchestration.sensors import consumer_sensor
from rmq_pipeline.orchestration.sink_resource import SinkResource
from rmq_pipeline.orchestration.topic_assets import (
    KIND,
    DeclaredGroup,
    DeclaredTopic,
    asset_key,
    identifier,
)
from rmq_pipeline.orchestration.upkeep_assets import say_yielded, window_tags

Materialized = Iterator[dg.MaterializeResult[Any]]


class ConsumerConfig(dg.Config):
    """How a consumer's window is run."""

    #: It ends when no message came for this long,
    idle_seconds: float = 20.0
    #: or when it has lasted this long.
    seconds: float = 600.0
    #: Most messages of a micro-batch; 0 leaves the consumer's own.
    max_batch: int = 0
    #: Tasks or threads of a micro-batch; 0 leaves the consumer's own.
    parallelism: int = 0


@dataclass(frozen=True)
class Consumer:
    """A consumer of a pipeline, and what Dagster needs of it."""

    spec: ConsumerSpec
    group: DeclaredGroup
    publishes: tuple[DeclaredTopic, ...]
    asset: dg.AssetsDefinition
    checks: tuple[dg.AssetChecksDefinition, ...]
    dead_letters: dg.AssetSpec
    job: Any
    sensor: dg.SensorDefinition

    @property
    def key(self) -> dg.AssetKey:
        """Key of its asset."""
        return self.asset.key


class RunWindow(Protocol):
    """A window on an engine, as spark.consumer and consumer.window have it."""

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
        """Handle a group's messages until none came for a while."""
        ...


class Hold(Protocol):
    """What the run of a consumer's asset does, once it says on which engine."""

    def __call__(
        self,
        context: dg.AssetExecutionContext,
        *,
        config: ConsumerConfig,
        broker: BrokerResource,
        sinks: SinkResource,
        run_window: RunWindow,
    ) -> Materialized:
        """Hold one window."""
        ...


@dataclass(frozen=True, kw_only=True)
class Declaration(ABC):
    """Makes a consumer of a handler (see rmq_pipeline.handling.handler); used as a decorator."""

    #: What the asset's picture shows, and the tag of runs that the instance limits.
    engine: ClassVar[str]
    tag: ClassVar[str]

    #: What it reads.
    topic: DeclaredTopic
    #: The consumer group, made when it is not there; the asset has its name.
    group: str
    #: With message_group, each group's messages come in order and may keep state.
    order_by: Literal["message_group"] | None = None
    #: Columns of a message group's state.
    state: pa.Schema | None = None
    #: Folder of its rows; a relative one lies in the root of the sink resource.
    sink: str | Path | None = None
    sink_schema: pa.Schema | None = None
    #: The sink's column whose hour is a row's partition.
    partition_time: str = "born_at_ms"
    #: The sink's rows say which message each is of, in the columns topic, queue_id, queue_offset.
    #: The handler returns the latter two with its rows; else it is called message by message.
    sink_offsets: bool = False
    #: Topics that the handler sends to; their assets are downstream of this one.
    publishes: Sequence[DeclaredTopic] = ()
    #: Deliveries of a message before it has failed for good, and the delays between them.
    max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS
    backoff_ms: Sequence[int] = limits.BACKOFF_MS
    backoff: str | Mapping[str, Any] = "customized"
    #: What becomes of it then: a dead letter, parked with what follows it, or its group given up.
    on_failure: OnFailure = "dead_letter"
    #: Which messages it wants: tags joined by ||, or with filter_type sql92 a condition.
    filter: str = "*"
    filter_type: Literal["tag", "sql92"] = "tag"
    #: Where a message's idempotency key comes from (docs/idempotency.md): a column, a property, or
    #: a function of the messages. The handler's messages then have the column seen_before.
    idempotency_key: Key | None = None
    #: How long keys are remembered.
    idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS
    #: Most messages of a micro-batch, and the tasks or threads that share it.
    max_batch: int = DEFAULT_BATCH_ROWS
    parallelism: int
    #: When its checks turn yellow.
    thresholds: Thresholds = field(default_factory=Thresholds)
    #: Shown with the asset; the first line of the handler's docstring when empty.
    description: str = ""

    def __call__(self, handler: Handler) -> Consumer:
        """The consumer.

        Raises:
            ValueError: what is given does not fit together.
        """
        spec = self._spec(handler)
        group = self._group()
        asset = self._asset(spec, group)
        checks = consumer_checks(
            self.group, asset.key, ordered=group.order != "none", thresholds=self.thresholds
        )
        job = self._job(spec, asset.key)
        return Consumer(
            spec=spec,
            group=group,
            publishes=tuple(self.publishes),
            asset=asset,
            checks=tuple(checks),
            dead_letters=dead_letter_spec(self.group, asset.key),
            job=job,
            sensor=consumer_sensor(group, job),
        )

    @abstractmethod
    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """The asset's function: ``hold`` on an engine, with the resources that this one needs."""

    def _spec(self, handler: Handler) -> ConsumerSpec:
        return ConsumerSpec(
            name=identifier(self.group),
            topic=self.topic.name,
            group=self.group,
            handler=handler,
            order_by=self.order_by,
            state=self.state,
            sink=None if self.sink is None else Path(self.sink),
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
            backoff_ms=tuple(self.backoff_ms),
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
            selection=dg.AssetSelection.assets(key),
            description=f"One window of consumer {spec.name}.",
            tags={**window_tags(spec.name), self.tag: spec.name},
            executor_def=dg.in_process_executor,
        )

    def ensure(self, client: Client) -> None:
        """Make its group and the topics it knows at the broker, unless they are there."""
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
    """One window: the run of a consumer's asset."""
    key = asset_key(spec.group)
    with broker.client() as client:
        watch = ConsumerWatch(context, client, spec=spec, key=key)
        declared.ensure(client)
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
            yield dg.MaterializeResult(metadata=watch.metadata(report))


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
