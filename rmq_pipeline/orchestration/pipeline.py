"""Definitions of a pipeline, put together from its topics and consumers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import dagster as dg

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.replay import replay_asset
from rmq_pipeline.orchestration.topic_assets import DeclaredTopic
from rmq_pipeline.orchestration.topic_log import log_spec, topic_log_sensor
from rmq_pipeline.orchestration.topic_reports import topic_report_sensor
from rmq_pipeline.orchestration.transaction_checker import TransactionChecker


@dataclass(frozen=True)
class Pipeline:
    """Topics and the consumers between them."""

    name: str
    topics: Sequence[DeclaredTopic]
    consumers: Sequence[Consumer]
    #: They decide half messages of the topics; the check window of the application runs them.
    checkers: Sequence[TransactionChecker] = ()

    def __post_init__(self) -> None:
        """All that lives in one asset group: its lineage is one picture; replays have another."""
        joined = tuple(replace(each, group_name=self.name) for each in self.checkers)
        object.__setattr__(self, "checkers", joined)

    def ensure(self, client: Client) -> None:
        """Make topics and groups at the broker, so that it counts lag from the first message."""
        for topic in self.topics:
            topic.ensure(client)
        for consumer in self.consumers:
            consumer.group.ensure(client)

    def publishers(self, topic: DeclaredTopic) -> Iterable[dg.AssetKey]:
        """Assets of the consumers that send to a topic, and of the checkers that commit to it."""
        yield from (each.key for each in self.consumers if topic in each.publishes)
        yield from (each.key for each in self.checkers if each.topic == topic)

    @property
    def replay_group(self) -> str:
        """The asset group of the topics' logs and of what replays them."""
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
            yield replay_asset(consumer).map_asset_specs(
                lambda spec: spec.replace_attributes(group_name=self.replay_group)
            )

    def definitions(self) -> dg.Definitions:
        """Assets, checks, jobs and sensors; resources come from the application."""
        return dg.Definitions(
            assets=list(self._assets()),
            asset_checks=[check for each in self.consumers for check in each.checks],
            jobs=[consumer.job for consumer in self.consumers],
            sensors=[
                *(consumer.sensor for consumer in self.consumers),
                topic_report_sensor(
                    self.topics,
                    [consumer.group.name for consumer in self.consumers],
                    name=f"{self.name}_topics",
                ),
                topic_log_sensor(self.topics, name=f"{self.name}_topic_logs"),
            ],
        )
