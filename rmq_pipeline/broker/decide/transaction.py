"""Requests that store half messages, check them, and end their transactions."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import schema, transaction
from rmq_pipeline.broker.decide.publish import Send, place
from rmq_pipeline.broker.decide.queues import Heads
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.halves import Halves, Rows
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import TopicNotFoundError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import HALF_TOPIC_ID

_TARGET: Final = schema.MESSAGE.get_field_index("target_topic_id")
Mask = npt.NDArray[np.bool_]
#: Delay of the next try for exhausted half messages that cannot be read.
_AGAIN_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class SendHalf(Request):
    """Request with checked half messages; ``send`` puts them into the half topic."""

    uses_reserve: ClassVar[bool] = False

    topic: str
    topic_id: int
    send: Send
    message_id_hash: Int64s
    producer_group: str
    immunity_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store them; the answer is their places and transaction ids, as schema.SENT_HALF."""
        if self.topic_id not in state.topics:
            raise TopicNotFoundError(f"There is no topic {self.topic}.")
        placed, sent = place(self.send, state, now_ms=now_ms, heads={})
        event = EventRows(
            kind=Kind.HALF,
            at_ms=now_ms,
            topic_id=HALF_TOPIC_ID,
            queue_id=0,
            queue_offset=sent.queue_offset,
            visible_at_ms=now_ms + self.immunity_ms,
            delivery=self.immunity_ms,
            message_group_hash=self.message_id_hash,
            client_id=self.producer_group,
        )
        return Decision(
            self._answer(sent),
            placed=[self._aimed(each) for each in placed],
            events=[event] if len(event) else [],
        )

    def _aimed(self, placed: Placed) -> Placed:
        """Return the rows with the topic they are sent to."""
        target = pa.array(np.full(placed.batch.num_rows, self.topic_id, dtype=np.int32))
        field = schema.MESSAGE.field(_TARGET)
        return replace(placed, batch=placed.batch.set_column(_TARGET, field, target))

    def _answer(self, sent: Sent) -> pa.Table:
        ids = transaction.encode(sent.queue_offset, self.message_id_hash)
        return sent.table().append_column("transaction_id", ids)


@dataclass(frozen=True, slots=True)
class FindHalves(Request):
    """Query for open half messages."""

    queue_offset: Int64s
    message_id_hash: Int64s
    #: Window of the run that asks; a fenced one is refused.
    window: tuple[str, int] | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (rows, mask of open ones, producer group masks) as the answer; store nothing."""
        state.fence(self.window)
        rows, still = state.halves.find(self.queue_offset, self.message_id_hash)
        return Decision((rows, still, producers(state.halves, rows)))


def producers(halves: Halves, rows: Rows) -> dict[str, Mask]:
    """Return the producer groups of these rows, each with the mask of its rows."""
    return {
        halves.producer(code): rows["producer"] == code
        for code in np.unique(rows["producer"]).tolist()
    }


@dataclass(frozen=True, slots=True)
class EndHalves(Request):
    """Request that ends open half messages and copies the committed ones, in one step."""

    rows: Rows
    committed: Mask
    #: Sends of the copies, one for each target topic.
    sends: tuple[Send, ...]
    window: tuple[str, int] | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store all or nothing; the answer is False if another request ended one meanwhile."""
        state.fence(self.window)
        # Use the current rows: after a rebuild other codes stand for producer groups.
        rows, still = state.halves.find(self.rows["queue_offset"], self.rows["message_id_hash"])
        if not still.all():
            return Decision(False)
        placed: list[Placed] = []
        heads: Heads = {}
        for send in self.sends:
            if send.topic_id in state.topics:  # else deleted: drop them
                placed.extend(place(send, state, now_ms=now_ms, heads=heads)[0])
        events = [
            *end_events(state, Kind.HALF_COMMITTED, rows=rows[self.committed], now_ms=now_ms),
            *end_events(state, Kind.HALF_ROLLED_BACK, rows=rows[~self.committed], now_ms=now_ms),
        ]
        return Decision(True, placed=placed, events=events)


def end_events(state: State, kind: Kind, *, rows: Rows, now_ms: int) -> list[EventRows]:
    """Build the events that end half messages, one for each producer group."""
    return [
        EventRows(
            kind=kind,
            at_ms=now_ms,
            topic_id=HALF_TOPIC_ID,
            queue_id=0,
            queue_offset=rows["queue_offset"][of_group],
            attempt=rows["checks"][of_group],
            message_group_hash=rows["message_id_hash"][of_group],
            client_id=name,
        )
        for name, of_group in producers(state.halves, rows).items()
    ]


