"""The components of topics, consumer groups, consumers and transaction checkers."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal

import dagster as dg
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.group import OnFailure, Order
from rmq_pipeline.orchestration.checks import DEAD_LETTERS, OLDEST_UNREAD_MINUTES, Thresholds
from rmq_pipeline.orchestration.components.project import Part, Project, spec_of
from rmq_pipeline.orchestration.components.references import columns, function, key_source, said
from rmq_pipeline.orchestration.components.scaffolding import (
    CheckerScaffolder,
    ConsumerScaffolder,
    GroupScaffolder,
    TopicScaffolder,
)
from rmq_pipeline.orchestration.consumer import Consumer, python_consumer, spark_consumer
from rmq_pipeline.orchestration.declarations import (
    LOG_FROM,
    DeclaredGroup,
    DeclaredTopic,
    consumer_group,
    topic,
)
from rmq_pipeline.orchestration.transaction_checker import TransactionChecker, transaction_checker
from rmq_pipeline.topic import Deduplicate, TopicType

#: Attributes that the declaring calls do not take as they are.
_NOT_SETTINGS: Final = frozenset(
    {"pipeline", "topic", "handler", "checker", "engine", "publishes", "thresholds", "external"}
)


def _settings(part: Part) -> dict[str, Any]:
    """Return the attributes that were given, for the declaring call."""
    given = ((name, getattr(part, name)) for name in type(part).model_fields)
    return {name: value for name, value in given if value is not None and name not in _NOT_SETTINGS}


@dg.scaffold_with(TopicScaffolder)
class TopicComponent(Part):
    """A topic of the broker: created if it is missing, with an asset and a log for replays."""

    is_topic: ClassVar[bool] = True

    name: Annotated[str, said("Name of the topic and of its asset.", examples=["orders"])]
    type: Annotated[TopicType, said("Type of the messages.")] = "normal"
    queues: Annotated[int, said("Minimum number of queues: an existing topic keeps more.")] = (
        limits.DEFAULT_QUEUES
    )
    description: Annotated[str, said("Shown with the asset.")] = ""
    tags: Annotated[dict[str, str] | None, said("Tags of the asset.")] = None
    partition_time: Annotated[
        str | None,
        said(
            "Whose hour is a message's partition: born, stored, or a property that holds ms since"
            " 1970. Default: born."
        ),
    ] = None
    deduplicate: Annotated[
        Deduplicate | None, said("Criterion of repetitions, which are not stored. Default: none.")
    ] = None
    deduplicate_window_ms: Annotated[
        int | None, said("How long a message suppresses its repetitions. Default: ten minutes.")
    ] = None
    retention_ms: Annotated[
        int | None, said("Maximum age of sealed messages. Default: 0, unlimited.")
    ] = None
    retention_bytes: Annotated[
        int | None,
        said(
            "Maximum size of segments, above which the oldest are deleted. Default: 0, unlimited."
        ),
    ] = None
    log_from: Annotated[
        str, said("First hour of the grid of sealed messages, UTC.", examples=["2013-01-01-00:00"])
    ] = LOG_FROM
    log_until: Annotated[
        str | None, said("The hour after the last one. Default: the grid grows with time.")
    ] = None
    external: Annotated[
        bool,
        said(
            "The topic belongs to another code location, which has its asset, log and reports."
            " Consumers here may read it; give the same settings."
        ),
    ] = False

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return its tags and what it produces, for Dagster's lists."""
        return spec_of("asset")

    def make(self, project: Project) -> DeclaredTopic:  # noqa: ARG002
        """Return the declared topic."""
        return topic(**_settings(self))


@dg.scaffold_with(GroupScaffolder)
class GroupComponent(Part):
    """A consumer group whose consumers are programs outside Dagster, with its checks.

    A ConsumerComponent makes its own group.
    """

    name: Annotated[str, said("Name of the group and of its asset.", examples=["billing"])]
    topic: Annotated[str, said("Topic that the group reads, declared in this project.")]
    order: Annotated[
        Order, said("What is delivered in order: nothing, message groups or queues.")
    ] = "none"
    max_attempts: Annotated[int | None, said("Maximum deliveries of a message. Default: 17.")] = (
        None
    )
    backoff_ms: Annotated[
        list[int] | None, said("Delays between the deliveries of a message; the last repeats.")
    ] = None
    backoff: Annotated[
        str | dict[str, Any] | None,
        said("customized (backoff_ms), exponential, or initial_ms, max_ms and multiplier."),
    ] = None
    on_failure: Annotated[
        OnFailure | None,
        said("What happens to a message whose attempts are exhausted. Default: dead_letter."),
    ] = None
    idempotency_window_ms: Annotated[
        int | None, said("How long idempotency keys are remembered. Default: a day.")
    ] = None
    description: Annotated[str, said("Shown with the asset.")] = ""

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return its tags and what it produces, for Dagster's lists."""
        return spec_of("asset", "asset_check")

    def make(self, project: Project) -> DeclaredGroup:
        """Return the declared group."""
        read = project.topic(self.topic, of=f"Consumer group {self.name}")
        return consumer_group(topic=read, **_settings(self))


class ConsumerThresholds(dg.Model, dg.Resolvable):
    """Limits above which a consumer's checks turn yellow."""

    dead_letters: Annotated[int, said("Expected dead letters, without those with a redrive.")] = (
        DEAD_LETTERS
    )
    oldest_unread_minutes: Annotated[float, said("Maximum waiting time of a message.")] = (
        OLDEST_UNREAD_MINUTES
    )


