"""The sensor that reports progress and readers of topics, at most once a minute."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import dagster as dg

from rmq_pipeline.errors import (
    BusyError,
    ConsumerGroupNotFoundError,
    RocketMQError,
    TopicNotFoundError,
)
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.checks import waiting
from rmq_pipeline.orchestration.declarations import DeclaredGroup, DeclaredTopic, dead_letter_key
from rmq_pipeline.orchestration.resources import BrokerResource

#: Statistics that a member reports about a topic, and their names in the table.
_STATISTICS: Final = {
    "consume_ok_per_s": "consumed_per_second",
    "consume_failed_per_s": "failed_per_second",
    "consume_rt_ms": "milliseconds_per_call",
    "pulled_per_s": "pulled_per_second",
    "cached": "cached",
}
REPORT_INTERVAL_S: Final = 15
#: Tag of sensors that create topics.
CREATES: Final = "rmq/creates"
REPORT_EVERY_MS: Final = 60_000
#: Longest interval of observations of a group with lag whose numbers stay the same.
UNCHANGED_EVERY_MS: Final = 3_600_000


@dataclass(frozen=True)
class LiveMember:
    """A live consumer of a topic, with the contents of its last heartbeat."""

    group: str
    client_id: str
    model: str
    order: str
    #: The queues assigned to it.
    queue_ids: tuple[int, ...]
    #: Averages over the last minute.
    statistics: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name that is unique among all groups."""
        return f"{self.group}/{self.client_id}"

    @property
    def queues(self) -> str:
        """Its queues, as text."""
        return ", ".join(map(str, self.queue_ids))


def live_members(client: Client, topic: str, *, groups: Iterable[str]) -> list[LiveMember]:
    """Return the members of these groups that read the topic."""
    found = []
    for group in groups:
        try:
            members = client.describe_group(group).get("members", {})
        except ConsumerGroupNotFoundError:
            continue
        found += [
            _member(group, client_id, topic=topic, said=facts.get("details") or {})
            for client_id, facts in members.items()
            if topic in (facts.get("topics") or ())
        ]
    return found


def _member(group: str, client_id: str, *, topic: str, said: Mapping[str, Any]) -> LiveMember:
    # The contents come from the client, so only values of the expected type are used.
    queues, statistics = (_part(_part(said, name), topic) for name in ("queues", "statistics"))
    return LiveMember(
        group=group,
        client_id=client_id,
        model=str(said.get("model") or ""),
        order=str(said.get("order") or ""),
        queue_ids=tuple(sorted(q for q in queues if isinstance(q, int))),
        statistics={
            name: float(statistics[key])
            for key, name in _STATISTICS.items()
            if isinstance(statistics, Mapping) and isinstance(statistics.get(key), int | float)
        },
    )


def _part(whole: Any, name: str) -> Any:
    found = whole.get(name) if isinstance(whole, Mapping) else None
    return found if isinstance(found, Mapping | list) else {}


def member_table(members: Iterable[LiveMember]) -> dg.TableMetadataValue:
    """Return a table with one row per member."""
    named = ("consumer_group", "client_id", "model", "order", "queues")
    columns = [
        *(dg.TableColumn(name, "string") for name in named),
        *(dg.TableColumn(name, "float") for name in _STATISTICS.values()),
    ]
    records = [
        dg.TableRecord(
            {
                **dict(zip(named, (m.group, m.client_id, m.model, m.order, m.queues), strict=True)),
                **{name: m.statistics.get(name, 0.0) for name in _STATISTICS.values()},
            }
        )
        for m in members
    ]
    return dg.MetadataValue.table(records, dg.TableSchema(columns=columns))


@dataclass(frozen=True)
class TopicReport:
    """The last report about a topic or about a group's dead letters."""

    at_ms: int
    #: Number of messages ever stored, over all queues.
    head: int
    #: Unsettled messages by group.
    backlog: dict[str, int]
    #: By group and client: the queues of live consumers.
    members: dict[str, str] = field(default_factory=dict)
    #: Interval to the next report if nothing changes.
    every_ms: int = REPORT_EVERY_MS


