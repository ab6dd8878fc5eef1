"""Redelivery of messages that failed permanently: redrive of dead letters, and unpark.

A redrive delivers the original of a dead letter again, to its consumer group only. Unpark retries
or skips parked messages, and delivers the messages behind them.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import AHEAD, EXHAUSTED, FAR, HELD, PARKED, WAITING
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind

REDRIVEN, ALREADY, GONE = 0, 1, 2

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of dead letters, one row each; ``topic_id`` is 0 if the message is gone."""

    #: Place of the dead letter.
    dead_queue_id: Int32s
    dead_offset: Int64s
    topic_id: Int32s
    queue_id: Int32s
    queue_offset: Int64s
    message_group_hash: Int64s
    #: Names for the manifest.
    topic: list[str | None]
    message_id: list[str | None]

    def __len__(self) -> int:
        return len(self.dead_offset)


@dataclass(frozen=True, slots=True)
class Redrive(Request):
    """Request for a redrive of messages in one frame; the answer is a code for each row."""

    group: str
    redrive_id: str
    origins: Origins

    def decide(self, state: State, now_ms: int) -> Decision:
        """Redrive each message once; skip a message that the group receives anyway."""
        group = state.group(self.group)
        these = self.origins
        codes = self._codes(state, group.dead_letter_topic_id)
        decision = Decision(codes)
        noted = np.flatnonzero(codes != ALREADY)
        for queue_id in np.unique(these.dead_queue_id[noted]).tolist():
            rows = noted[these.dead_queue_id[noted] == queue_id]
            decision.events.append(
                EventRows(
                    kind=Kind.REDRIVEN,
                    at_ms=now_ms,
                    group_id=group.group_id,
                    topic_id=group.dead_letter_topic_id,
                    queue_id=queue_id,
                    queue_offset=these.dead_offset[rows],
                    client_id=self.redrive_id,
                    detail=[self._detail(row, int(codes[row])) for row in rows.tolist()],
                )
            )
        opened = np.flatnonzero(codes == REDRIVEN)
        places = set(zip(these.topic_id[opened], these.queue_id[opened], strict=True))
        for topic_id, queue_id in sorted(places):
            of_queue = (these.topic_id[opened] == topic_id) & (these.queue_id[opened] == queue_id)
            key = QueueKey(group.group_id, int(topic_id), int(queue_id))
            decision.events.extend(self._reopened(state, key, rows=opened[of_queue], now_ms=now_ms))
        return decision

    def _codes(self, state: State, dead_topic_id: int) -> npt.NDArray[np.int8]:
        these = self.origins
        codes = np.zeros(len(these), dtype=np.int8)
        for row, topic_id in enumerate(these.topic_id.tolist()):
            topic = state.topics.get(topic_id)
            queue_id = int(these.queue_id[row])
            if (
                topic is None
                or queue_id >= len(topic.queues)
                or these.queue_offset[row] < topic.queues[queue_id].min_offset
            ):
                codes[row] = GONE
        for queue_id in np.unique(these.dead_queue_id).tolist():
            rows = np.flatnonzero(these.dead_queue_id == queue_id)
            offsets = these.dead_offset[rows]
            codes[rows[state.redriven.has(dead_topic_id, queue_id, offsets=offsets)]] = ALREADY
            _, firsts = np.unique(offsets, return_index=True)
            codes[np.delete(rows, firsts)] = ALREADY
        return codes

    def _detail(self, row: int, code: int) -> str:
        these = self.origins
        return json.dumps(
            {
                "topic": these.topic[row],
                "topic_id": int(these.topic_id[row]),
                "queue_id": int(these.queue_id[row]),
                "queue_offset": int(these.queue_offset[row]),
                "message_id": these.message_id[row],
                "outcome": "gone" if code == GONE else "waiting",
            }
        )

    def _reopened(
        self, state: State, key: QueueKey, *, rows: npt.NDArray[np.intp], now_ms: int
    ) -> list[EventRows]:
        consumption = state.consumptions.get(key)
        if consumption is None:
            return []  # the group has read nothing here: it will receive all of the queue
        offsets, firsts = np.unique(self.origins.queue_offset[rows], return_index=True)
        groups = self.origins.message_group_hash[rows][firsts]
        wanted = ~_comes_anyway(consumption, offsets, groups=groups)
        if not wanted.any():
            return []
        offsets, groups = offsets[wanted], groups[wanted]
        held = consumption.behind_parked(offsets, groups=groups)
        return [
            EventRows(
                kind=Kind.RELEASE,
                at_ms=now_ms,
                **key._asdict(),
                queue_offset=offsets,
                attempt=0,
                visible_at_ms=np.where(held, FAR, now_ms),
                delivery=np.where(held, HELD, WAITING),
                message_group_hash=groups,
            )
        ]


