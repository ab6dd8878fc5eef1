"""Display of a consumer group: settings, members, queues, statistics and filters."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rmq_pipeline.cli.output import show_fields, show_message, show_rows

#: Statistics that a member reports per topic, with their column titles.
_STATISTICS: Final = {
    "consume_rt_ms": "consume ms",
    "consume_ok_per_s": "ok/s",
    "consume_failed_per_s": "failed/s",
    "pull_rt_ms": "pull ms",
    "pulled_per_s": "pulled/s",
    "cached": "cached",
    "cached_bytes": "cached bytes",
}

#: Columns of a topic's lag.
_LAG: Final = ("topic", "lag", "matching_lag", "estimated", "filters", "oldest_unread_at_ms")

Row = dict[str, Any]


def show_group(group: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a consumer group: its settings, then tables of members, queues, filters and lag."""
    if as_json:
        show_fields(group, as_json=True)
        return
    aside = ("members", "locks", "filters", "mixed_filters", "lag")
    show_fields({name: value for name, value in group.items() if name not in aside}, as_json=False)
    members: Mapping[str, Any] = group.get("members", {})
    locks: list[Mapping[str, Any]] = group.get("locks", [])
    listings = {
        "Members": list(_members(members)),
        "Queues": _queues(members, locks),
        "Statistics": list(_statistics(members)),
        "Filters": list(_filters(group)),
        "Lag": [{name: row[name] for name in _LAG} for row in group.get("lag", [])],
    }
    for title, rows in listings.items():
        if rows or title == "Members":
            show_message(f"\n{title}")
            show_rows(rows, as_json=False, empty="The group has no members.")
    for topic, filters in _part(group, "mixed_filters").items():
        show_message(
            f"\nWARNING: topic {topic} is received with {len(filters)} filters: a message that one "
            "member filters out is lost for the others. Use one filter in all members, or one "
            "consumer group per filter."
        )


def _members(members: Mapping[str, Any]) -> Iterator[Row]:
    for client_id, member in members.items():
        details = _part(member, "details")
        yield {
            "client_id": client_id,
            "model": details.get("model"),
            "order": details.get("order"),
            "topics": member.get("topics"),
            "seen_at_ms": member.get("seen_at_ms"),
        }


def _queues(members: Mapping[str, Any], locks: list[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each queue that a member reports or that is locked."""
    rows: dict[tuple[str, int], Row] = {}
    for client_id, member in members.items():
        for topic, queue_ids in _part(_part(member, "details"), "queues").items():
            ids = queue_ids if isinstance(queue_ids, list) else []
            for queue_id in filter(lambda one: isinstance(one, int), ids):
                row = rows.setdefault((topic, queue_id), _queue(topic, queue_id))
                row["members"] = [*row["members"], client_id]
    for lock in locks:
        at = lock["topic"], lock["queue_id"]
        row = rows.setdefault(at, _queue(*at))
        row["locked_by"], row["expires_at_ms"] = lock["client_id"], lock["expires_at_ms"]
    return [rows[at] for at in sorted(rows)]


def _queue(topic: str, queue_id: int) -> Row:
    named = {"topic": topic, "queue_id": queue_id, "members": []}
    return {**named, "locked_by": None, "expires_at_ms": None}


def _statistics(members: Mapping[str, Any]) -> Iterator[Row]:
    for client_id, member in members.items():
        for topic, numbers in _part(_part(member, "details"), "statistics").items():
            said = numbers if isinstance(numbers, Mapping) else {}
            shown = {title: said.get(name) for name, title in _STATISTICS.items()}
            yield {"client_id": client_id, "topic": topic, **shown}


def _filters(group: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each filter; none for topics that are received without a filter."""
    for topic, filters in _part(group, "filters").items():
        for filter_, clients in filters.items():
            if set(filters) != {"*"}:
                yield {"topic": topic, "filter": filter_, "clients": clients}


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a nested mapping; empty if it is missing or malformed, as members report freely."""
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}
