"""Questions of the checks to the broker's documented views, as SQL made by sqlglot.

To be imported where it is used: sqlglot takes 0.3 s, and every window would wait for it.
"""

from typing import Any, cast

import pyarrow as pa
from sqlglot import exp

from rmq_pipeline.flight.client import Client

_DIALECT = "duckdb"


def lag(client: Client, group: str) -> tuple[int, int | None]:
    """Messages of a group that are not settled, and when the oldest was stored."""
    query = exp.select("sum(lag) AS lag", "min(oldest_unread_at_ms) AS oldest").from_("lag")
    row = _row(client, query.where(_is_of(group)))
    return int(row["lag"] or 0), row["oldest"]


def lag_by_group(client: Client, topic: str) -> dict[str, int]:
    """Messages of a topic that are not settled, for every group that reads it."""
    query = exp.select("consumer_group", "sum(lag)::BIGINT AS lag").from_("lag")
    rows = _rows(client, query.where(exp.column("topic").eq(topic)).group_by("consumer_group"))
    return {row["consumer_group"]: int(row["lag"]) for row in rows}


def held_by_windows(client: Client, group: str) -> int:
    """Messages in flight that were delivered to a window of the group."""
    query = exp.select("count(*) AS n").from_("in_flight").where(_is_of(group), "epoch > 0")
    return int(_row(client, query)["n"])


def dead_letters(client: Client) -> dict[str, int]:
    """Dead letters by group."""
    query = exp.select("consumer_group", "count(*) AS n").from_("dead_letters")
    rows = _rows(client, query.group_by("consumer_group"))
    return {row["consumer_group"]: row["n"] for row in rows}


def dead_letter_reasons(client: Client, group: str, *, limit: int = 10) -> list[dict[str, Any]]:
    """The most frequent reasons of a group's dead letters: reason, n."""
    query = exp.select("reason", "count(*) AS n").from_("dead_letters").where(_is_of(group))
    return _rows(client, query.group_by("reason").order_by("n DESC", "reason").limit(limit))


def parked(client: Client, group: str) -> list[dict[str, Any]]:
    """What a group has parked, the oldest first: a row of the view each."""
    query = exp.select("*").from_("parked").where(_is_of(group))
    return _rows(client, query.order_by("parked_at_ms", "topic", "queue_id", "queue_offset"))


def fallbacks(client: Client, job: str, *, since_ms: int) -> list[dict[str, Any]]:
    """When the broker did overdue work of a job itself: at_ms, detail; newest first."""
    query = (
        exp.select("at_ms", "detail")
        .from_("events")
        .where(exp.column("kind").eq("upkeep_fallback"))
        .where(exp.column("at_ms") >= since_ms)
        .where(exp.func("contains", exp.column("detail"), exp.Literal.string(f'"{job}"')))
    )
    return _rows(client, query.order_by("at_ms DESC").limit(100))


def order_violations(client: Client, group: str, *, since_ms: int = 0) -> int:
    """Messages settled before an earlier one of their message group.

    Looks at what happened since a moment, as far back as the history goes. A dead letter was
    settled when it became one; that it was redriven later is no violation.
    """
    key = ("e.topic", "e.queue_id", "e.queue_offset", "m.message_group")
    settled = (
        exp.select(*key, "min(e.position) AS position")
        .from_("events AS e")
        .join("messages AS m", using=["topic", "queue_id", "queue_offset"])
        .where(*_happened_to(group, since_ms=since_ms), _settles())
        .where("m.message_group IS NOT NULL")
        .group_by(*key)
    )
    order = "PARTITION BY topic, queue_id, message_group ORDER BY queue_offset"
    paired = exp.select("position", f"lag(position) OVER ({order}) AS earlier")
    query = exp.select("count(*) AS n").from_(paired.from_(settled.subquery("s")).subquery("p"))
    return int(_row(client, query.where("earlier > position"))["n"])


def lost(client: Client, group: str, *, since_ms: int = 0) -> int:
    """Messages that were delivered to a group and are neither settled nor to be given again.

    Looks at what was delivered since a moment, as far back as the history goes, and only behind
    the last reset of an offset.
    """
    key = ("topic", "queue_id", "queue_offset")
    happened = exp.select(*(f"e.{name}" for name in key)).from_("events AS e")
    happened = happened.where(*_happened_to(group, since_ms=since_ms))
    reset = (
        exp.select("topic", "queue_id", "max(position) AS reset_at")
        .from_("events AS e")
        .where(*_happened_to(group, since_ms=since_ms), "kind = 'reset'")
        .group_by("topic", "queue_id")
    )
    delivered = (
        happened.join(reset.subquery("r"), using=["topic", "queue_id"], join_type="left")
        .where("e.kind = 'lease'")
        .where("e.position > coalesce(r.reset_at, -1)")
    )
    held = [
        exp.select(*key).from_(view).where(_is_of(group))
        for view in ("in_flight", "retrying", "parked", "waiting")
    ]
    left = exp.except_(delivered, happened.where(_settles()), *held)
    query = exp.select("count(*) AS n").from_(left.subquery("missing"))
    return int(_row(client, query)["n"])


def _happened_to(group: str, *, since_ms: int) -> list[exp.Expression]:
    """That an event e is of this group, which may be the second one of its name, and recent."""
    ids = exp.select("group_id").from_("consumer_groups").where(_is_of(group))
    return [
        exp.column("group_id", "e").isin(query=ids),
        exp.column("topic_id", "e").isin(query=exp.select("topic_id").from_("topics")),
        exp.column("at_ms", "e") >= since_ms,
    ]


def _is_of(group: str) -> exp.Expression:
    return exp.column("consumer_group").eq(group)


def _settles() -> exp.Expression:
    return exp.column("kind", "e").isin("ack", "dead_letter")


def _rows(client: Client, query: exp.Expression) -> list[dict[str, Any]]:
    answer: pa.Table = client.sql(query.sql(_DIALECT))
    return cast(list[dict[str, Any]], answer.to_pylist())


def _row(client: Client, query: exp.Expression) -> dict[str, Any]:
    return _rows(client, query)[0]
