"""What consumers and tools get wrong, and the status that each mistake has."""

from __future__ import annotations

from typing import Any

from rmq_pipeline import limits
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.hosted import HOUR_MS
from tests.conformance.sending_mistakes import BAD, SYSTEM, Case, Request

LONG_GROUP = "g" * (limits.GROUP_NAME_LENGTH + 1)


def receiving(topic: str = "normal", group: str = "readers", **fields: Any) -> Request:
    return lambda _: raw.receives(topic, group, **fields)


def queue(topic: str, number: int = 0) -> Any:
    return pb.MessageQueue(topic=raw.resource(topic), id=number)


CONSUMING: list[Case] = [
    ("QueryRoute", "nothing", lambda _: pb.QueryRouteRequest(topic=raw.resource("fifo")), "OK"),
    ("QueryRoute", "no topic", lambda _: pb.QueryRouteRequest(), "ILLEGAL_TOPIC"),
    (
        "QueryRoute",
        "illegal topic",
        lambda _: pb.QueryRouteRequest(topic=raw.resource(BAD)),
        "ILLEGAL_TOPIC",
    ),
    (
        "QueryRoute",
        "unknown topic",
        lambda _: pb.QueryRouteRequest(topic=raw.resource("nowhere")),
        "TOPIC_NOT_FOUND",
    ),
    (
        "QueryRoute",
        "system topic",
        lambda _: pb.QueryRouteRequest(topic=raw.resource(SYSTEM)),
        "ILLEGAL_TOPIC",
    ),
    ("Heartbeat", "nothing", lambda _: pb.HeartbeatRequest(client_type=1), "OK"),
    (
        "QueryAssignment",
        "nothing",
        lambda _: pb.QueryAssignmentRequest(
            topic=raw.resource("normal"), group=raw.resource("readers")
        ),
        "OK",
    ),
    (
        "QueryAssignment",
        "unknown topic",
        lambda _: pb.QueryAssignmentRequest(
            topic=raw.resource("nowhere"), group=raw.resource("readers")
        ),
        "TOPIC_NOT_FOUND",
    ),
    (
        "QueryAssignment",
        "illegal group",
        lambda _: pb.QueryAssignmentRequest(topic=raw.resource("normal"), group=raw.resource(BAD)),
        "ILLEGAL_CONSUMER_GROUP",
    ),
    ("ReceiveMessage", "unknown topic", receiving("nowhere"), "TOPIC_NOT_FOUND"),
    ("ReceiveMessage", "illegal topic", receiving(BAD), "ILLEGAL_TOPIC"),
    (
        "GetOffset",
        "illegal group",
        lambda _: pb.GetOffsetRequest(group=raw.resource(BAD), message_queue=queue("normal")),
        "ILLEGAL_CONSUMER_GROUP",
    ),
    ("ReceiveMessage", "no topic", receiving(""), "ILLEGAL_TOPIC"),
    ("ReceiveMessage", "no group", receiving(group=""), "ILLEGAL_CONSUMER_GROUP"),
    ("ReceiveMessage", "illegal group", receiving(group=BAD), "ILLEGAL_CONSUMER_GROUP"),
    ("ReceiveMessage", "long group", receiving(group=LONG_GROUP), "ILLEGAL_CONSUMER_GROUP"),
    ("ReceiveMessage", "short time", receiving(invisible_ms=9_999), "ILLEGAL_INVISIBLE_TIME"),
    ("ReceiveMessage", "no time", receiving(invisible_ms=None), "ILLEGAL_INVISIBLE_TIME"),
    (
        "ReceiveMessage",
        "long time",
        receiving(invisible_ms=12 * HOUR_MS + 1),
        "ILLEGAL_INVISIBLE_TIME",
    ),
    (
        "ReceiveMessage",
        "negative time",
        receiving(invisible_ms=-10_000),
        "ILLEGAL_INVISIBLE_TIME",
    ),
    ("ReceiveMessage", "bad tags", receiving(filter="||"), "ILLEGAL_FILTER_EXPRESSION"),
    (
        "ReceiveMessage",
        "bad condition",
        receiving(filter="a >", sql=True),
        "ILLEGAL_FILTER_EXPRESSION",
    ),
    (
        "ReceiveMessage",
        "empty condition",
        receiving(filter="", sql=True),
        "ILLEGAL_FILTER_EXPRESSION",
    ),
    ("ReceiveMessage", "no messages wanted", receiving(n=0), "BAD_REQUEST"),
    ("ReceiveMessage", "fewer than none wanted", receiving(n=-1), "BAD_REQUEST"),
    (
        "AckMessage",
        "no such receipt",
        lambda _: raw.acks("normal", "readers", [("x", "0" * 56)]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "AckMessage",
        "garbled receipt",
        lambda _: raw.acks("normal", "readers", [("x", "no handle")]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "AckMessage",
        "no receipt",
        lambda _: raw.acks("normal", "readers", [("x", "")]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "AckMessage",
        "another group's receipt",
        lambda hosted: raw.acks("normal", "ordered", [(hosted.delivered_id, hosted.handle)]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "AckMessage",
        "another topic's receipt",
        lambda hosted: raw.acks("mixed", "readers", [(hosted.delivered_id, hosted.handle)]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "AckMessage",
        "unknown topic",
        lambda hosted: raw.acks("nowhere", "readers", [(hosted.delivered_id, hosted.handle)]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "AckMessage",
        "unknown group",
        lambda hosted: raw.acks("normal", "nobody", [(hosted.delivered_id, hosted.handle)]),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ChangeInvisibleDuration",
        "no such receipt",
        lambda _: raw.changes("normal", "readers", handle="0" * 56, invisible_ms=1000),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ChangeInvisibleDuration",
        "garbled receipt",
        lambda _: raw.changes("normal", "readers", handle="x", invisible_ms=1000),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ChangeInvisibleDuration",
        "long time",
        lambda h: raw.changes("normal", "readers", handle=h.handle, invisible_ms=12 * HOUR_MS + 1),
        "ILLEGAL_INVISIBLE_TIME",
    ),
    (
        "ChangeInvisibleDuration",
        "negative time",
        lambda h: raw.changes("normal", "readers", handle=h.handle, invisible_ms=-1),
        "ILLEGAL_INVISIBLE_TIME",
    ),
    (
        "ChangeInvisibleDuration",
        "unknown topic",
        lambda h: raw.changes("nowhere", "readers", handle=h.handle, invisible_ms=1000),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ChangeInvisibleDuration",
        "another group's receipt",
        lambda h: raw.changes("normal", "ordered", handle=h.handle, invisible_ms=1000),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ForwardMessageToDeadLetterQueue",
        "no such receipt",
        lambda _: raw.buries("normal", "readers", handle="0" * 56),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ForwardMessageToDeadLetterQueue",
        "another group's receipt",
        lambda h: raw.buries("normal", "ordered", handle=h.handle),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "ForwardMessageToDeadLetterQueue",
        "unknown group",
        lambda h: raw.buries("normal", "nobody", handle=h.handle),
        "INVALID_RECEIPT_HANDLE",
    ),
    (
        "SyncLiteSubscription",
        "a topic of another type",
        lambda _: raw.lite("normal", "readers", action="PARTIAL_ADD", names=["a"]),
        "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE",
    ),
    (
        "SyncLiteSubscription",
        "unknown topic",
        lambda _: raw.lite("nowhere", "readers", action="PARTIAL_ADD", names=["a"]),
        "TOPIC_NOT_FOUND",
    ),
    (
        "SyncLiteSubscription",
        "blank name",
        lambda _: raw.lite("lite", "readers", action="PARTIAL_ADD", names=[" "]),
        "ILLEGAL_LITE_TOPIC",
    ),
    (
        "SyncLiteSubscription",
        "long name",
        lambda _: raw.lite("lite", "readers", action="PARTIAL_ADD", names=["x" * 64]),
        "ILLEGAL_LITE_TOPIC",
    ),
    (
        "SyncLiteSubscription",
        "too many",
        lambda _: raw.lite(
            "lite",
            "readers",
            action="COMPLETE_ADD",
            names=[f"n{i}" for i in range(limits.LITE_TOPICS_PER_CLIENT + 1)],
        ),
        "LITE_SUBSCRIPTION_QUOTA_EXCEEDED",
    ),
    (
        "PullMessage",
        "unknown topic",
        lambda _: pb.PullMessageRequest(
            group=raw.resource("readers"), message_queue=queue("nowhere"), batch_size=1
        ),
        "TOPIC_NOT_FOUND",
    ),
    (
        "PullMessage",
        "offset beyond the end",
        lambda _: pb.PullMessageRequest(
            group=raw.resource("readers"), message_queue=queue("normal"), offset=99, batch_size=1
        ),
        "ILLEGAL_OFFSET",
    ),
    (
        "GetOffset",
        "unknown topic",
        lambda _: pb.GetOffsetRequest(
            group=raw.resource("readers"), message_queue=queue("nowhere")
        ),
        "TOPIC_NOT_FOUND",
    ),
    (
        "GetOffset",
        "unknown group",
        lambda _: pb.GetOffsetRequest(group=raw.resource("nobody"), message_queue=queue("normal")),
        "CONSUMER_GROUP_NOT_FOUND",
    ),
    (
        "QueryOffset",
        "unknown topic",
        lambda _: pb.QueryOffsetRequest(message_queue=queue("nowhere")),
        "TOPIC_NOT_FOUND",
    ),
    (
        "UpdateOffset",
        "unknown topic",
        lambda _: pb.UpdateOffsetRequest(
            group=raw.resource("readers"), message_queue=queue("nowhere")
        ),
        "TOPIC_NOT_FOUND",
    ),
    (
        "UpdateOffset",
        "offset beyond the end",
        lambda _: pb.UpdateOffsetRequest(
            group=raw.resource("readers"), message_queue=queue("normal"), offset=99
        ),
        "ILLEGAL_OFFSET",
    ),
    (
        "UpdateOffset",
        "no such queue",
        lambda _: pb.UpdateOffsetRequest(
            group=raw.resource("readers"), message_queue=queue("normal", 99)
        ),
        "ILLEGAL_OFFSET",
    ),
]
