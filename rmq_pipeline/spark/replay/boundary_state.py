"""Keyed state at the start of a range, and the messages to walk before and behind the range.

Each message group starts from the last state recorded before its first message of the range. The
messages between that state and the range are walked without effects. So are messages behind the
range, up to the next recorded state, which is compared with the replayed state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.group_walk import as_declared
from rmq_pipeline.spark.replay.topic_log import Segment, stored_at

#: Columns: the first and the last message of a message group.
FIRSTS_AND_LASTS: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("first_stored", pa.int64()),
        ("first_queue", pa.int32()),
        ("first", pa.int64()),
        ("last_stored", pa.int64()),
        ("last_queue", pa.int32()),
        ("last", pa.int64()),
    ]
)
_STORED_ORDER: Final = ["stored_at_ms", "queue_id", "queue_offset"]
#: Messages of a group to walk: those behind ``low``, up to ``high`` of its queue. For a group in
#: ``several`` queues: those behind ``low``, up to the last one in the range.
STRETCH: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("several", pa.bool_()),
        ("low_stored", pa.int64()),
        ("low_queue", pa.int32()),
        ("low", pa.int64()),
        ("high", pa.int64()),
        ("last_stored", pa.int64()),
        ("last_queue", pa.int32()),
        ("last", pa.int64()),
    ]
)


def firsts_and_lasts(messages: pa.Table) -> pa.Table:
    """Return PLACES of messages in stored order; messages without a message group are ignored."""
    messages = messages.filter(pc.is_valid(messages["message_group"]))
    wanted = [(name, end) for end in ("first", "last") for name in _STORED_ORDER]
    found = messages.group_by("message_group", use_threads=False).aggregate(wanted)
    names = [f"{name}_{end}" for name, end in wanted]
    return (
        found.select(["message_group", *names])
        .rename_columns(FIRSTS_AND_LASTS.names)
        .cast(FIRSTS_AND_LASTS)
    )


def merge_firsts_and_lasts(tables: list[pa.Table]) -> pa.Table:
    """Merge PLACES of several parts, which may have groups in common."""
    found = pa.concat_tables([FIRSTS_AND_LASTS.empty_table(), *tables])
    ends = [
        found.select(["message_group", *names]).rename_columns(["message_group", *_STORED_ORDER])
        for names in (FIRSTS_AND_LASTS.names[1:4], FIRSTS_AND_LASTS.names[4:])
    ]
    return firsts_and_lasts(
        pa.concat_tables(ends).sort_by([(n, "ascending") for n in _STORED_ORDER])
    )


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """Recorded states and stretches of the message groups in a range."""

    #: STRETCH.
    stretches: pa.Table
    #: ``message_group`` and the state's columns.
    before: pa.Table
    after: pa.Table
    #: Message groups without a state recorded before the range.
    new: pa.Array

    def unknown(self, kept: Mapping[int, int]) -> int:
        """Return the number of message groups whose earlier messages may have expired.

        Args:
            kept: queue_id -> the first offset that the topic retains.
        """
        mine = self.stretches.filter(pc.is_in(self.stretches["message_group"], self.new))
        return sum(bool(kept.get(queue, 0)) for queue in mine["low_queue"].to_pylist())

    def reads(self, segment: Segment) -> bool:
        """Return True if a segment may contain messages to walk."""
        if pc.any(self.stretches["several"]).as_py():
            return True
        mine = self.stretches.filter(pc.equal(self.stretches["low_queue"], segment.queue_id))
        if not mine.num_rows:
            return False
        low, high = pc.min(mine["low"]).as_py(), pc.max(mine["high"]).as_py()
        return bool(segment.end > low + 1 and segment.base <= high)


def find_boundary_state(
    client: Client, places: pa.Table, *, group: str, topic: str, state: pa.Schema
) -> BoundaryState:
    """Find the states before and after the messages of a range.

    Args:
        client: client of the broker.
        places: FIRSTS_AND_LASTS of the settled messages in the range.
        group: the consumer group.
        topic: topic of the messages.
        state: the consumer's columns.
    """
    history = client.keyed_state_history(
        group,
        topic,
        places=pa.table(
            {
                "message_group": places["message_group"],
                "queue_id": places["first_queue"],
                "queue_offset": places["first"],
                "stored_at_ms": places["first_stored"],
                "last_queue_id": places["last_queue"],
                "last_queue_offset": places["last"],
            }
        ),
    )
    moments = {
        name: history.filter(pc.equal(history["moment"], name))
        for name in ("before", "after", "begins")
    }
    return BoundaryState(
        stretches=_stretches(client, places, moments=moments, topic=topic),
        before=_states(moments["before"], state),
        after=_states(moments["after"], state),
        new=pc.unique(moments["begins"]["message_group"]),
    )


def _stretches(
    client: Client, places: pa.Table, *, moments: dict[str, pa.Table], topic: str
) -> pa.Table:
    by_group: dict[str, dict[str, dict[str, Any]]] = {}
    for name, table in moments.items():
        facts = table.select(["message_group", "queue_id", "queue_offset"]).to_pylist()
        for row in facts:
            by_group.setdefault(row["message_group"], {})[name] = row
    rows = [
        _stretch(place, by_group.get(place["message_group"], {})) for place in places.to_pylist()
    ]
    moved = [row for row in rows if row["several"] and row["low"] >= 0]
    found = stored_at(client, topic, places=[(row["low_queue"], row["low"]) for row in moved])
    for row, stored_ms in zip(moved, found, strict=True):
        row["low_stored"] = -1 if stored_ms is None else stored_ms
    return pa.Table.from_pylist(rows, schema=STRETCH)


def _stretch(place: dict[str, Any], moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    queue = place["last_queue"]
    before, after = moments.get("before"), moments.get("after")
    begins = moments.get("begins") or {"queue_id": queue, "queue_offset": place["first"]}
    start = before or begins
    low = start["queue_offset"] if before else start["queue_offset"] - 1
    several = place["first_queue"] != queue or start["queue_id"] != queue
    high = place["last"]
    if after is not None and after["queue_id"] == queue:
        high = max(high, after["queue_offset"])
    return {
        "message_group": place["message_group"],
        "several": several,
        "low_stored": -1,
        "low_queue": queue if start["queue_id"] is None else start["queue_id"],
        "low": low if before or not several else -1,
        "high": high,
        "last_stored": place["last_stored"],
        "last_queue": queue,
        "last": place["last"],
    }


def _states(rows: pa.Table, state: pa.Schema) -> pa.Table:
    """Return the states that were not removed, in the consumer's columns."""
    return as_declared(rows.filter(pc.invert(rows["removed"])), state)