@dg.scaffold_with(ConsumerScaffolder)
class ConsumerComponent(Part):
    """A consumer: its handler is called with the messages of a topic, in windows of Dagster.

    It has an asset with checks, a sink, dead letters, a job, and a replay.
    """

    named_by: ClassVar[str] = "group"

    group: Annotated[
        str,
        said(
            "Consumer group, made if it is missing; the asset has its name.", examples=["billing"]
        ),
    ]
    topic: Annotated[str, said("Topic that it reads, declared in this project.")]
    handler: Annotated[
        Callable[..., Any],
        function(
            "Function of (messages, state) that returns an Outcome: a.module.name, or"
            " .module.name from the folder of this file.",
            examples=[".handler.handle"],
        ),
    ]
    engine: Annotated[
        Literal["python", "spark"], said("Threads of the run's own process, or Spark.")
    ] = "python"
    order_by: Annotated[
        Literal["message_group"] | None,
        said("With message_group, messages of a group are handled in order and may have state."),
    ] = None
    state: Annotated[
        pa.Schema | None,
        columns(
            "Columns of a message group's state: names and Arrow types, or the name of a"
            " pyarrow.Schema. Needs order_by.",
            examples=[{"orders": "int64"}, ".handler.STATE"],
        ),
    ] = None
    sink: Annotated[
        str | None, said("Folder of the sink, below the root of the resource sinks.")
    ] = None
    sink_schema: Annotated[
        pa.Schema | None,
        columns(
            "Columns of the sink: names and Arrow types, or the name of a pyarrow.Schema.",
            examples=[{"text": "string", "born_at_ms": "int64"}, ".handler.ROW"],
        ),
    ] = None
    partition_time: Annotated[
        str | None, said("The sink's column whose hour is a row's partition. Default: born_at_ms.")
    ] = None
    sink_offsets: Annotated[
        bool, said("Rows of the sink name their message in topic, queue_id and queue_offset.")
    ] = False
    publishes: Annotated[
        list[str] | None, said("Topics to which the handler publishes, declared in this project.")
    ] = None
    filter: Annotated[
        str | None,
        said(
            "Filter of the subscription: tags joined by ||, or with filter_type sql92 a"
            " condition. Default: all messages."
        ),
    ] = None
    filter_type: Annotated[Literal["tag", "sql92"], said("Language of the filter.")] = "tag"
    idempotency_key: Annotated[
        str | Callable[..., Any] | None,
        key_source(
            "Source of a message's idempotency key: a column, a property, or, with a dot, a"
            " function of the messages (a.module.name)."
        ),
    ] = None
    idempotency_window_ms: Annotated[
        int | None, said("How long idempotency keys are remembered. Default: a day.")
    ] = None
    max_attempts: Annotated[int | None, said("Maximum deliveries of a message. Default: 17.")] = (
        None
    )
    backoff_ms: Annotated[
        list[int] | None, said("Delays between the deliveries of a message; the last repeats.")
    ] = None
    backoff: Annotated[
        str | dict[str, Any] | None,
        said("customized (backoff_ms), exponential, or initial_ms, max_ms and multiplier."),
    ] = None
    on_failure: Annotated[
        OnFailure | None,
        said("What happens to a message whose attempts are exhausted. Default: dead_letter."),
    ] = None
    max_batch: Annotated[
        int | None, said("Maximum messages of a micro-batch. Default: 20,000, in Spark 100,000.")
    ] = None
    parallelism: Annotated[
        int | None, said("Threads, or tasks of Spark. Default: 8, in Spark 2.")
    ] = None
    thresholds: Annotated[
        ConsumerThresholds | None, said("Limits above which its checks turn yellow.")
    ] = None
    description: Annotated[
        str | None,
        said("Shown with the asset. Default: the first line of the handler's docstring."),
    ] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return its tags and what it produces, for Dagster's lists."""
        return spec_of("asset", "asset_check")

    def make(self, project: Project) -> Consumer:
        """Return the consumer that the decorator of its engine makes."""
        what = f"Consumer {self.group}"
        settings = _settings(self)
        if self.thresholds is not None:
            settings["thresholds"] = Thresholds(**self.thresholds.model_dump())
        declare = spark_consumer if self.engine == "spark" else python_consumer
        return declare(
            topic=project.topic(self.topic, of=what),
            publishes=[project.topic(each, of=what) for each in self.publishes or ()],
            **settings,
        )(self.handler)


@dg.scaffold_with(CheckerScaffolder)
class TransactionCheckerComponent(Part):
    """A checker: it decides half messages whose producer has not ended them."""

    named_by: ClassVar[str] = "topic"

    topic: Annotated[
        str,
        said(
            "Topic of type transaction or mixed, declared in this project.", examples=["payments"]
        ),
    ]
    checker: Annotated[
        Callable[..., Any],
        function(
            "Function of (checks) that returns commit, rollback or unknown for each row:"
            " a.module.name, or .module.name from the folder of this file.",
            examples=[".checker.check"],
        ),
    ]
    description: Annotated[
        str, said("Shown with the asset. Default: the first line of the checker's docstring.")
    ] = ""

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return its tags; the BrokerComponent brings its window and asset."""
        return spec_of("asset")

    def make(self, project: Project) -> TransactionChecker:
        """Return the checker that the decorator makes."""
        checked = project.topic(self.topic, of="A TransactionCheckerComponent")
        return transaction_checker(topic=checked, description=self.description)(self.checker)
