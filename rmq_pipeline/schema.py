"""Schemas of the tables on disk and on the wire. Offsets are half-open; times are ms since 1970."""

from typing import Final

import pyarrow as pa

PROPERTIES: Final = pa.map_(pa.string(), pa.string())
KEYS: Final = pa.list_(pa.string())

#: Argument of ``send``; every column but body may be absent or null.
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
        #: The queue that the producer chose; null: the broker chooses.
        ("queue_id", pa.int32()),
        ("born_at_ms", pa.int64()),
        ("message_id", pa.string()),
        ("properties", PROPERTIES),
    ]
)

#: Result of ``send``, in the order of the rows sent. A scheduled message has its offset in
#: SCHEDULE_TOPIC_XXXX, and the handle to recall it.
SENT: Final = pa.schema(
    [
        ("message_id", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("recall_handle", pa.string()),
        #: True: not stored, because it repeats another message, which has this id and place.
        ("duplicate", pa.bool_()),
    ]
)

#: Argument and result of ``recall``.
RECALL: Final = pa.schema([pa.field("recall_handle", pa.string(), nullable=False)])
RECALLED: Final = pa.schema([("recall_handle", pa.string()), ("message_id", pa.string())])

#: Result of ``send_half``; queue_id and queue_offset are those in the half topic.
SENT_HALF: Final = pa.schema([*SENT, ("transaction_id", pa.string())])

#: Checks that a caller has, by their transactions.
CHECK_ID: Final = pa.schema([pa.field("transaction_id", pa.string(), nullable=False)])

#: Argument of ``end_transactions``; resolution: commit, rollback or unknown.
RESOLUTION: Final = pa.schema(
    [
        pa.field("transaction_id", pa.string(), nullable=False),
        pa.field("resolution", pa.string(), nullable=False),
    ]
)

#: Its result: the first resolution, and whether this call was the first.
ENDED: Final = pa.schema(
    [
        ("transaction_id", pa.string()),
        ("resolution", pa.string()),
        ("first_time", pa.bool_()),
    ]
)

#: A half message to check; ``checks`` counts its checks, from 1 on.
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

#: A message as the commit log stores it (section kind 1).
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

#: A message in the result of ``read``, and in segments.
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

#: A message in the result of ``receive``; ``delivery_attempt`` of the first delivery is 1.
RECEIVED: Final = pa.schema(
    [*READ, ("delivery_attempt", pa.int32()), ("receipt_handle", pa.string())]
)

#: Argument of ``settle``. outcome: ack, retry, dead_letter, give_up (dead-letter regardless of the
#: attempts left), or retry_in_place (the attempt counts, and the receipt stays valid).
#: ``retry_after_ms`` null: the group's backoff. A failure has ``reason``, ``error_type``,
#: ``traceback``, and the ``run_id`` that reported it. An ack remembers ``idempotency_key``: its
#: effect was carried out.
OUTCOME: Final = pa.schema(
    [
        pa.field("receipt_handle", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
        ("run_id", pa.string()),
        ("idempotency_key", pa.string()),
        ("traceback", pa.string()),
    ]
)

#: Argument of verbs that look up message groups.
MESSAGE_GROUP: Final = pa.schema([("message_group", pa.string())])

#: Places in a group's dead letter topic; argument of ``redrive``.
DEAD_LETTER: Final = pa.schema(
    [
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("queue_offset", pa.int64(), nullable=False),
    ]
)

#: Result of ``redrive``, row for row. outcome: redriven, already (redriven before), gone (the
#: message no longer exists).
REDRIVEN: Final = pa.schema([*DEAD_LETTER, ("outcome", pa.string())])

#: Argument and result of ``seen_before``, row for row; null for an unknown key.
IDEMPOTENCY_KEY: Final = pa.schema([("idempotency_key", pa.string())])
SEEN: Final = pa.schema([*IDEMPOTENCY_KEY, ("seen_at_ms", pa.int64())])

#: Offsets [base, end) of message queues.
OFFSET_RANGES: Final = pa.list_(
    pa.struct([("queue_id", pa.int32()), ("base", pa.int64()), ("end", pa.int64())])
)

#: Sink files that a settle adds; ``path`` is relative to the sink's folder. ``offsets``: the
#: offsets of the messages behind the rows; null: unknown.
SINK_FILE: Final = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("partition", pa.string()),
        ("offsets", OFFSET_RANGES),
    ]
)

#: An event as the commit log stores it (section kind 2). store/events.py explains the columns.
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