def _comes_anyway(consumption: Consumption, offsets: Int64s, *, groups: Int64s) -> Flags:
    """Mark unsettled or unread messages: there are some only after a reset to an earlier offset."""
    leases = consumption.leases
    rows = leases.find(offsets)
    unsettled = rows >= 0
    unsettled[unsettled] = leases.delivery[rows[unsettled]] != AHEAD
    anyway = (offsets >= consumption.cursor) | unsettled
    for row, group in enumerate(groups.tolist()) if consumption.backlog else ():
        entry = consumption.backlog.get(group)
        if entry is not None:
            first = entry.known[0] if entry.known else entry.more_from
            anyway[row] |= first is not None and bool(offsets[row] >= first)
    return anyway


@dataclass(slots=True)
class Unparked:
    """Answer of unpark: messages retried and skipped, and quarantines lifted."""

    unparked: int = 0
    skipped: int = 0
    lifted: int = 0
    #: Queues with messages that must now be copied to the dead letters.
    exhausted: list[QueueKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Unpark(Request):
    """Request that retries or skips parked messages and lifts quarantines."""

    group: str
    topic: str | None
    #: Hashes of the message groups; None: all, and messages without a group.
    message_groups: Int64s | None
    skip: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Reset the attempts of parked messages; release the held messages behind them."""
        group_id = state.group(self.group).group_id
        topic_id = None if self.topic is None else state.topic(self.topic).topic.topic_id
        decision = Decision(Unparked())
        for key, consumption in state.consumptions.items():
            if key[0] == group_id and topic_id in (None, key[1]):
                queue = QueueKey._make(key)
                events = self._of_queue(consumption, decision.answer, key=queue, now_ms=now_ms)
                decision.events.extend(queue.events(events, now_ms))
        return decision

    def _of_queue(
        self, consumption: Consumption, answer: Unparked, *, key: QueueKey, now_ms: int
    ) -> list[EventRows]:
        leases = consumption.leases
        rows = leases.parked()
        rows = rows[self._meant(leases.group[rows])]
        failed = rows[leases.delivery[rows] == PARKED]
        events = []
        for chosen, kind, delivery in (
            (failed, *((Kind.EXPIRE, EXHAUSTED) if self.skip else (Kind.RELEASE, WAITING))),
            (rows[leases.delivery[rows] == HELD], Kind.RELEASE, WAITING),
        ):
            if len(chosen):
                again = chosen is failed and not self.skip
                event = EventRows(
                    kind=kind,
                    at_ms=now_ms,
                    queue_offset=leases.offset[chosen],
                    attempt=0 if again else leases.attempt[chosen],
                    visible_at_ms=now_ms,
                    delivery=delivery,
                    message_group_hash=leases.group[chosen],
                )
                events.append(event)
        if self.skip:
            answer.skipped += len(failed)
            answer.exhausted.extend([key] if len(failed) else [])
        else:
            answer.unparked += len(failed)
        lifted = self._lifted(consumption)
        answer.lifted += len(lifted)
        if len(lifted):
            nowhere = np.full(len(lifted), -1, dtype=np.int64)
            events.append(
                EventRows(
                    kind=Kind.LIFT,
                    at_ms=now_ms,
                    queue_offset=nowhere,
                    message_group_hash=lifted,
                )
            )
        return events

    def _meant(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        if self.message_groups is None:
            return np.ones(len(groups), dtype=np.bool_)
        return np.isin(groups, self.message_groups)

    def _lifted(self, consumption: Consumption) -> Int64s:
        quarantined = np.fromiter(consumption.quarantined, np.int64, len(consumption.quarantined))
        return quarantined[self._meant(quarantined)]
