"""The protocol without a client: each RPC as it goes over the wire."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rmq_pipeline.rocketmq import protocol as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

CODES: Final = {number: name for name, number in pb.Code.items()}
_NUMBERS: Final = count(1)


def message_id() -> str:
    """An id that no other message of this process has, of the length that clients use."""
    return f"{next(_NUMBERS):034X}"


class Raw:
    """One client: a connection, and the metadata that go with its calls.

    ``raw("AckMessage", request)`` makes the call; of streams, all that came.
    """

    def __init__(
        self, address: str, *, client_id: str = "", namespace: str = "", **metadata: str
    ) -> None:
        self.client_id = client_id or f"raw@{next(_NUMBERS)}"
        given = {
            "x-mq-client-id": self.client_id,
            "x-mq-language": "PYTHON",
            "x-mq-protocol": "GRPC_V2",
            "x-mq-namespace": namespace,
            **{name.replace("_", "-"): value for name, value in metadata.items()},
        }
        self.metadata = [(name, value) for name, value in given.items() if value]
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.channel = grpc.insecure_channel(address, options=options)
        self.stub = pb.MessagingServiceStub(self.channel)

    def __call__(self, rpc: str, request: Any, *, timeout_s: float = 20.0) -> Any:
        answer = getattr(self.stub, rpc)(request, metadata=self.metadata, timeout=timeout_s)
        return list(answer) if rpc in ("ReceiveMessage", "PullMessage") else answer

    def close(self) -> None:
        """Disconnect."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def code(answer: Any) -> str:
    """The name of the status that an answer, or the first frame of one, has."""
    if isinstance(answer, list):
        return next((CODES[frame.status.code] for frame in answer if _has_status(frame)), "NONE")
    status: str = CODES[answer.status.code]
    return status


def _has_status(frame: Any) -> bool:
    return bool(frame.WhichOneof("content") == "status")


def received(frames: Iterable[Any]) -> list[Any]:
    """The messages among the frames of a receive."""
    return [frame.message for frame in frames if frame.WhichOneof("content") == "message"]


def resource(name: str, namespace: str = "") -> Any:
    return pb.Resource(name=name, resource_namespace=namespace)


def message(topic: str, body: bytes = b"x", *, kind: str = "NORMAL", **properties: Any) -> Any:
    """A message of a topic; ``properties`` are its system properties, and ``user`` its own."""
    user = properties.pop("user", {})
    own = pb.SystemProperties(
        message_id=properties.pop("message_id", None) or message_id(),
        message_type=getattr(pb.MessageType, kind),
        body_encoding=properties.pop("body_encoding", pb.Encoding.IDENTITY),
        born_host="127.0.0.1",
        **{name: value for name, value in properties.items() if not name.endswith("_ms")},
    )
    for name, value in properties.items():
        if name.endswith("_ms"):
            at(getattr(own, name.removesuffix("_ms")), value)
    return pb.Message(topic=resource(topic), body=body, user_properties=user, system_properties=own)


def at(field: Any, milliseconds: int) -> None:
    """Set a Timestamp or a Duration."""
    field.seconds, rest = divmod(milliseconds, 1000)
    field.nanos = rest * 1_000_000


def ms(field: Any) -> int:
    """A Timestamp or a Duration in ms."""
    return int(field.seconds * 1000 + field.nanos // 1_000_000)


def sends(*messages: Any) -> Any:
    return pb.SendMessageRequest(messages=messages)


def receives(
    topic: str,
    group: str,
    *,
    n: int = 32,
    invisible_ms: int | None = 60_000,
    wait_ms: int = 0,
    filter: str = "*",
    sql: bool = False,
    **fields: Any,
) -> Any:
    kind = pb.FilterType.SQL if sql else pb.FilterType.TAG
    request = pb.ReceiveMessageRequest(
        group=resource(group),
        message_queue=pb.MessageQueue(topic=resource(topic), id=0),
        filter_expression=pb.FilterExpression(type=kind, expression=filter),
        batch_size=n,
        **fields,
    )
    if invisible_ms is not None:
        at(request.invisible_duration, invisible_ms)
    at(request.long_polling_timeout, wait_ms)
    return request


def acks(topic: str, group: str, entries: Sequence[tuple[str, str]]) -> Any:
    """Entries are message ids and receipt handles."""
    made = [
        pb.AckMessageEntry(message_id=known, receipt_handle=handle) for known, handle in entries
    ]
    return pb.AckMessageRequest(topic=resource(topic), group=resource(group), entries=made)


def changes(
    topic: str, group: str, *, handle: str, invisible_ms: int, message_id: str = "x"
) -> Any:
    request = pb.ChangeInvisibleDurationRequest(
        topic=resource(topic),
        group=resource(group),
        receipt_handle=handle,
        message_id=message_id,
    )
    at(request.invisible_duration, invisible_ms)
    return request


def buries(topic: str, group: str, *, handle: str, message_id: str = "x") -> Any:
    return pb.ForwardMessageToDeadLetterQueueRequest(
        topic=resource(topic),
        group=resource(group),
        receipt_handle=handle,
        message_id=message_id,
        delivery_attempt=1,
        max_delivery_attempts=1,
    )


def ends(topic: str, transaction_id: str, *, resolution: str, message_id: str = "x") -> Any:
    return pb.EndTransactionRequest(
        topic=resource(topic),
        message_id=message_id,
        transaction_id=transaction_id,
        resolution=getattr(pb.TransactionResolution, resolution),
        source=pb.TransactionSource.SOURCE_CLIENT,
    )


def recalls(topic: str, handle: str) -> Any:
    return pb.RecallMessageRequest(topic=resource(topic), recall_handle=handle)


def lite(topic: str, group: str, *, action: str, names: Sequence[str] = ()) -> Any:
    return pb.SyncLiteSubscriptionRequest(
        action=getattr(pb.LiteSubscriptionAction, action),
        topic=resource(topic),
        group=resource(group),
        lite_topic_set=names,
    )
