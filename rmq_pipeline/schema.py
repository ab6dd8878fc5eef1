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
        ("delay_level", pa.int32()),
        ("deliver_at_ms", pa.int64()),
        ("born_at_ms", pa.int64()),
        ("message_id", pa.string()),
        ("properties", PROPERTIES),
    ]
)

#: What ``send`` answers, in the order of the rows sent. A scheduled message has the offset of its
#: place in SCHEDULE_TOPIC_XXXX.
SENT: Final = pa.schema(
    [("message_id", pa.string()), ("queue_id", pa.int32()), ("queue_offset", pa.int64())]
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

#: What ``settle`` takes. outcome: ack, retry, dead_letter. ``retry_after_ms`` null: the group's
#: backoff.
OUTCOME: Final = pa.schema(
    [
        pa.field("receipt_handle", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
    ]
)

#: Files of a sink that a settle makes count; ``path`` is relative to the sink's folder.
SINK_FILE: Final = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("partition", pa.string()),
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
