"""A push consumer whose listener ends its process over one message; what it did is in a file.

Its only argument is JSON; it ends by itself when the topic is empty.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.flight.client import Client

#: What the process ends with, by the message and by itself.
DIED: Final = 9
#: A message that ends it.
END: Final = b"end"


def main(*, address: str, group: str, topic: str, order: Any, done: str) -> None:
    """Consume until nothing is left."""
    notes = os.open(done, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    idle = threading.Event()

    def listen(messages: Sequence[ReceivedMessage], _context: Any) -> str:
        for message in messages:
            if message.body == END:
                os._exit(DIED)
            os.write(notes, message.body + b"\n")
        return "success"

    query = f"SELECT sum(lag) AS lag FROM lag WHERE consumer_group = '{group}'"
    with (
        Client(address) as client,
        PushConsumer(client, group, order=order, start_from="first", client_id="worker")
        .subscribe(topic)
        .listen(listen),
    ):
        while client.sql(query)["lag"][0].as_py():
            idle.wait(0.05)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