class TargetsOf(Request):
    """Query for the topics of those transactions that are open."""

    def __init__(self, transactions: pa.Table) -> None:
        """Decode the ids of schema.CHECK_ID or schema.RESOLUTION.

        Raises:
            TableSchemaError: the column transaction_id is missing.
            TransactionNotFoundError: a value is not a transaction id.
        """
        names = transactions.column_names
        # The verb checks the other columns.
        ids = transactions.select([i for i, name in enumerate(names) if name == "transaction_id"])
        ids = columns_of(ids, schema.CHECK_ID)["transaction_id"]
        self._offsets, self._hashes = transaction.decode(ids)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the set of topic names as the answer; store nothing."""
        rows, _ = state.halves.find(self._offsets, self._hashes)
        topics = (state.topics.get(topic_id) for topic_id in set(rows["target_topic_id"].tolist()))
        return Decision({found.topic.name for found in topics if found})


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of one sweep."""

    #: Half messages to offer for a check, and the mask of each producer group.
    asked: Rows
    producers: dict[str, Mask]
    #: Half messages without a check left, and the mask of each producer group.
    exhausted: Rows
    exhausted_of: dict[str, Mask]
    #: Number rolled back because their topic was deleted.
    dropped: int
    next_due_ms: int | None
    #: Time of the sweep; and True if nothing more was due at that time.
    at_ms: int
    is_all: bool

    def __len__(self) -> int:
        return len(self.asked) + len(self.exhausted) + self.dropped


@dataclass(frozen=True, slots=True)
class Sweep(Request):
    """Request that counts the checks that are due.

    A check that still waits to be fetched is offered again but not counted, because its callers are
    merely busy. Its new time is stored all the same.
    """

    limit: int
    check_max: int
    interval_ms: int
    window: tuple[str, int] | None
    #: Offsets of the checks that still wait; some of them may be due.
    waiting: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Count the checks that are due; the answer is Swept."""
        state.fence(self.window)
        halves = state.halves
        rows = halves.due(now_ms, self.limit)
        there = np.isin(rows["target_topic_id"], list(state.topics))
        waits = np.isin(rows["queue_offset"], self.waiting)
        left = waits | (rows["checks"] < self.check_max)
        gone, exhausted, asked = rows[~there], rows[there & ~left], rows[there & left]
        asked["checks"] += ~waits[there & left]
        asked["due_ms"] = now_ms + self.interval_ms
        of_producer = producers(halves, asked)
        events = [
            _half_event(asked[mask], name, now_ms=now_ms) for name, mask in of_producer.items()
        ]
        events += end_events(state, Kind.HALF_ROLLED_BACK, rows=gone, now_ms=now_ms)
        answer = Swept(
            asked=asked,
            producers=of_producer,
            exhausted=exhausted,
            exhausted_of=producers(halves, exhausted),
            dropped=len(gone),
            next_due_ms=halves.next_due_ms(),
            at_ms=now_ms,
            is_all=len(rows) < self.limit,
        )
        return Decision(answer, events=events)


def _half_event(rows: Rows, producer_group: str, *, now_ms: int) -> EventRows:
    return EventRows(
        kind=Kind.HALF,
        at_ms=now_ms,
        topic_id=HALF_TOPIC_ID,
        queue_id=0,
        queue_offset=rows["queue_offset"],
        attempt=rows["checks"],
        visible_at_ms=rows["due_ms"],
        delivery=rows["immunity_ms"],
        message_group_hash=rows["message_id_hash"],
        client_id=producer_group,
    )


@dataclass(frozen=True, slots=True)
class GiveUp(Request):
    """Request that moves exhausted half messages to TRANS_CHECK_MAX_TIME_TOPIC, in one step."""

    rows: Rows
    copies: Send

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store all or nothing; the answer is the number stored, 0 if one was ended meanwhile."""
        # Use the current rows: after a rebuild other codes stand for producer groups.
        rows, still = state.halves.find(self.rows["queue_offset"], self.rows["message_id_hash"])
        if not still.all():
            return Decision(0)
        placed, _ = place(self.copies, state, now_ms=now_ms, heads={})
        events = end_events(state, Kind.HALF_GIVEN_UP, rows=rows, now_ms=now_ms)
        return Decision(len(self.rows), placed=placed, events=events)


@dataclass(frozen=True, slots=True)
class PutOff(Request):
    """Request that delays exhausted half messages that cannot be read; nothing is stored."""

    queue_offset: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the number of messages delayed for the first time as the answer."""

        def put_off(state: State) -> None:
            state.halves.put_off(self.queue_offset, until_ms=now_ms + _AGAIN_MS)

        return Decision(state.halves.not_put_off(self.queue_offset), unlogged=[put_off])
