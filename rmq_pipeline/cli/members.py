"""How the members of a consumer group are shown: who they are, what they have, how they fare."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rmq_pipeline.cli.output import show_fields, show_message, show_rows

#: What a member says of each topic, and how it is called in a narrow column.
_STATISTICS: Final = {
    "consume_rt_ms": "consume ms",
    "consume_ok_per_s": "ok/s",
    "consume_failed_per_s": "failed/s",
    "pull_rt_ms": "pull ms",
    "pulled_per_s": "pulled/s",
    "cached": "cached",
    "cached_bytes": "cached bytes",
}

Row = dict[str, Any]


def show_group(group: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a consumer group: its settings, then tables of its members and queues."""
    if as_json:
        show_fields(group, as_json=True)
        return
    aside = ("members", "locks")
    show_fields({name: value for name, value in group.items() if name not in aside}, as_json=False)
    members: Mapping[str, Any] = group.get("members", {})
    locks: list[Mapping[str, Any]] = group.get("locks", [])
    listings = {
        "Members": list(_members(members)),
        "Queues": _queues(members, locks),
        "Statistics": list(_statistics(members)),
    }
    for title, rows in listings.items():
        if rows or title == "Members":
            show_message(f"\n{title}")
            show_rows(rows, as_json=False, empty="Nobody is there.")


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
    """A row a queue that a member says it has, or that is locked."""
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


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in what a member has said; it may have said anything."""
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}
