"""The endpoint in the test's own process, over a broker whose clock the test turns."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock, ManualClock
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.settings import Settings
from tests.conformance import raw
from tests.conformance.raw import Raw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPICS = ("normal", "fifo", "delay", "transaction", "priority", "lite", "mixed")
HOUR_MS = 3_600_000


@dataclass
class Hosted:
    """A broker behind its endpoint, a client, and one thing of each kind to speak about."""

    broker: Broker
    endpoint: GrpcEndpoint
    clock: Clock
    client: Raw
    #: Of a message in flight, in topic ``normal`` and group ``readers``.
    handle: str = ""
    delivered_id: str = ""
    #: Of an open half message in topic ``transaction``.
    transaction_id: str = ""
    half_id: str = ""
    #: Of a message that waits in topic ``delay``, and of one that was called back.
    recall_handle: str = ""
    spent_handle: str = ""

    def settled(self) -> tuple[int, int, int]:
        """What a refused call leaves as it is: the log's end, the leases, the groups."""
        engine = self.broker.engine
        leases = self.broker.sql("SELECT count(*) AS n FROM in_flight")["n"][0].as_py()
        return engine.log.end, leases, len(engine.state.group_ids)

    def advance(self, ms: int) -> None:
        """Let that much time pass, where the test turns the clock."""
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(ms)

    def due(self, ms: int) -> int:
        """A moment that long from now."""
        return self.clock.now_ms() + ms


@contextlib.contextmanager
def hosting(home: Path, *, clock: Clock | None = None, **settings: Any) -> Iterator[Hosted]:
    """An endpoint with a topic of every type, named for it, and the groups readers and ordered."""
    small = {"reserve_bytes": 1 << 20, "log_file_bytes": 8 << 20}
    clock = clock or ManualClock()
    chosen = Settings(**{**small, **settings})
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker.open(home, clock=clock, upkeep="none", settings=chosen))
        for name in TOPICS:
            broker.create_topic(name, type=name, queues=2)
        broker.create_group("readers")
        broker.create_group("ordered", order="message_group")
        endpoint = GrpcEndpoint(broker, "127.0.0.1:0")
        stack.callback(endpoint.shutdown)
        client = stack.enter_context(Raw(endpoint.address))
        yield Hosted(broker, endpoint, clock, client)


def furnish(hosted: Hosted) -> None:
    """Put there what the fields of ``hosted`` name."""
    client = hosted.client
    client("SendMessage", raw.sends(raw.message("normal"), raw.message("normal")))
    (got,) = raw.received(
        client("ReceiveMessage", raw.receives("normal", "readers", n=1, invisible_ms=HOUR_MS))
    )
    hosted.handle = got.system_properties.receipt_handle
    hosted.delivered_id = got.system_properties.message_id
    half = client("SendMessage", raw.sends(raw.message("transaction", kind="TRANSACTION")))
    hosted.transaction_id = half.entries[0].transaction_id
    hosted.half_id = half.entries[0].message_id
    handles = []
    for _ in range(2):
        later = raw.message("delay", kind="DELAY", delivery_timestamp_ms=hosted.due(HOUR_MS))
        handles.append(client("SendMessage", raw.sends(later)).entries[0].recall_handle)
    hosted.recall_handle, hosted.spent_handle = handles
    client("RecallMessage", raw.recalls("delay", hosted.spent_handle))


def settings(kind: str, topic: str = "normal", group: str = "readers") -> Any:
    """The first command of a client of this type."""
    own = pb.Settings(client_type=getattr(pb.ClientType, kind))
    own.access_point.addresses.add(host="127.0.0.1", port=1)
    own.user_agent.language = pb.Language.PYTHON
    if kind == "PRODUCER":
        own.publishing.topics.add(name=topic)
    else:
        own.subscription.group.name = group
        entry = own.subscription.subscriptions.add()
        entry.topic.name = topic
        entry.expression.expression = "*"
    return pb.TelemetryCommand(settings=own)
