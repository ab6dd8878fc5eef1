"""A sound request of every RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.hosted import TOPICS, Hosted

if TYPE_CHECKING:
    import random


def sound(hosted: Hosted, chance: random.Random) -> dict[str, Any]:
    """By the RPC's name, about what ``furnish`` has put there."""
    queue = pb.MessageQueue(topic=raw.resource("normal"), id=0)
    group = raw.resource("readers")
    here = {"group": group, "message_queue": queue}
    topic = chance.choice(TOPICS)
    routed = {"topic": raw.resource(topic)}
    change = raw.changes("normal", "readers", handle=hosted.handle, invisible_ms=20_000)
    receive = raw.receives(
        "normal",
        "readers",
        n=2,
        wait_ms=chance.choice((0, 50)),
        filter=chance.choice(("*", "a || b", "p = '1'")),
        sql=chance.random() < 0.3,
        attempt_id=chance.choice(("", "again")),
        auto_renew=chance.random() < 0.3,
    )
    return {
        "QueryRoute": pb.QueryRouteRequest(**routed),
        "Heartbeat": pb.HeartbeatRequest(client_type=chance.randrange(1, 8), group=group),
        "SendMessage": raw.sends(*[_message(hosted, topic)] * chance.choice((1, 1, 2, 40))),
        "QueryAssignment": pb.QueryAssignmentRequest(**routed, group=group),
        "ReceiveMessage": receive,
        "AckMessage": raw.acks("normal", "readers", [(hosted.delivered_id, hosted.handle)]),
        "ChangeInvisibleDuration": change,
        "ForwardMessageToDeadLetterQueue": raw.buries("normal", "readers", handle=hosted.handle),
        "EndTransaction": raw.ends("transaction", hosted.transaction_id, resolution="COMMIT"),
        "RecallMessage": raw.recalls("delay", hosted.recall_handle),
        "SyncLiteSubscription": raw.lite("lite", "readers", action="PARTIAL_ADD", names=["l"]),
        "PullMessage": pb.PullMessageRequest(**here, batch_size=1),
        "GetOffset": pb.GetOffsetRequest(**here),
        "UpdateOffset": pb.UpdateOffsetRequest(**here, offset=1),
        "QueryOffset": pb.QueryOffsetRequest(message_queue=queue),
        "NotifyClientTermination": pb.NotifyClientTerminationRequest(group=group),
    }


def _message(hosted: Hosted, topic: str) -> Any:
    """What a topic, which is named for its type, takes."""
    own: dict[str, dict[str, Any]] = {
        "delay": {"delivery_timestamp_ms": hosted.due(3_600_000)},
        "fifo": {"message_group": "g"},
        "lite": {"lite_topic": "l"},
        "priority": {"priority": 1},
        "mixed": {"kind": "NORMAL"},
    }
    settings = {"kind": topic.upper(), **own.get(topic, {})}
    return raw.message(topic, b"body", tag="a", keys=["k"], user={"p": "1"}, **settings)
