"""Dagster definitions of a pipeline, composed of its topics and consumers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import dagster as dg

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.check_sensor import check_sensor
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.consumer_report import hours_spec
from rmq_pipeline.orchestration.declarations import DeclaredTopic, identifier
from rmq_pipeline.orchestration.replay import replay_asset
from rmq_pipeline.orchestration.sensors import consumers_sensor
from rmq_pipeline.orchestration.topic_log import log_spec, topic_log_sensor
from rmq_pipeline.orchestration.topic_reports import topic_report_sensor
from rmq_pipeline.orchestration.transaction_checker import TransactionChecker


@dataclass(frozen=True)
class Pipeline:
    """Topics and the consumers between them."""

    name: str
    topics: Sequence[DeclaredTopic]
    consumers: Sequence[Consumer]
    #: Checkers of the topics' half messages; the application's check window runs them.
    checkers: Sequence[TransactionChecker] = ()

    def __post_init__(self) -> None:
        """Validate the pipeline, and put it in one asset group, so that its lineage is one graph.

        Replays have another group.

        Raises:
            ValueError: two parts would have the same asset, group, topic or sink.
        """
        self._check()
        joined = tuple(replace(each, group_name=self.name) for each in self.checkers)
        object.__setattr__(self, "checkers", joined)

    def _check(self) -> None:
        if not self.name or identifier(self.name) != self.name:
            raise ValueError(
                f"A pipeline is named {self.name!r}. Use letters, digits and _: the name is that of"
                " its asset group."
            )
        names = [each.name for each in self.topics]
        names += [each.group.name for each in self.consumers]
        _refuse_twins(names, of=f"pipeline {self.name}")
        checked = [each.topic.name for each in self.checkers]
        if twice := _twins(checked):
            raise ValueError(
                f"Topic {twice[0]} of pipeline {self.name} has two checkers: keep one."
            )
        declared: dict[str, DeclaredTopic] = {each.name: each for each in self.topics}
        for topic in self._topics_of_others():
            known = declared.setdefault(topic.name, topic)
            if known != topic:
                raise ValueError(
                    f"Topic {topic.name} is declared twice in pipeline {self.name}, with other"
                    " settings. Declare it once, and use that."
                )
        sinks = [str(each.spec.sink) for each in self.consumers if each.spec.sink is not None]
        if twice := _twins(sinks):
            raise ValueError(
                f"Two consumers of pipeline {self.name} have the sink {twice[0]}: a sink belongs to"
                " one consumer group."
            )

    def _topics_of_others(self) -> Iterable[DeclaredTopic]:
        for consumer in self.consumers:
            yield from (consumer.group.topic, *consumer.publishes)
        yield from (each.topic for each in self.checkers)

    def ensure(self, client: Client) -> None:
        """Create topics and groups at the broker, so that lag counts from the first message."""
        for topic in self.topics:
            topic.ensure(client)
        for consumer in self.consumers:
            consumer.group.ensure(client)

    def publishers(self, topic: DeclaredTopic) -> Iterable[dg.AssetKey]:
        """Yield the assets of consumers that publish to a topic and checkers that commit to it."""
        yield from (each.key for each in self.consumers if topic in each.publishes)
        yield from (each.key for each in self.checkers if each.topic == topic)

    @property
    def replay_group(self) -> str:
        """Asset group of the topics' logs and of the replays."""
        return f"{self.name}_replay"

    def _assets(self) -> Iterable[dg.AssetsDefinition | dg.AssetSpec]:
        def join(spec: dg.AssetSpec) -> dg.AssetSpec:
            return spec.replace_attributes(group_name=self.name)

        for topic in self.topics:
            yield join(topic.spec(self.publishers(topic)))
            yield log_spec(topic).replace_attributes(group_name=self.replay_group)
        for consumer in self.consumers:
            yield consumer.asset.map_asset_specs(join)
            yield join(consumer.dead_letters)
            if consumer.spec.sink is not None:
                hours = hours_spec(consumer.spec, topic=consumer.group.topic, consumer=consumer.key)
                yield hours.replace_attributes(group_name=self.name)
            yield replay_asset(consumer).map_asset_specs(
                lambda spec: spec.replace_attributes(group_name=self.replay_group)
            )

    def definitions(self) -> dg.Definitions:
        """Return assets, checks, jobs and sensors; the application adds the resources."""
        return dg.Definitions(
            assets=list(self._assets()),
            asset_checks=[check for each in self.consumers for check in each.checks],
            jobs=[consumer.job for consumer in self.consumers],
            sensors=[
                *(
                    [consumers_sensor(self.consumers, name=f"{self.name}_consumers")]
                    if self.consumers
                    else []
                ),
                topic_report_sensor(
                    self.topics,
                    [consumer.group.name for consumer in self.consumers],
                    name=f"{self.name}_topics",
                ),
                topic_log_sensor(self.topics, name=f"{self.name}_topic_logs"),
                check_sensor([each.watched for each in self.consumers], name=f"{self.name}_checks"),
            ],
        )


def _twins(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, n in Counter(names).items() if n > 1]


def _refuse_twins(names: Sequence[str], *, of: str) -> None:
    """Refuse different names that map to the same asset key.

    Raises:
        ValueError: contains the names.
    """
    twins = _twins(identifier(name) for name in names)
    if not twins:
        return
    same = sorted(name for name in names if identifier(name) == twins[0])
    raise ValueError(
        f"{' and '.join(same)} of {of} would be one asset, {twins[0]}. Rename one of them."
    )
