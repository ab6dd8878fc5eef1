"""Event kinds: what each says, and which columns of schema.EVENT it fills.

A consumption event names one (group_id, topic_id, queue_id, queue_offset) and holds the whole new
state of that row, so that the last event of a key is its state: nothing is computed on replay.
``attempt`` is the number of deliveries that count so far. Unused numbers are 0 or -1, texts null.
"""

from enum import IntEnum


class Kind(IntEnum):
    """What happened."""

    #: Delivered: attempt, visible_at_ms (end of lease), delivery, epoch, message_group_hash,
    #: client_id. Moves the cursor past queue_offset. epoch below 0: the attempt of the receive
    #: that it was given to, in a group of order queue.
    LEASE = 1
    #: Settled; the row goes.
    ACK = 2
    #: Failed: visible again at visible_at_ms, the attempt counted; detail is the
    #: failure (failure.py).
    RETRY = 3
    #: Given back without a fault of its own: visible at visible_at_ms, the attempt not counted.
    RELEASE = 4
    #: The revive job saw that the lease had ended: visible at visible_at_ms, the attempt counted.
    EXPIRE = 5
    #: Copied to the dead letter topic; the row goes. detail is the failure.
    DEAD_LETTER = 6
    #: A lease got another end and another delivery number; or another attempt.
    INVISIBLE = 7
    #: Failed for good in a group that parks: held, with what follows it in order, until somebody
    #: unparks it. attempt, message_group_hash; detail is the failure.
    PARK = 8
    #: Acked in a group of order queue while a message before it is not: attempt,
    #: message_group_hash. ACK follows when that one is settled; else it comes again with it.
    ACK_AHEAD = 9

    #: Progress of (group_id, topic_id, queue_id): everything before queue_offset was looked at.
    CURSOR = 10
    #: Order by message group: the group message_group_hash has messages waiting behind the cursor,
    #: the first at or after queue_offset.
    BEHIND = 11
    #: It has none any more.
    CAUGHT_UP = 12
    #: Reset of (group_id, topic_id, queue_id) to queue_offset: leases and waiting groups are gone.
    #: delivery -1: a reader that keeps its own offsets has gone back itself, and knows of it.
    RESET = 13
    #: The message group message_group_hash is given up from queue_offset on: all of it, what comes
    #: later too, goes to the dead letters. detail is the failure.
    CONDEMN = 14
    #: It no longer is.
    PARDON = 15
    #: As CURSOR, said by a reader that keeps its own offsets: it is done with what lies before.
    OFFSET_UPDATED = 16
    #: client_id holds the lock of (group_id, topic_id, queue_id) until visible_at_ms; epoch: since
    #: when it does, without a break.
    QUEUE_LOCKED = 17
    #: Nobody does; client_id is the one that did.
    QUEUE_UNLOCKED = 18

    #: A topic was created, altered or deleted: topic_id, detail is its JSON.
    TOPIC = 20
    TOPIC_DELETED = 21
    #: A consumer group was created, altered or deleted: group_id, detail is its JSON.
    GROUP = 22
    GROUP_DELETED = 23
    #: The lite topics that a client has subscribed to: group_id, topic_id, client_id, detail is a
    #: JSON list of all of them, empty when it has none any more.
    LITE_SUBSCRIPTION = 24

    #: A row of SCHEDULE_TOPIC_XXXX (topic_id, queue_id, queue_offset) went to its target;
    #: visible_at_ms is when it was due, at_ms when it was delivered.
    SCHEDULE_DELIVERED = 30
    #: The same, but its target is gone: dropped.
    SCHEDULE_DROPPED = 31
    #: The same, but its producer has called it back.
    SCHEDULE_RECALLED = 32

    #: The state of an open half message (topic_id and queue_offset of the half topic): attempt is
    #: the checks so far, visible_at_ms when the next is due, delivery its immunity in ms,
    #: message_group_hash the hash of its message id, client_id its producer group.
    HALF = 35
    #: Its copy was delivered; the row goes. So it does with the next two.
    HALF_COMMITTED = 36
    HALF_ROLLED_BACK = 37
    #: Nobody decided after the last check: copied to TRANS_CHECK_MAX_TIME_TOPIC.
    HALF_GIVEN_UP = 38

    #: A window was opened or renewed: epoch, visible_at_ms (end of its lease), client_id (owner),
    #: detail is its name.
    WINDOW = 40
    WINDOW_CLOSED = 41
    #: A settle of a window took effect: group_id, epoch, detail is JSON: window, settle_id, answer.
    SETTLED = 42
    #: A sink file counts from now on: group_id, epoch, delivery is the sink's version with it,
    #: detail is JSON: path rows bytes partition offsets.
    SINK_FILE = 43
    #: The effect of a message was carried out: group_id, detail is its idempotency key.
    EFFECT = 44
    #: A dead letter (topic_id, queue_id, queue_offset of the dead letter topic) was opened again
    #: for its group: group_id, client_id is the redrive's id; detail is JSON: where it came from.
    REDRIVEN = 45
    #: Sink files count instead of others: group_id, delivery is the sink's version with them,
    #: client_id is the replacement's id; detail is JSON: reason, added (as SINK_FILE), removed
    #: (paths).
    SINK_REPLACED = 46

    #: A segment is registered: topic_id, queue_id, queue_offset (base), visible_at_ms unused,
    #: detail is JSON: path, base, end, rows, bytes.
    SEGMENT = 50
    #: Event Parquet is registered: detail is JSON: path, from_position, to_position, rows.
    EVENT_SEGMENT = 51
    #: A segment counts instead of others: topic_id, queue_id, queue_offset (base), detail is JSON:
    #: path, base, end, rows, bytes, removed (paths, which hold the same offsets).
    SEGMENTS_REPLACED = 52
    #: The messages of a queue before queue_offset are gone: topic_id, queue_id; detail is JSON:
    #: segments, rows, bytes. Cursors and backlogs that lay before it have events of their own.
    EXPIRED = 53
    #: A snapshot of the state is registered: detail is JSON: path, position, taken_at_ms, rows,
    #: bytes. Or history before a position is let go: detail is JSON: kept_from.
    SNAPSHOT = 54
    #: Event Parquet counts no more: detail is JSON: removed (paths), and if another file has its
    #: events: path, from_position, to_position, rows.
    EVENT_SEGMENTS_REPLACED = 55
    #: The broker did overdue background work itself: detail is JSON: job, overdue_ms, report.
    UPKEEP_FALLBACK = 60
    #: An upkeep verb did work: detail is JSON: job and its report.
    UPKEEP = 61


#: Kinds whose last event is the state of a consumption row, and those of them that remove it.
CONSUMPTION = frozenset(range(Kind.LEASE, Kind.ACK_AHEAD + 1))
REMOVES_ROW = frozenset({Kind.ACK, Kind.DEAD_LETTER})
