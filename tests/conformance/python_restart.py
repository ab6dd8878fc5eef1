"""A producer and push consumers of the official Python client that live through a restart.

Told where to connect, it sends numbers to two topics one after another, each until it is answered,
and listens to both, until its input ends; then it prints what was sent and heard, when, and with
which receipts.
"""

import json
import sys
import threading
import time
from typing import Any

from rocketmq import ConsumeResult, Message, MessageListener

from tests.conformance.python_client import Place, message, push, started

GROUPS = 4
PAUSE_S = 0.01
#: What was on its way to a consumer when the broker died is leased for a minute.
PATIENCE_S = 75.0


class Log(MessageListener):  # type: ignore[misc]
    """What was heard: number, message group, and when."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str, int]] = []
        self.receipts: list[tuple[int, str]] = []

    def consume(self, message: Message) -> ConsumeResult:
        self.receipts.append((int(message.body), message.receipt_handle))
        self.heard.append((int(message.body), message.message_group or "", _now_ms()))
        return ConsumeResult.SUCCESS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def send_on(place: Place, stop: threading.Event) -> list[tuple[int, int]]:
    """Numbers, and when each was answered."""
    topics = [place.topic("restart"), place.topic("restart-fifo")]
    sent = []
    number = 0
    with started(place.producer(*topics)) as producer:
        while not stop.wait(PAUSE_S):
            for topic, settings in zip(
                topics, ({}, {"message_group": f"g{number % GROUPS}"}), strict=True
            ):
                while not _sent(producer, message(topic, str(number), **settings)):
                    stop.wait(PAUSE_S)
            sent.append((number, _now_ms()))
            number += 1
    return sent


def _sent(producer: Any, made: Message) -> bool:
    try:
        producer.send(made)
    except Exception:  # noqa: BLE001 - the broker is away: that is what is tried here
        return False
    return True


def stop_at_the_end(stop: threading.Event) -> None:
    """Stop when the input ends."""
    sys.stdin.read()
    stop.set()


def main() -> None:
    place = Place(**json.loads(sys.argv[1])["place"])
    stop = threading.Event()
    logs = {name: Log() for name in ("restart", "restart-fifo")}
    consumers = [
        push(place, place.topic(name), f"{place.topic(name)}-group", log)
        for name, log in logs.items()
    ]
    with started(*consumers):
        threading.Thread(target=stop_at_the_end, args=(stop,), daemon=True).start()
        sent = send_on(place, stop)
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at and any(
            len({n for n, _, _ in log.heard}) < len(sent) for log in logs.values()
        ):
            stop.clear()
            stop.wait(PAUSE_S)
        heard = {name: log.heard for name, log in logs.items()}
        receipts = {name: log.receipts for name, log in logs.items()}
        found = {"sent": sent, "heard": heard, "receipts": receipts}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
