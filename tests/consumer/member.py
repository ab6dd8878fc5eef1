"""A member of a consumer group in a process of its own, which notes every call of its listener.

Its only argument is JSON; it runs until SIGTERM, and then closes its consumer.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.pull_consumer import PullConsumer
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.flight.client import Client


class Journal:
    """Lines that survive the process once they are written."""

    def __init__(self, path: str, name: str) -> None:
        self._name = name
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, message: ReceivedMessage) -> None:
        """Something about a message; clocks are those of the machine."""
        line = {
            "what": what,
            "member": self._name,
            "at_ns": time.monotonic_ns(),
            "at_ms": time.time_ns() // 1_000_000,
            "queue_id": message.queue_id,
            "queue_offset": message.queue_offset,
            "body": message.body.decode(),
        }
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def main(
    *,
    address: str,
    name: str,
    group: str,
    topic: str,
    order: Any,
    journal: str,
    work_s: float,
    pace: dict[str, Any],
) -> None:
    """Consume until SIGTERM."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    notes = Journal(journal, name)
    busy = threading.Event()

    def listen(messages: Sequence[ReceivedMessage], _context: Any) -> str:
        for message in messages:
            notes.note("begin", message)
        busy.wait(work_s)
        for message in messages:
            notes.note("end", message)
        return "success"

    with Client(address) as client:
        if order == "pull":
            pull(client, group, topic=topic, name=name, notes=notes, over=over, work_s=work_s)
            return
        with (
            PushConsumer(
                client,
                group,
                order=order,
                start_from="first",
                threads=4,
                client_id=name,
                pace=Pace(**pace),
            )
            .subscribe(topic)
            .listen(listen)
        ):
            over.wait()


def pull(
    client: Client,
    group: str,
    *,
    topic: str,
    name: str,
    notes: Journal,
    over: threading.Event,
    work_s: float,
) -> None:
    """Consume by a loop of its own, until it is over."""
    busy = threading.Event()
    with PullConsumer(
        client, group, start_from="first", auto_commit_ms=300, client_id=name
    ).subscribe(topic) as consumer:
        while not over.is_set():
            for message in consumer.messages(0.2, limit=50):
                notes.note("begin", message)
                busy.wait(work_s)
                notes.note("end", message)
                if over.is_set():
                    break


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(**json.loads(sys.argv[1]))