def topic_report_sensor(
    topics: Sequence[DeclaredTopic],
    groups: Sequence[str],
    *,
    others: Sequence[DeclaredGroup] = (),
    name: str = "topic_reports",
) -> dg.SensorDefinition:
    """Return the sensor that observes topics and dead letters when they have changed.

    It creates the topics and groups at the broker as declared, even topics without a consumer.

    Args:
        topics: declared topics.
        groups: groups whose dead letters are observed.
        others: groups that no consumer of this code location creates.
        name: name of the sensor.
    """
    made: set[str] = set()

    @dg.sensor(
        name=name,
        asset_selection=dg.AssetSelection.assets(*(topic.key for topic in topics)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=REPORT_INTERVAL_S,
        tags={CREATES: "topics"},
        description="Reports head, backlog, rate and readers of the topics, at most once a minute.",
    )
    def topic_reports(
        context: dg.SensorEvaluationContext, broker: BrokerResource
    ) -> dg.SensorResult:
        said = _load(context.cursor)
        try:
            with broker.client(retry_s=0.0) as client:
                _make(client, [*topics, *others], made=made, log=context.log)
                events = _topic_events(client, topics, said=said, made=made)
                events += _dead_letter_events(client, groups, said=said)
                events += _group_events(client, others, said=said)
        except BusyError as error:
            return dg.SensorResult(skip_reason=str(error))
        if not events:
            return dg.SensorResult(skip_reason="Nothing has moved.", cursor=_dump(said))
        return dg.SensorResult(asset_events=events, cursor=_dump(said))

    return topic_reports


def _make(
    client: Client,
    declared: Sequence[DeclaredTopic | DeclaredGroup],
    *,
    made: set[str],
    log: Any,
) -> None:
    """Create the topics and groups that this process has not created yet, as declared."""
    for each in declared:
        if each.name in made:
            continue
        try:
            each.ensure(client)
        except BusyError:
            raise
        except RocketMQError as error:
            what = "Topic" if isinstance(each, DeclaredTopic) else "Consumer group"
            log.warning("%s %s differs from its declaration: %s", what, each.name, error)
        made.add(each.name)


def _load(cursor: str | None) -> dict[str, TopicReport]:
    return {name: TopicReport(**fields) for name, fields in json.loads(cursor or "{}").items()}


def _dump(said: Mapping[str, TopicReport]) -> str:
    return json.dumps({name: asdict(each) for name, each in said.items()})


def _topic_events(
    client: Client,
    topics: Sequence[DeclaredTopic],
    *,
    said: dict[str, TopicReport],
    made: set[str],
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
            made.discard(topic.name)
            continue
        head = sum(queue["max_offset"] for queue in queues)
        backlog = queries.lag_by_group(client, topic.name)
        members = live_members(client, topic.name, groups=backlog)
        now = TopicReport(now_ms, head, backlog, {each.name: each.queues for each in members})
        if metadata := _moved(said.get(topic.name), now):
            if members:
                metadata["members"] = member_table(members)
                metadata["live_members"] = len(members)
            events.append(dg.AssetObservation(topic.key, metadata=metadata))
            said[topic.name] = now
    return events


def _dead_letter_events(
    client: Client, groups: Sequence[str], *, said: dict[str, TopicReport]
) -> list[dg.AssetObservation]:
    from rmq_pipeline.orchestration import queries

    now_ms = int(client.due()["now_ms"])
    waiting = [group for group in groups if _is_time(said.get(_letters(group)), now_ms)]
    counts = queries.dead_letters(client) if waiting else {}
    events = []
    for group in waiting:
        now = TopicReport(now_ms, counts.get(group, 0), {})
        if metadata := _moved(said.get(_letters(group)), now):
            metadata["dead_letters"] = queries.dead_letters_left(client, group)
            events.append(dg.AssetObservation(dead_letter_key(group), metadata=metadata))
            said[_letters(group)] = now
    return events


def _group_events(
    client: Client, groups: Sequence[DeclaredGroup], *, said: dict[str, TopicReport]
) -> list[dg.AssetObservation]:
    """Observe groups of programs outside Dagster, which have no windows that report."""
    now_ms = int(client.due()["now_ms"])
    events = []
    for group in groups:
        name = f"group/{group.name}"
        if not _is_time(said.get(name), now_ms):
            continue
        try:
            found = waiting(client, group.name)
            members = live_members(client, group.topic.name, groups=[group.name])
        except ConsumerGroupNotFoundError:
            continue
        now = TopicReport(now_ms, found["lag"], {}, {each.name: each.queues for each in members})
        every_ms = _changed_or_late(said.get(name), now)
        if every_ms:
            metadata = {**found, "live_members": len(members)}
            events.append(dg.AssetObservation(group.key, metadata=metadata))
            said[name] = replace(now, every_ms=every_ms)
    return events


def _changed_or_late(last: TopicReport | None, now: TopicReport) -> int:
    """Return the interval to the next report of a group if one is due now, else 0.

    With lag, the oldest message grows older, also without any movement. Each report of that doubles
    the interval: an abandoned group would otherwise write one a minute forever.
    """
    if last is None or _moved(last, now):
        return REPORT_EVERY_MS
    if now.head and now.at_ms - last.at_ms >= last.every_ms:
        return min(2 * last.every_ms, UNCHANGED_EVERY_MS)
    return 0


def _letters(group: str) -> str:
    return f"dead_letters/{group}"


def _is_time(last: TopicReport | None, now_ms: int) -> bool:
    return last is None or now_ms - last.at_ms >= REPORT_EVERY_MS


def _moved(last: TopicReport | None, now: TopicReport) -> dict[str, Any]:
    """Return the metadata of an observation; empty if nothing has changed since the last one."""
    if last is not None and replace(last, at_ms=now.at_ms, every_ms=now.every_ms) == now:
        return {}
    metadata: dict[str, Any] = {"head": now.head}
    for group, lag in now.backlog.items():
        metadata[f"backlog_{group}"] = lag
    # A recreated topic starts at 0, so it has no rate yet.
    if last is not None and now.head >= last.head:
        per_second = (now.head - last.head) / max(1, now.at_ms - last.at_ms) * 1000
        metadata["messages_per_second"] = round(per_second, 1)
    return metadata
