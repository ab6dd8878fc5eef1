"""Dagster definitions of a pipeline, composed of its topics and consumers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import dagster as dg

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.check_sensor import check_sensor
from rmq_pipeline.orchestration.checks import Thresholds, Watched, watched_consumer
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.consumer_report import hours_spec
from rmq_pipeline.orchestration.declarations import (
    DeclaredGroup,
    DeclaredTopic,
    dead_letter_spec,
    identifier,
    refuse_twins,
)
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
    #: Groups whose consumers are programs outside Dagster.
    groups: Sequence[DeclaredGroup] = ()

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
        names += [each.name for each in self.groups]
        refuse_twins(names, of=f"pipeline {self.name}")
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
        yield from (each.topic for each in self.groups)

    @property
    def all_topics(self) -> list[DeclaredTopic]:
        """Its topics, and those of others that its parts name."""
        return list(
            {each.name: each for each in (*self.topics, *self._topics_of_others())}.values()
        )

    def ensure(self, client: Client) -> None:
        """Create topics and groups at the broker, so that lag counts from the first message."""
        for topic in self.topics:
            topic.ensure(client)
        for group in (*(each.group for each in self.consumers), *self.groups):
            group.ensure(client)

    def publishers(self, topic: DeclaredTopic) -> Iterable[dg.AssetKey]:
        """Yield the assets of consumers that publish to a topic and checkers that commit to it."""
        yield from (each.key for each in self.consumers if topic in each.publishes)
        yield from (each.key for each in self.checkers if each.topic == topic)

    @property
    def replay_group(self) -> str:
        """Asset group of the topics' logs and of the replays."""
        return f"{self.name}_replay"

    def of_topic(self, topic: DeclaredTopic) -> dg.Definitions:
        """Return the assets of a topic and of its log."""
        log = log_spec(topic).replace_attributes(group_name=self.replay_group)
        return dg.Definitions(assets=[self._join(topic.spec(self.publishers(topic))), log])

    def of_group(self, group: DeclaredGroup) -> dg.Definitions:
        """Return the assets and checks of a group whose consumers are outside Dagster."""
        letters = dead_letter_spec(group.name, group.key)
        return dg.Definitions(
            assets=[self._join(group.spec()), self._join(letters)],
            asset_checks=_watched(group).definitions(),
        )

    def of_consumer(self, consumer: Consumer) -> dg.Definitions:
        """Return the assets and checks of a consumer; ``shared`` has its job."""
        assets: list[dg.AssetsDefinition | dg.AssetSpec] = [
            consumer.asset.map_asset_specs(self._join),
            self._join(consumer.dead_letters),
            replay_asset(consumer).map_asset_specs(
                lambda spec: spec.replace_attributes(group_name=self.replay_group)
            ),
        ]
        if consumer.spec.sink is not None:
            hours = hours_spec(consumer.spec, topic=consumer.group.topic, consumer=consumer.key)
            assets.append(self._join(hours))
        return dg.Definitions(assets=assets, asset_checks=list(consumer.checks))

    def shared(self) -> dg.Definitions:
        """Return what belongs to no single part: the sensors, and the jobs that they start."""
        groups = [each.group.name for each in self.consumers]
        groups += [each.name for each in self.groups]
        watched = [each.watched for each in self.consumers]
        watched += [_watched(each) for each in self.groups]
        starting = (
            [consumers_sensor(self.consumers, name=f"{self.name}_consumers")]
            if self.consumers
            else []
        )
        return dg.Definitions(
            jobs=[consumer.job for consumer in self.consumers],
            sensors=[
                *starting,
                topic_report_sensor(
                    self.topics, groups, others=self.groups, name=f"{self.name}_topics"
                ),
                topic_log_sensor(self.topics, name=f"{self.name}_topic_logs"),
                check_sensor(watched, name=f"{self.name}_checks"),
            ],
        )

    def definitions(self) -> dg.Definitions:
        """Return assets, checks, jobs and sensors; the application adds the resources."""
        return dg.Definitions.merge(
            *(self.of_topic(each) for each in self.topics),
            *(self.of_group(each) for each in self.groups),
            *(self.of_consumer(each) for each in self.consumers),
            self.shared(),
        )

    def _join(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(group_name=self.name)


def _watched(group: DeclaredGroup) -> Watched:
    """Return the checks of a group whose consumers are outside Dagster: it has no windows."""
    return watched_consumer(
        group.name,
        group.key,
        window=identifier(group.name),
        ordered=group.order == "message_group",
        thresholds=Thresholds(),
    )


def _twins(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, n in Counter(names).items() if n > 1]
