"""Queries of checks and sensors on the broker's documented views, built with sqlglot.

Import this module where it is used: sqlglot takes 0.3 s, which would delay every window.
"""

from typing import Any, cast

import pyarrow as pa
from sqlglot import exp

from rmq_pipeline.flight.client import Client

_DIALECT = "duckdb"
_NOT_REDRIVEN = "redriven_at_ms IS NULL"
_ACKED = "e.kind IN ('ack', 'ack_ahead')"
#: Failed deliveries. Dead-lettering begins with a retry of delivery -1. Without an error the
#: consumer requested it.
_FAILED = (
    "e.kind IN ('expire', 'park')"
    " OR (e.kind = 'retry' AND (e.delivery = 0 OR contains(e.detail, '\"error_type\"')))"
)


def lag_by_group(client: Client, topic: str) -> dict[str, int]:
    """Return the number of unsettled messages of a topic, for every group that reads it."""
    query = exp.select("consumer_group", "sum(lag)::BIGINT AS lag").from_("lag")
    rows = _rows(client, query.where(exp.column("topic").eq(topic)).group_by("consumer_group"))
    return {row["consumer_group"]: int(row["lag"]) for row in rows}


def held_by_windows(client: Client, group: str) -> int:
    """Return the number of messages in flight that were delivered to a window of the group."""
    query = exp.select("count(*) AS n").from_("in_flight").where(_is_of(group), "epoch > 0")
    return int(_row(client, query)["n"])


def due_checks(client: Client, *, now_ms: int, ahead_ms: int, settled_ms: int) -> dict[str, int]:
    """Return the number of half messages by topic whose check is due, or will be soon.

    Args:
        client: client of the broker.
        now_ms: the broker's time.
        ahead_ms: soon is within this time, for half messages older than ``settled_ms``.
        settled_ms: most transactions end within this time.
    """
    due = exp.column("next_check_ms")
    stored = exp.func("coalesce", exp.column("stored_at_ms"), exp.Literal.number(0))
    soon = exp.and_(due <= now_ms + ahead_ms, stored <= now_ms - settled_ms)
    query = exp.select("topic", "count(*) AS n").from_("half").where(exp.or_(due <= now_ms, soon))
    return {row["topic"]: int(row["n"]) for row in _rows(client, query.group_by("topic"))}


def dead_letters(client: Client) -> dict[str, int]:
    """Return the number of dead letters by group."""
    query = exp.select("consumer_group", "count(*) AS n").from_("dead_letters")
    rows = _rows(client, query.group_by("consumer_group"))
    return {row["consumer_group"]: row["n"] for row in rows}


def dead_letters_left(client: Client, group: str) -> int:
    """Return a group's number of dead letters without a redrive; a new failure is a new one."""
    query = exp.select("count(*) AS n").from_("dead_letters").where(_is_of(group), _NOT_REDRIVEN)
    return int(_row(client, query)["n"])


def dead_letter_reasons(client: Client, group: str, *, limit: int = 10) -> list[dict[str, Any]]:
    """Return the most frequent reasons of a group's dead letters without a redrive: reason, n."""
    query = exp.select("reason", "count(*) AS n").from_("dead_letters")
    query = query.where(_is_of(group), _NOT_REDRIVEN)
    return _rows(client, query.group_by("reason").order_by("n DESC", "reason").limit(limit))


def sink_rows(client: Client, group: str) -> int:
    """Return the number of rows of a group's sink."""
    query = exp.select("sum(rows)::BIGINT AS n").from_("sink_files").where(_is_of(group))
    return int(_row(client, query)["n"] or 0)


def sink_hours(client: Client, group: str, *, limit: int) -> list[dict[str, Any]]:
    """Return the newest hours of a group's sink: partition, rows, files, bytes."""
    sums = ("sum(rows)::BIGINT AS rows", "count(*) AS files", "sum(bytes)::BIGINT AS bytes")
    query = exp.select(exp.column("partition", quoted=True), *sums).from_("sink_files")
    query = query.where(_is_of(group)).group_by(exp.column("partition", quoted=True))
    newest = exp.Ordered(this=exp.column("partition", quoted=True), desc=True)
    return _rows(client, query.order_by(newest).limit(limit))


