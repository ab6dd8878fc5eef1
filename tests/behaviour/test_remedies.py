"""An error says what to do about this very case, at every endpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.access.source import check_free

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint

FORGED = pa.table({"recall_handle": ["0" * 48]})
NO_HANDLE = pa.table({"recall_handle": ["forged"]})
AHEAD = pa.table({"body": [b"x"], "deliver_at_ms": pa.array([10**13], pa.int64())})

Ask = Callable[[Any], object]


@pytest.mark.every_endpoint
@pytest.mark.parametrize(
    ("ask", "remedy"),
    [
        (lambda b: b.create_topic("rmq_sys_mine"), "Choose another name."),
        (lambda b: b.create_topic("a b"), "Use 1 to 127 of the characters A-Z a-z 0-9 _ - % |."),
        (lambda b: b.create_group("CID_RMQ_SYS_mine"), "Choose another name."),
        (lambda b: b.recall("t", FORGED), "Use the recall_handle of a send to this topic,"),
        (lambda b: b.recall("t", NO_HANDLE), "Pass the recall_handle exactly as the broker"),
        (lambda b: b.ack(["forged"]), "Pass the receipt_handle exactly as the broker"),
        (lambda b: b.read("t", 9, offset=0, limit=1), "Use a queue_id from 0 to"),
        (lambda b: b.read("t", 0, offset=9, limit=1), "Use an offset between the queue's"),
        (lambda b: b.receive("g", "t", filter="||"), "Give * or tags joined by ||."),
        (lambda b: b.receive("g", "t", filter="a", filter_type="x"), "Set filter_type to tag or"),
        (
            lambda b: b.receive("t", "g"),
            "Check the name and the order: receive(group, topic) in Python, `rmq receive TOPIC",
        ),
        (
            lambda b: b.subscribe("t", "g"),
            "Check the name and the order: receive(group, topic) in Python, `rmq",
        ),
        (
            lambda b: b.describe_topic("g"),
            "Check the name and the order: receive(group, topic) in Python, `rmq",
        ),
        (lambda b: b.send("t", AHEAD), "Use a time at most 60000 ms ahead, or raise delay_max_ms."),
    ],
)
def test_the_remedy_is_that_of_the_case(endpoint: Endpoint, ask: Ask, remedy: str) -> None:
    broker = endpoint.reopen(delay_max_ms=60_000)
    broker.create_topic("t", queues=1, type="mixed")
    broker.create_group("g")

    with pytest.raises(errors.RocketMQError) as refused:
        ask(broker)

    assert refused.value.remedy.startswith(remedy)
    assert str(refused.value).endswith(refused.value.remedy)


def test_a_port_that_is_taken_is_no_request_to_change() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(errors.RequestError, match="Choose another address or port") as no:
            check_free("127.0.0.1", port)

        assert f"by process {os.getpid()} (" in no.value.message
