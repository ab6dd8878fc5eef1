"""Our broker through RocketMQ's protocol, and the empty server: the same stub on both."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

import grpc

from benchmarks.grpc import Lines
from benchmarks.peers.driver import (
    LEASE_S,
    NOTHING,
    RETRY_MS,
    Connection,
    Driver,
    Kind,
    Offer,
    Received,
)
from benchmarks.peers.drivers.own_flight import OwnBroker
from rmq_pipeline.rocketmq import protocol as pb

_OPTIONS: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_NUMBERS: Final = count(1)
#: The queue of a receive from all queues.
_ANY_QUEUE: Final = -1
_OFFERS: Final = frozenset(Offer) - {Offer.LARGE_RECEIVES}


class OwnGrpc(OwnBroker):
    """The broker behind its gRPC endpoint."""

    name = "rmq_pipeline, gRPC"
    offers: ClassVar[frozenset[Offer]] = _OFFERS

    def connect(self) -> Connection:
        """Return a stub with a channel of its own."""
        assert self._endpoint.grpc is not None
        return _StubConnection(self._endpoint.grpc)


class EmptyServer(Driver):
    """A server of the protocol that stores nothing: the limit of gRPC in Python."""

    name = "empty grpc.aio server"
    durability = "stores nothing"
    offers: ClassVar[frozenset[Offer]] = frozenset()
    version = version("grpcio")

    def start(self, folder: Path) -> None:
        """Start it."""
        with tempfile.TemporaryDirectory(dir=folder) as home:
            self._server = Lines("benchmarks.empty_endpoint", HOME=home)
            self._address = self._server.read().strip()

    def pids(self) -> Sequence[int]:
        """Return its process."""
        return [self._server.process.pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Do nothing: it has every topic."""

    def connect(self) -> Connection:
        """Return a stub with a channel of its own."""
        return _StubConnection(self._address)

    def drop(self, topic: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Stop it."""
        self._server.end()


class _StubConnection(Connection):
    def __init__(self, address: str) -> None:
        # Channels of one process share a connection unless each has a pool of its own.
        own = ("grpc.use_local_subchannel_pool", 1)
        self._channel = grpc.insecure_channel(address, options=[*_OPTIONS, own])
        self._stub = pb.MessagingServiceStub(self._channel)
        self._metadata = [
            ("x-mq-client-id", f"peer@{next(_NUMBERS)}"),
            ("x-mq-language", "PYTHON"),
        ]

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        request = pb.SendMessageRequest()
        for at, body in enumerate(bodies):
            one = request.messages.add(body=body)
            one.topic.name = topic
            own = one.system_properties
            own.message_id = f"{next(_NUMBERS):034X}"
            own.message_type = pb.MessageType.NORMAL
            own.body_encoding = pb.Encoding.IDENTITY
            own.born_timestamp.GetCurrentTime()
            own.born_host = "127.0.0.1"
            if keys:
                own.message_type = pb.MessageType.FIFO
                own.message_group = f"key-{keys[at]}"
            if due_ms:
                own.message_type = pb.MessageType.DELAY
                own.delivery_timestamp.FromMilliseconds(due_ms[at])
        _accepted(self._stub.SendMessage(request, metadata=self._metadata))

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        queue = pb.MessageQueue(topic=pb.Resource(name=topic), id=_ANY_QUEUE)
        request = pb.ReceiveMessageRequest(
            group=pb.Resource(name=group), message_queue=queue, batch_size=limit
        )
        request.filter_expression.expression = "*"
        request.invisible_duration.seconds = LEASE_S
        request.long_polling_timeout.FromMilliseconds(int(wait_s * 1000))
        frames = self._stub.ReceiveMessage(
            request, metadata=self._metadata, timeout=wait_s + LEASE_S
        )
        found = [frame.message for frame in frames if frame.WhichOneof("content") == "message"]
        if not found:
            return NOTHING
        streams = [message.system_properties.queue_id for message in found]
        return Received([message.body for message in found], (topic, group, found), streams)

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        topic, group, found = received.handle
        names = {"topic": pb.Resource(name=topic), "group": pb.Resource(name=group)}
        for at in failed:
            change = pb.ChangeInvisibleDurationRequest(
                **names,
                receipt_handle=found[at].system_properties.receipt_handle,
                message_id=found[at].system_properties.message_id,
            )
            change.invisible_duration.FromMilliseconds(RETRY_MS)
            _accepted(self._stub.ChangeInvisibleDuration(change, metadata=self._metadata))
        left = set(range(len(found))) - set(failed)
        entries = [
            pb.AckMessageEntry(
                message_id=found[at].system_properties.message_id,
                receipt_handle=found[at].system_properties.receipt_handle,
            )
            for at in sorted(left)
        ]
        if entries:
            request = pb.AckMessageRequest(**names, entries=entries)
            _accepted(self._stub.AckMessage(request, metadata=self._metadata))

    def close(self) -> None:
        self._channel.close()


def _accepted(reply: Any) -> None:
    if reply.status.code != pb.Code.OK:
        raise RuntimeError(reply.status.message)
