"""Members of consumer groups that read a topic outside Dagster, as a table to show."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from rmq_pipeline.errors import ConsumerGroupNotFoundError
from rmq_pipeline.flight.client import Client

#: Statistics that a member reports about a topic, and their names in the table.
_STATISTICS: Final = {
    "consume_ok_per_s": "consumed_per_second",
    "consume_failed_per_s": "failed_per_second",
    "consume_rt_ms": "milliseconds_per_call",
    "pulled_per_s": "pulled_per_second",
    "cached": "cached",
}


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


def table(members: Iterable[LiveMember]) -> dg.TableMetadataValue:
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
