"""A departure board: a process of its own, beside the pipeline, that is told of each departure.

Too quick for runs: it shows a departure some milliseconds after it was sent, each aircraft's in
order. Start it as often as you like; the members share the queues. With a broker that runs
(`rmq up`, `rmq demo --keep`), RMQ_HOME or RMQ_FLIGHT saying where:
``python -m rmq_pipeline.examples.flights.board``
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from rmq_pipeline.consumer.listener import KeyContext, Result
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.examples.flights.pipeline import DEPARTURES
from rmq_pipeline.flight.client import Client

GROUP: Final = "departure_board"


class Board:
    """The flights of each aircraft, in the order of their departures."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.flights: defaultdict[str, list[str]] = defaultdict(list)
        self._show = show

    def told(self, messages: Sequence[ReceivedMessage], context: KeyContext) -> Result:
        """The listener: the next departures of one aircraft, which no other thread has."""
        for message in messages:
            flight = json.loads(message.body)
            name = f"{flight['carrier']}{flight['flight']}"
            self.flights[str(context.key)].append(name)
            late = "cancelled" if flight["dep_time"] is None else f"{flight['dep_delay']:+} min"
            self._show(f"{name:8} {flight['origin']} to {flight['dest']}  {late}")
        return Result.SUCCESS


def consumer(client: Client, board: Board) -> PushConsumer:
    """A member of the board's group; ``with`` it, or start and close it."""
    DEPARTURES.ensure(client)
    client.ensure_group(GROUP, order="message_group")
    member = PushConsumer(client, GROUP, order="key", start_from="first", threads=4, batch=32)
    return member.subscribe(DEPARTURES.name).listen(board.told)


def main() -> None:
    """Show departures until interrupted."""
    with Client() as client, consumer(client, Board(print)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
