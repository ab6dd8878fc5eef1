"""Event kinds, their meaning, and the columns of schema.EVENT that they fill.

A consumption event names one (group_id, topic_id, queue_id, queue_offset) and holds the whole new
state of that row. The last event of a key is therefore its state, and replay computes nothing.
``attempt`` is the number of counted deliveries so far. Unused numbers are 0 or -1, unused texts
null.

Two columns of stored events have another value in some kinds. A column for each would add 6 to 11 %
to the bytes of every event (docs/decisions/0103). Only EventRows and the macros at the beginning of
sql/history.sql translate ``epoch``; all other code has these values under their names.

    column       kinds                       value
    epoch        consumption, if below 0     attempt_id_hash, negated
    epoch        QUEUE_LOCKED                locked_at_ms
    client_id    HALF and its ends           producer_group
    client_id    WINDOW, WINDOW_CLOSED       window_owner
    client_id    REDRIVEN                    redrive_id
    client_id    SINK_REPLACED               replacement_id
"""

from enum import IntEnum


class Kind(IntEnum):
    """Kind of an event."""

    #: Delivered: attempt, visible_at_ms (end of lease), delivery, epoch of the window,
    #: message_group_hash, client_id. Moves the cursor past queue_offset. attempt_id_hash: that of
    #: the receive that leased the message, in a group of order queue.
    LEASE = 1
    #: Settled; the row is deleted.
    ACK = 2
    #: Failed: visible again at visible_at_ms, the attempt counts; detail is the failure
    #: (failure.py).
    RETRY = 3
    #: Released without failure: visible at visible_at_ms, the attempt does not count.
    RELEASE = 4
    #: The revive job found the lease expired: visible at visible_at_ms, the attempt counts.
    EXPIRE = 5
    #: Copied to the dead letter topic; the row is deleted. detail is the failure.
    DEAD_LETTER = 6
    #: A lease got another end and delivery number, or another attempt.
    INVISIBLE = 7
    #: Attempts are exhausted in a group that parks: the message and its successors in order are
    #: held until an operator unparks it. attempt, message_group_hash; detail is the failure.
    PARK = 8
    #: Acked in a group of order queue before an earlier message is settled: attempt,
    #: message_group_hash. ACK follows when the earlier message is settled; otherwise both are
    #: redelivered.
    ACK_AHEAD = 9

    #: Progress of (group_id, topic_id, queue_id): all messages before queue_offset were examined.
    CURSOR = 10
    #: Order by message group: the group message_group_hash has messages waiting behind the cursor,
    #: the first at or after queue_offset.
    BEHIND = 11
    #: The message group has no messages behind the cursor any more.
    CAUGHT_UP = 12
    #: Reset of (group_id, topic_id, queue_id) to queue_offset: its leases and waiting message
    #: groups are deleted. delivery -1: a consumer that stores its own offsets moved back itself.
    RESET = 13
    #: The message group message_group_hash is quarantined from queue_offset on: all of its
    #: messages, later ones included, are dead-lettered. detail is the failure.
    QUARANTINE = 14
    #: The quarantine of the message group was lifted.
    LIFT = 15
    #: Same as CURSOR, from a consumer that stores its own offsets: it has processed all messages
    #: before queue_offset.
    OFFSET_UPDATED = 16
    #: client_id holds the lock of (group_id, topic_id, queue_id) until visible_at_ms; locked_at_ms:
    #: the time since when it has held it without interruption.
    QUEUE_LOCKED = 17
    #: No client holds the lock; client_id is the previous holder.
    QUEUE_UNLOCKED = 18

    #: A topic was created, altered or deleted: topic_id, detail is its JSON.
    TOPIC = 20
    TOPIC_DELETED = 21
    #: A consumer group was created, altered or deleted: group_id, detail is its JSON.
    GROUP = 22
    GROUP_DELETED = 23
    #: All lite topics that a client has subscribed to: group_id, topic_id, client_id; detail is a
    #: JSON list, empty when the client has none.
    LITE_SUBSCRIPTION = 24

    #: A row of SCHEDULE_TOPIC_XXXX (topic_id, queue_id, queue_offset) was delivered to its target;
    #: visible_at_ms is its due time, at_ms its delivery time.
    SCHEDULE_DELIVERED = 30
    #: Same as SCHEDULE_DELIVERED, but the target topic no longer exists: the message was dropped.
    SCHEDULE_DROPPED = 31
    #: Same as SCHEDULE_DELIVERED, but the producer recalled the message.
    SCHEDULE_RECALLED = 32

    #: State of an open half message (topic_id and queue_offset of the half topic): attempt is the
    #: number of checks so far, visible_at_ms the next check, delivery its immunity in ms,
    #: message_group_hash the hash of its message id; producer_group.
    HALF = 35
    #: The copy of the half message was delivered. This kind and the next two delete the row.
    HALF_COMMITTED = 36
    HALF_ROLLED_BACK = 37
    #: Unresolved after the last check: copied to TRANS_CHECK_MAX_TIME_TOPIC.
    HALF_GIVEN_UP = 38

    #: A window was opened or renewed: epoch, visible_at_ms (end of its lease), window_owner;
    #: detail is its name.
    WINDOW = 40
    WINDOW_CLOSED = 41
    #: A settle of a window took effect: group_id, epoch; detail is JSON: window, settle_id, answer.
    SETTLED = 42
    #: A sink file was added: group_id, epoch, delivery is the sink's version with it, detail is
    #: JSON: path rows bytes partition offsets.
    SINK_FILE = 43
    #: The effect of a message took place: group_id, detail is its idempotency key.
    EFFECT = 44
    #: A redrive returned a dead letter (topic_id, queue_id, queue_offset of the dead letter topic)
    #: to its group: group_id, redrive_id; detail is JSON: its origin.
    REDRIVEN = 45
    #: Sink files replaced others: group_id, delivery is the sink's version with them,
    #: replacement_id; detail is JSON: reason, added (as SINK_FILE), removed (paths).
    SINK_REPLACED = 46

    #: A segment was registered: topic_id, queue_id, queue_offset (base), visible_at_ms unused,
    #: detail is JSON: path, base, end, rows, bytes.
    SEGMENT = 50
    #: Event Parquet was registered: detail is JSON: path, from_position, to_position, rows.
    EVENT_SEGMENT = 51
    #: A segment replaced others: topic_id, queue_id, queue_offset (base), detail is JSON: path,
    #: base, end, rows, bytes, removed (paths of the same offsets).
    SEGMENTS_REPLACED = 52
    #: The messages of a queue before queue_offset were deleted: topic_id, queue_id; detail is JSON:
    #: segments, rows, bytes. Earlier cursors and backlogs get events of their own.
    EXPIRED = 53
    #: A snapshot of the state was registered: detail is JSON: path, position, taken_at_ms, rows,
    #: bytes. Or history before a position was discarded: detail is JSON: kept_from.
    SNAPSHOT = 54
    #: Event Parquet was removed: detail is JSON: removed (paths), and if another file contains its
    #: events: path, from_position, to_position, rows.
    EVENT_SEGMENTS_REPLACED = 55
    #: The broker did overdue background work itself: detail is JSON: job, overdue_ms, report.
    UPKEEP_FALLBACK = 60


class Delivery(IntEnum):
    """Values of ``delivery``, in events and store.leases, that are not the number of a receipt."""

    #: Waits to be delivered again.
    WAITING = 0
    #: The attempts are exhausted: waits to be dead-lettered.
    EXHAUSTED = -1
    #: Failed permanently, and is held until an operator unparks it.
    PARKED = -2
    #: Held behind a parked message of its order.
    HELD = -3
    #: Acked in a group of order queue before an earlier message was settled.
    ACKED_AHEAD = -4


#: Kinds whose last event is the state of a consumption row.
CONSUMPTION = frozenset(range(Kind.LEASE, Kind.ACK_AHEAD + 1))
REMOVES_ROW = frozenset({Kind.ACK, Kind.DEAD_LETTER})
