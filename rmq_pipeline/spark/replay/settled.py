"""Settled messages of a consumer group on a topic, and its dead letters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from rmq_pipeline.flight.client import Client

if TYPE_CHECKING:
    from sqlglot import exp

_DIALECT: Final = "duckdb"
#: Views of messages that were examined and are not settled.
_UNSETTLED: Final = ("in_flight", "retrying", "parked", "waiting")
#: Place of a message.
PLACE: Final = pa.schema([("queue_id", pa.int32()), ("queue_offset", pa.int64())])


@dataclass(frozen=True, slots=True)
class Settled:
    """A topic's messages that a group has settled: those before the cursor and not in ``open``."""

    #: queue_id -> the first offset that was not examined.
    cursors: dict[int, int]
    #: PLACE of unsettled messages before the cursor.
    open: pa.Table


def settled(client: Client, group: str, *, topic: str) -> Settled:
    """Return the messages of a topic that a group has settled."""
    from sqlglot import exp

    asked = exp.select("queue_id", '"cursor"').from_("progress").where(*_of(group, topic))
    cursors = {int(row["queue_id"]): int(row["cursor"]) for row in _rows(client, asked)}
    parts = [exp.select(*PLACE.names).from_(view).where(*_of(group, topic)) for view in _UNSETTLED]
    left = client.sql(exp.union(*parts, distinct=True).sql(_DIALECT))
    return Settled(cursors, left.cast(PLACE))


def dead_lettered(client: Client, group: str, *, topic: str) -> pa.Table:
    """Return a group's dead letters of a topic that were not acked after a redrive.

    Returns:
        PLACE, reason, error_type.
    """
    from sqlglot import exp

    query = (
        exp.select(
            "d.origin_queue_id AS queue_id",
            "d.origin_queue_offset AS queue_offset",
            "d.reason",
            "d.error_type",
        )
        .from_("dead_letters AS d")
        .join(
            "redrives AS r",
            on=(
                "r.consumer_group = d.consumer_group AND r.dead_letter_queue_id = d.queue_id"
                " AND r.dead_letter_offset = d.queue_offset"
            ),
            join_type="left",
        )
        .where(*_of(group, topic, table="d"))
        .where("coalesce(r.outcome, '') <> 'acked'")
    )
    found = client.sql(query.sql(_DIALECT))
    types = [*PLACE, ("reason", pa.string()), ("error_type", pa.string())]
    return found.cast(pa.schema(types))


def span(
    client: Client, topic: str, *, column: str, from_ms: int, to_ms: int
) -> dict[int, tuple[int, int]]:
    """Return queue_id -> [base, end) of the messages whose time is in [from_ms, to_ms).

    Args:
        client: client of the broker.
        topic: name of the topic.
        column: stored_at_ms or born_at_ms.
        from_ms: start of the range, inclusive.
        to_ms: end of the range, exclusive.
    """
    from sqlglot import exp

    query = (
        exp.select("queue_id", "min(queue_offset) AS base", "max(queue_offset) + 1 AS end_")
        .from_("messages")
        .where(exp.column("topic").eq(topic), exp.column(column) >= from_ms)
        .where(exp.column(column) < to_ms)
        .group_by("queue_id")
    )
    return {int(r["queue_id"]): (int(r["base"]), int(r["end_"])) for r in _rows(client, query)}


def stored_at(client: Client, topic: str, *, places: list[tuple[int, int]]) -> list[int | None]:
    """Return stored_at_ms of messages at (queue_id, queue_offset); None for missing ones."""
    from sqlglot import exp

    if not places:
        return []
    either = exp.or_(
        *(
            exp.and_(exp.column("queue_id").eq(q), exp.column("queue_offset").eq(o))
            for q, o in places
        )
    )
    query = exp.select(*PLACE.names, "stored_at_ms").from_("messages")
    rows = _rows(client, query.where(exp.column("topic").eq(topic), either))
    known = {(r["queue_id"], r["queue_offset"]): int(r["stored_at_ms"]) for r in rows}
    return [known.get(place) for place in places]


def _of(group: str, topic: str, *, table: str | None = None) -> "list[exp.Expression]":
    from sqlglot import exp

    return [
        exp.column("consumer_group", table).eq(group),
        exp.column("topic", table).eq(topic),
    ]


def _rows(client: Client, query: "exp.Expression") -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], client.sql(query.sql(_DIALECT)).to_pylist())
