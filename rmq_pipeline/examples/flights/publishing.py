"""Publishing departures exactly once, whatever happens to the broker meanwhile."""

import threading
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from rmq_pipeline.errors import BusyError, OperatorError
from rmq_pipeline.flight.client import Client

BATCH_ROWS: Final = 500
_PAUSE_S: Final = 0.2


def publish(
    client: Client,
    topic: str,
    *,
    messages: pa.Table,
    on_stored: Callable[[int], None] = lambda _: None,
) -> None:
    """Send the messages that the topic does not have yet, in their order.

    Nobody else sends to the topic, and a batch is stored whole or not at all: so how many messages
    the topic has says which one comes next. That is asked at the start, and again whenever an
    answer got lost with the broker that should have given it.

    Args:
        client: waits for a broker that is away, when it asks.
        topic: its messages are the first of ``messages``, or none.
        messages: schema.SEND.
        on_stored: told how many are stored, after each batch.

    Raises:
        OperatorError: somebody else sends to the topic.
        BrokerUnavailableError: the broker stayed away for longer than the client waits.
    """
    done = stored(client, topic)
    while done < messages.num_rows:
        batch = messages.slice(done, BATCH_ROWS)
        try:
            client.send(topic, batch)
        except BusyError:
            threading.Event().wait(_PAUSE_S)
            found = stored(client, topic)
            if found not in {done, done + batch.num_rows}:
                raise OperatorError(
                    f"{topic} has {found} messages, not {done} or {done + batch.num_rows}: "
                    "somebody else sends to it."
                ) from None
            done = found
        else:
            done += batch.num_rows
        on_stored(done)


def stored(client: Client, topic: str) -> int:
    """How many messages the topic was ever given."""
    return sum(queue["max_offset"] for queue in client.describe_topic(topic)["offsets"])