def changed_sink_hours(client: Client, group: str, *, after: int) -> list[dict[str, Any]]:
    """Return the hours of a group's sink with files of a version after ``after``, in version order.

    If the sink has no such version, for example because it belongs to another home, all hours are
    returned.

    Returns:
        partition, rows, files, bytes, newest: the version of the newest file.
    """
    version = exp.func("max", exp.column("version"))
    last = exp.select(version.as_("newest")).from_("sink_files").where(_is_of(group))
    if after > int(_row(client, last)["newest"] or 0):
        after = 0
    sums = ("sum(rows)::BIGINT AS rows", "count(*) AS files", "sum(bytes)::BIGINT AS bytes")
    hour = exp.column("partition", quoted=True)
    query = exp.select(hour, *sums, version.as_("newest")).from_("sink_files")
    query = query.where(_is_of(group)).group_by(hour).having(version > after)
    return _rows(client, query.order_by("newest", hour))


def parked(client: Client, group: str) -> list[dict[str, Any]]:
    """Return the parked messages of a group, oldest first: rows of the view."""
    query = exp.select("*").from_("parked").where(_is_of(group))
    return _rows(client, query.order_by("parked_at_ms", "topic", "queue_id", "queue_offset"))


def fallbacks(client: Client, job: str, *, since_ms: int) -> list[dict[str, Any]]:
    """Return when the broker did overdue work of a job itself: at_ms, detail; newest first."""
    query = (
        exp.select("at_ms", "detail")
        .from_("events")
        .where(exp.column("kind").eq("upkeep_fallback"))
        .where(exp.column("at_ms") >= since_ms)
        .where(exp.func("contains", exp.column("detail"), exp.Literal.string(f'"{job}"')))
    )
    return _rows(client, query.order_by("at_ms DESC").limit(100))


def endings(client: Client, group: str, *, since_ms: int, position: int) -> dict[str, Any]:
    """Return how deliveries of a group ended after a position of the log.

    Returns:
        created_at_ms: of the group; a new group of the same name has another history.
        position: position of the last ending; None if there was none.
        acked_position, acked_at_ms: position and time of the last acknowledgement.
        failures: number of failed deliveries, including those before it.
    """
    created = exp.select("max(created_at_ms)").from_("consumer_groups").where(_is_of(group))
    query = (
        exp.select(
            exp.alias_(created.subquery(), "created_at_ms"),
            "max(e.position) AS position",
            f"max(e.position) FILTER (WHERE {_ACKED}) AS acked_position",
            f"max(e.at_ms) FILTER (WHERE {_ACKED}) AS acked_at_ms",
            f"count(*) FILTER (WHERE {_FAILED}) AS failures",
        )
        .from_("events AS e")
        .where(*_happened_to(group, since_ms=since_ms), f"({_ACKED}) OR ({_FAILED})")
        .where(exp.column("position", "e") > position)
    )
    return _row(client, query)


def failures(client: Client, group: str, *, since_ms: int, position: int) -> dict[str, Any]:
    """Return failed deliveries after a position of the log: n, and at_ms and detail of the last."""
    query = (
        exp.select("count(*) AS n", "max(e.at_ms) AS at_ms", "arg_max(e.detail, e.at_ms) AS detail")
        .from_("events AS e")
        .where(*_happened_to(group, since_ms=since_ms), _FAILED)
        .where(exp.column("position", "e") > position)
    )
    return _row(client, query)


def order_violations(client: Client, group: str, *, since_ms: int = 0) -> int:
    """Return the number of messages settled before an earlier one of their message group.

    Only events since ``since_ms`` count, as far as history is retained. A dead letter counts as
    settled; its later redrive is no violation.
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
    """Return the number of messages delivered to a group that are neither settled nor pending.

    Only deliveries since ``since_ms`` and after the last reset of an offset count, as far as
    history is retained.
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
    """Return conditions: event e belongs to the present group of this name, and is recent."""
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
