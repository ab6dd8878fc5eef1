"""What producers get wrong, and the status that each mistake has."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

from rmq_pipeline import limits
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.hosted import HOUR_MS, Hosted

Request = Callable[[Hosted], Any]
#: RPC, what is wrong, the request, and the status.
Case = tuple[str, str, Request, str]

#: A name with a character that names have not.
BAD = "no/name"
LONG_TOPIC = "t" * (limits.TOPIC_NAME_LENGTH + 1)
SYSTEM = "RMQ_SYS_TRANS_HALF_TOPIC"


def sending(topic: str = "normal", body: bytes = b"x", **properties: Any) -> Request:
    return lambda _: raw.sends(raw.message(topic, body, **properties))


def delayed(ms: int, **properties: Any) -> Request:
    def make(hosted: Hosted) -> Any:
        due = hosted.due(ms)
        return raw.sends(
            raw.message("delay", kind="DELAY", delivery_timestamp_ms=due, **properties)
        )

    return make


def user(n: int, size: int = 1) -> dict[str, str]:
    return {f"k{i}": "v" * size for i in range(n)}


def batch(*messages: Any) -> Request:
    return lambda _: raw.sends(*messages)


def both(kind: str, **more: Any) -> Any:
    return raw.message("normal", kind=kind, **more)


def _without_id() -> Request:
    message = raw.message("normal")
    message.system_properties.message_id = ""
    return batch(message)


SENDING: list[Case] = [
    ("SendMessage", "no message", lambda _: raw.sends(), "MESSAGE_CORRUPTED"),
    ("SendMessage", "no topic", sending(""), "ILLEGAL_TOPIC"),
    ("SendMessage", "unknown topic", sending("nowhere"), "TOPIC_NOT_FOUND"),
    ("SendMessage", "illegal topic", sending(BAD), "ILLEGAL_TOPIC"),
    ("SendMessage", "long topic", sending(LONG_TOPIC), "ILLEGAL_TOPIC"),
    ("SendMessage", "system topic", sending(SYSTEM), "ILLEGAL_TOPIC"),
    ("SendMessage", "RocketMQ's trace", sending("RMQ_SYS_TRACE_TOPIC"), "ILLEGAL_TOPIC"),
    ("SendMessage", "C1 in a tag", sending(tag="a\x85b"), "ILLEGAL_MESSAGE_TAG"),
    ("SendMessage", "C1 in a key", sending(keys=["a\x9f"]), "ILLEGAL_MESSAGE_KEY"),
    (
        "SendMessage",
        "C1 in a property",
        sending(user={"a": "\x80"}),
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
    ),
    (
        "EndTransaction",
        "illegal topic",
        lambda h: raw.ends(BAD, h.transaction_id, resolution="COMMIT"),
        "ILLEGAL_TOPIC",
    ),
    (
        "RecallMessage",
        "illegal topic",
        lambda h: raw.recalls(BAD, h.recall_handle),
        "ILLEGAL_TOPIC",
    ),
    ("SendMessage", "empty body", sending(body=b""), "MESSAGE_BODY_EMPTY"),
    (
        "SendMessage",
        "large body",
        sending(body=bytes(limits.BODY_BYTES + 1)),
        "MESSAGE_BODY_TOO_LARGE",
    ),
    (
        "SendMessage",
        "body that unpacks to too much",
        sending(body=gzip.compress(bytes(limits.BODY_BYTES + 1)), body_encoding=pb.Encoding.GZIP),
        "MESSAGE_BODY_TOO_LARGE",
    ),
    (
        "SendMessage",
        "body that does not unpack",
        sending(body=b"no gzip", body_encoding=pb.Encoding.GZIP),
        "MESSAGE_CORRUPTED",
    ),
    (
        "SendMessage",
        "body whose end is missing",
        sending(body=gzip.compress(b"x" * 100)[:-9], body_encoding=pb.Encoding.GZIP),
        "MESSAGE_CORRUPTED",
    ),
    ("SendMessage", "no message id", _without_id(), "ILLEGAL_MESSAGE_ID"),
    ("SendMessage", "blank message id", sending(message_id="  "), "ILLEGAL_MESSAGE_ID"),
    ("SendMessage", "blank tag", sending(tag="  "), "ILLEGAL_MESSAGE_TAG"),
    ("SendMessage", "tag with a bar", sending(tag="a|b"), "ILLEGAL_MESSAGE_TAG"),
    ("SendMessage", "tag with a control character", sending(tag="a\n"), "ILLEGAL_MESSAGE_TAG"),
    ("SendMessage", "blank key", sending(keys=["ok", " "]), "ILLEGAL_MESSAGE_KEY"),
    ("SendMessage", "key with a control character", sending(keys=["\0"]), "ILLEGAL_MESSAGE_KEY"),
    (
        "SendMessage",
        "reserved property",
        sending(user={"TRAN_MSG": "true"}),
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
    ),
    (
        "SendMessage",
        "property with a control character",
        sending(user={"a\x01b": "c"}),
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
    ),
    (
        "SendMessage",
        "too many properties",
        sending(user=user(limits.PROPERTY_COUNT + 1)),
        "MESSAGE_PROPERTIES_TOO_LARGE",
    ),
    (
        "SendMessage",
        "large properties",
        sending(user=user(2, limits.PROPERTY_BYTES // 2)),
        "MESSAGE_PROPERTIES_TOO_LARGE",
    ),
    (
        "SendMessage",
        "no message group",
        sending("fifo", kind="FIFO"),
        "ILLEGAL_MESSAGE_GROUP",
    ),
    (
        "SendMessage",
        "blank message group",
        sending("fifo", kind="FIFO", message_group=" "),
        "ILLEGAL_MESSAGE_GROUP",
    ),
    (
        "SendMessage",
        "long message group",
        sending("fifo", kind="FIFO", message_group="ü" * 32),
        "ILLEGAL_MESSAGE_GROUP",
    ),
    ("SendMessage", "no lite topic", sending("lite", kind="LITE"), "ILLEGAL_LITE_TOPIC"),
    (
        "SendMessage",
        "long lite topic",
        sending("lite", kind="LITE", lite_topic="x" * 64),
        "ILLEGAL_LITE_TOPIC",
    ),
    ("SendMessage", "far delivery time", delayed(366 * 24 * HOUR_MS), "ILLEGAL_DELIVERY_TIME"),
    (
        "SendMessage",
        "delivery time out of all range",
        lambda _: raw.sends(
            raw.message("delay", kind="DELAY", delivery_timestamp_ms=253_402_300_799_000)
        ),
        "ILLEGAL_DELIVERY_TIME",
    ),
    *(
        (
            "SendMessage",
            f"{kind} for topic {topic}",
            sending(topic, kind=kind),
            "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE",
        )
        for topic, kind in (
            ("normal", "FIFO"),
            ("normal", "DELAY"),
            ("normal", "TRANSACTION"),
            ("normal", "LITE"),
            ("normal", "PRIORITY"),
            ("fifo", "NORMAL"),
            ("delay", "NORMAL"),
            ("transaction", "NORMAL"),
            ("priority", "FIFO"),
            ("lite", "NORMAL"),
            ("mixed", "LITE"),
        )
    ),
    (
        "SendMessage",
        "a second message of another topic",
        batch(raw.message("normal"), raw.message("mixed")),
        "MESSAGE_CORRUPTED",
    ),
    (
        "SendMessage",
        "a second message without a body",
        batch(raw.message("normal"), raw.message("normal", b"")),
        "MESSAGE_BODY_EMPTY",
    ),
    (
        "SendMessage",
        "a second message of another type",
        batch(both("NORMAL"), both("FIFO", message_group="g")),
        "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE",
    ),
    (
        "SendMessage",
        "half with a delivery time",
        lambda hosted: raw.sends(
            raw.message("transaction", kind="TRANSACTION", delivery_timestamp_ms=hosted.due(1000))
        ),
        "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE",
    ),
    (
        "EndTransaction",
        "no such transaction",
        lambda _: raw.ends("transaction", "none", resolution="COMMIT"),
        "INVALID_TRANSACTION_ID",
    ),
    (
        "EndTransaction",
        "no transaction",
        lambda _: raw.ends("transaction", "", resolution="COMMIT"),
        "INVALID_TRANSACTION_ID",
    ),
    (
        "EndTransaction",
        "unknown topic",
        lambda h: raw.ends("nowhere", h.transaction_id, resolution="COMMIT"),
        "TOPIC_NOT_FOUND",
    ),
    (
        "RecallMessage",
        "garbled handle",
        lambda _: raw.recalls("delay", "no handle"),
        "NOT_FOUND",
    ),
    ("RecallMessage", "no handle", lambda _: raw.recalls("delay", ""), "NOT_FOUND"),
    (
        "RecallMessage",
        "called back before",
        lambda h: raw.recalls("delay", h.spent_handle),
        "NOT_FOUND",
    ),
    (
        "RecallMessage",
        "another topic's handle",
        lambda h: raw.recalls("mixed", h.recall_handle),
        "NOT_FOUND",
    ),
    (
        "RecallMessage",
        "unknown topic",
        lambda h: raw.recalls("nowhere", h.recall_handle),
        "TOPIC_NOT_FOUND",
    ),
]
