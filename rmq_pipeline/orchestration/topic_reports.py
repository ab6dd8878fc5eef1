"""The sensor that shows how topics move, and who reads them, at most once a minute."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import dagster as dg

from rmq_pipeline.errors import BusyError, TopicNotFoundError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.dead_letters import dead_letter_key
from rmq_pipeline.orchestration.live_members import live_members, table
from rmq_pipeline.orchestration.topic_assets import DeclaredTopic

INTERVAL_S: Final = 15
REPORT_EVERY_MS: Final = 60_000


@dataclass(frozen=True)
class Reported:
    """What was last said of a topic or of a group's dead letters."""

    at_ms: int
    #: Messages ever stored, all queues together.
    head: int
    #: By group: messages not settled.
    backlog: dict[str, int]
    #: By group and client: the queues of consumers that are there.
    members: dict[str, str] = field(default_factory=dict)


def topic_report_sensor(
    topics: Sequence[DeclaredTopic], groups: Sequence[str], *, name: str = "topic_reports"
) -> dg.SensorDefinition:
    """The sensor that observes topics and dead letters when they have moved.

    Args:
        topics: declared ones.
        groups: whose dead letters are observed.
        name: of the sensor.
    """

    @dg.sensor(
        name=name,
        asset_selection=dg.AssetSelection.assets(*(topic.key for topic in topics)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=INTERVAL_S,
        description="Reports head, backlog, rate and readers of the topics, at most once a minute.",
    )
    def topic_reports(
        context: dg.SensorEvaluationContext, broker: BrokerResource
    ) -> dg.SensorResult:
        said = _load(context.cursor)
        try:
            with broker.client(retry_s=0.0) as client:
                events = _topic_events(client, topics, said=said)
                events += _dead_letter_events(client, groups, said=said)
        except BusyError as error:
            return dg.SensorResult(skip_reason=str(error))
        if not events:
            return dg.SensorResult(skip_reason="Nothing has moved.", cursor=_dump(said))
        return dg.SensorResult(asset_events=events, cursor=_dump(said))

    return topic_reports


def _load(cursor: str | None) -> dict[str, Reported]:
    return {name: Reported(**fields) for name, fields in json.loads(cursor or "{}").items()}


def _dump(said: Mapping[str, Reported]) -> str:
    return json.dumps({name: asdict(each) for name, each in said.items()})


def _topic_events(
    client: Client, topics: Sequence[DeclaredTopic], *, said: dict[str, Reported]
) -> list[dg.AssetObservation]:
    from rmq_pipeline.orchestration import queries

    now_ms = int(client.due()["now_ms"])
    events = []
    for topic in topics:
        if not _is_time(said.get(topic.name), now_ms):
            continue
        try:
            queues = client.describe_topic(topic.name)["offsets"]
        except TopicNotFoundError:
            continue
        head = sum(queue["max_offset"] for queue in queues)
        backlog = queries.lag_by_group(client, topic.name)
        members = live_members(client, topic.name, groups=backlog)
        now = Reported(now_ms, head, backlog, {each.name: each.queues for each in members})
        if metadata := _moved(said.get(topic.name), now):
            if members:
                metadata["members"] = table(members)
            events.append(dg.AssetObservation(topic.key, metadata=metadata))
            said[topic.name] = now
    return events


def _dead_letter_events(
    client: Client, groups: Sequence[str], *, said: dict[str, Reported]
) -> list[dg.AssetObservation]:
    from rmq_pipeline.orchestration import queries

    now_ms = int(client.due()["now_ms"])
    waiting = [group for group in groups if _is_time(said.get(_letters(group)), now_ms)]
    counts = queries.dead_letters(client) if waiting else {}
    events = []
    for group in waiting:
        now = Reported(now_ms, counts.get(group, 0), {})
        if metadata := _moved(said.get(_letters(group)), now):
            events.append(dg.AssetObservation(dead_letter_key(group), metadata=metadata))
            said[_letters(group)] = now
    return events


def _letters(group: str) -> str:
    return f"dead_letters/{group}"


def _is_time(last: Reported | None, now_ms: int) -> bool:
    return last is None or now_ms - last.at_ms >= REPORT_EVERY_MS


def _moved(last: Reported | None, now: Reported) -> dict[str, Any]:
    """Metadata of an observation; empty when it would say what the last one said."""
    if last is not None and replace(last, at_ms=now.at_ms) == now:
        return {}
    metadata: dict[str, Any] = {"head": now.head}
    for group, lag in now.backlog.items():
        metadata[f"backlog_{group}"] = lag
    # A topic made anew begins at 0 again: no rate then.
    if last is not None and now.head >= last.head:
        per_second = (now.head - last.head) / max(1, now.at_ms - last.at_ms) * 1000
        metadata["messages_per_second"] = round(per_second, 1)
    return metadata
