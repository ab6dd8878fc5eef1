"""Copying exhausted and rejected messages to %DLQ%group."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.publish import Send, place, subset
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import EXHAUSTED
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import contiguous


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Messages of one queue that must be copied to the group's dead letters."""

    key: QueueKey
    queue_offset: Int64s
    attempt: Int32s
    position: Int64s
    row: Int32s
    #: JSON of the last failure; empty if the consumer reported none.
    failures: list[str]

    def __len__(self) -> int:
        return len(self.queue_offset)

    def take(self, rows: slice) -> "Exhausted":
        """Return the messages of these rows."""
        return Exhausted(
            self.key,
            self.queue_offset[rows],
            self.attempt[rows],
            self.position[rows],
            self.row[rows],
            self.failures[rows],
        )


@dataclass(frozen=True, slots=True)
class FindExhausted(Request):
    """Query for messages to dead-letter, in all queues or in the given ones."""

    keys: tuple[QueueKey, ...] | None
    limit: int
    #: Offsets to skip.
    but: Mapping[QueueKey, Int64s] = field(default_factory=dict)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return a list of Exhausted as the answer; store nothing."""
        found = []
        keys = (
            self.keys if self.keys is not None else tuple(map(QueueKey._make, state.consumptions))
        )
        left = self.limit
        for key in keys:
            consumption = state.consumptions.get(key)
            topic = state.topics.get(key.topic_id)
            if consumption is None or topic is None or not len(consumption.leases) or left <= 0:
                continue
            leases = consumption.leases
            rows = leases.exhausted()
            if key in self.but:
                rows = rows[~np.isin(leases.offset[rows], self.but[key])]
            rows = rows[:left]
            if len(rows):
                left -= len(rows)
                offsets = leases.offset[rows]
                position, row = topic.queues[key.queue_id].index.locate(offsets)
                said = [consumption.failures.get(offset, "") for offset in offsets.tolist()]
                found.append(Exhausted(key, offsets, leases.attempt[rows], position, row, said))
        return Decision(found)


def copy_columns(messages: pa.Table, exhausted: Exhausted, *, topic: str) -> dict[str, pa.Array]:
    """Build the columns of a send of the copies. Properties name the origin and the failure."""
    n = len(exhausted)
    columns = {
        name: contiguous(messages.column(name))
        for name in ("message_id", "tag", "keys", "message_group", "body", "born_at_ms")
    }
    explained = {text: _explained(text) for text in set(exhausted.failures)}
    added = [
        {
            "DLQ_ORIGIN_TOPIC": topic,
            "DLQ_ORIGIN_MESSAGE_ID": message_id,
            "DLQ_ORIGIN_QUEUE_ID": str(exhausted.key.queue_id),
            "DLQ_ORIGIN_QUEUE_OFFSET": str(offset),
            "DLQ_ATTEMPTS": str(attempt),
            **explained[failure],
        }
        for message_id, offset, attempt, failure in zip(
            columns["message_id"].to_pylist(),
            exhausted.queue_offset.tolist(),
            exhausted.attempt.tolist(),
            exhausted.failures,
            strict=True,
        )
    ]
    properties = [
        [*(dict(own or ()) | extra).items()]
        for own, extra in zip(messages.column("properties").to_pylist(), added, strict=True)
    ]
    columns["properties"] = pa.array(properties, schema.PROPERTIES)
    columns["delay_level"] = pa.nulls(n, pa.int32())
    columns["deliver_at_ms"] = pa.nulls(n, pa.int64())
    return columns


def _explained(text: str) -> dict[str, str]:
    """Return the properties that state the failure; without a report, that no attempt is left."""
    failure = Failure.from_json(text) if text else Failure.unsaid()
    said = {
        "DLQ_REASON": failure.reason,
        "DLQ_ERROR_TYPE": failure.error_type,
        "DLQ_SIGNATURE": failure.signature,
        "DLQ_RUN_ID": failure.run_id,
    }
    return {name: value for name, value in said.items() if value}


@dataclass(frozen=True, slots=True)
class StoreDeadLetters(Request):
    """Request that copies marked messages and settle the originals, in one step."""

    exhausted: Exhausted
    copies: Send

    def decide(self, state: State, now_ms: int) -> Decision:
        """Copy the messages that are still marked; the answer is their number."""
        key = self.exhausted.key
        consumption = state.consumptions.get(key)
        if consumption is None:
            return Decision(0)
        leases = consumption.leases
        rows = leases.find(self.exhausted.queue_offset)
        still = rows >= 0
        still[still] = leases.delivery[rows[still]] == EXHAUSTED
        if not still.any():
            return Decision(0)
        copies = self.copies if still.all() else subset(self.copies, np.flatnonzero(still))
        placed, _ = place(copies, state, now_ms=now_ms, heads={})
        rows = rows[still]
        event = EventRows(
            kind=Kind.DEAD_LETTER,
            at_ms=now_ms,
            **key._asdict(),
            queue_offset=leases.offset[rows],
            attempt=leases.attempt[rows],
            message_group_hash=leases.group[rows],
            detail=[consumption.failures.get(offset) for offset in leases.offset[rows].tolist()],
        )
        after = consumption.acks(rows[:0], settled=rows, now_ms=now_ms)
        events = [event, *key.events(after, now_ms)]
        return Decision(len(rows), placed=placed, events=events)
