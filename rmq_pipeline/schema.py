"""The tables that cross a door or lie on disk. Offsets are half-open; times are ms since 1970."""

from typing import Final

import pyarrow as pa

PROPERTIES: Final = pa.map_(pa.string(), pa.string())
KEYS: Final = pa.list_(pa.string())

#: What ``send`` takes; every column but body may be left out or null.
SEND: Final = pa.schema(
    [
        pa.field("body", pa.binary(), nullable=False),
        ("tag", pa.string()),
        ("keys", KEYS),
        ("message_group", pa.string()),
        ("lite_topic", pa.string()),
        ("delay_level", pa.int32()),
        ("deliver_at_ms", pa.int64()),
        ("priority", pa.int32()),
        ("born_at_ms", pa.int64()),
        ("message_id", pa.string()),
        ("properties", PROPERTIES),
    ]
)

#: What ``send`` answers, in the order of the rows sent. A scheduled message has the offset of its
#: place in SCHEDULE_TOPIC_XXXX, and the handle by which it may be called back.
SENT: Final = pa.schema(
    [
        ("message_id", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("recall_handle", pa.string()),
        #: Not stored: it repeats another message, whose id and place these are.
        ("duplicate", pa.bool_()),
    ]
)

#: What ``recall`` takes, and what it answers.
RECALL: Final = pa.schema([pa.field("recall_handle", pa.string(), nullable=False)])
RECALLED: Final = pa.schema([("recall_handle", pa.string()), ("message_id", pa.string())])

#: What ``send_half`` answers; queue_id and queue_offset are those of the half topic.
SENT_HALF: Final = pa.schema([*SENT, ("transaction_id", pa.string())])

#: How transactions are ended: commit, rollback or unknown.
RESOLUTION: Final = pa.schema(
    [
        pa.field("transaction_id", pa.string(), nullable=False),
        pa.field("resolution", pa.string(), nullable=False),
    ]
)

#: What ending them is answered: the first resolution, and whether this call was the first.
ENDED: Final = pa.schema(
    [
        ("transaction_id", pa.string()),
        ("resolution", pa.string()),
        ("first_time", pa.bool_()),
    ]
)

#: A half message somebody is asked about; ``checks`` is which time this is, from 1 on.
CHECK: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("transaction_id", pa.string()),
        ("producer_group", pa.string()),
        ("checks", pa.int32()),
        ("message_id", pa.string()),
        ("tag", pa.string()),
        ("keys", KEYS),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("born_at_ms", pa.int64()),
        ("stored_at_ms", pa.int64()),
    ]
)

#: A message as the commit log keeps it (section kind 1).
MESSAGE: Final = pa.schema(
    [
        ("topic_id", pa.int32()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("message_id", pa.string()),
        ("tag", pa.string()),
        ("keys", KEYS),
        ("message_group", pa.string()),
        ("message_group_hash", pa.int64()),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("born_at_ms", pa.int64()),
        ("stored_at_ms", pa.int64()),
        ("deliver_at_ms", pa.int64()),
        ("target_topic_id", pa.int32()),
    ]
)

#: A message as ``read`` and segments give it.
READ: Final = pa.schema(
    [
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("message_id", pa.string()),
        ("tag", pa.string()),
        ("keys", KEYS),
        ("message_group", pa.string()),
        ("properties", PROPERTIES),
        ("body", pa.binary()),
        ("born_at_ms", pa.int64()),
        ("stored_at_ms", pa.int64()),
        ("deliver_at_ms", pa.int64()),
    ]
)

#: A message as ``receive`` delivers it; ``delivery_attempt`` of the first delivery is 1.
RECEIVED: Final = pa.schema(
    [*READ, ("delivery_attempt", pa.int32()), ("receipt_handle", pa.string())]
)

#: What ``settle`` takes. outcome: ack, retry, dead_letter, or give_up: a retry that was the last,
#: whatever attempts are left. ``retry_after_ms`` null: the group's backoff. Why it failed:
#: ``reason``, ``error_type``, and the run that saw it. An ack remembers ``idempotency_key`` as that
#: of an effect carried out.
OUTCOME: Final = pa.schema(
    [
        pa.field("receipt_handle", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
        ("run_id", pa.string()),
        ("idempotency_key", pa.string()),
    ]
)

#: Where dead letters lie in a group's dead letter topic, as ``redrive`` takes them.
DEAD_LETTER: Final = pa.schema(
    [
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("queue_offset", pa.int64(), nullable=False),
    ]
)

#: What ``redrive`` answers, row for row. outcome: redriven, already (it was before), gone (its
#: message is no more).
REDRIVEN: Final = pa.schema([*DEAD_LETTER, ("outcome", pa.string())])

#: What ``seen_before`` takes, and what it answers row for row: null for a key it does not know.
IDEMPOTENCY_KEY: Final = pa.schema([("idempotency_key", pa.string())])
SEEN: Final = pa.schema([*IDEMPOTENCY_KEY, ("seen_at_ms", pa.int64())])

#: Offsets [base, end) of message queues.
OFFSET_RANGES: Final = pa.list_(
    pa.struct([("queue_id", pa.int32()), ("base", pa.int64()), ("end", pa.int64())])
)

#: Files of a sink that a settle makes count; ``path`` is relative to the sink's folder.
#: ``offsets``: where the messages that the rows came of lie; null: nobody has said so.
SINK_FILE: Final = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("partition", pa.string()),
        ("offsets", OFFSET_RANGES),
    ]
)

#: An event as the commit log keeps it (section kind 2). Which columns mean what: store/events.py.
EVENT: Final = pa.schema(
    [
        ("kind", pa.int16()),
        ("at_ms", pa.int64()),
        ("group_id", pa.int32()),
        ("topic_id", pa.int32()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("attempt", pa.int32()),
        ("visible_at_ms", pa.int64()),
        ("delivery", pa.int64()),
        ("epoch", pa.int64()),
        ("message_group_hash", pa.int64()),
        ("client_id", pa.string()),
        ("detail", pa.string()),
    ]
)
