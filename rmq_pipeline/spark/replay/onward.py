"""Publication of messages from the handler during a replay, if requested.

A message without an id gets an id derived from its origin (see ``handling/origins.py``). A repeated
replay, of the same hours or others, therefore sends the same ids. A topic that suppresses
repetitions stores each message once.
"""

from collections.abc import Iterable, Mapping

import pyarrow as pa

from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.replay.republishing import BATCH_ROWS, send


def check_topics(client: Client, topics: Iterable[str]) -> None:
    """Check that a repeated replay changes nothing in these topics.

    Raises:
        RequestError: a topic stores repetitions.
    """
    for topic in topics:
        if client.describe_topic(topic)["deduplicate"] != "message_id":
            raise RequestError(
                f"Topic {topic} stores repetitions: with deduplicate = message_id a replay may"
                " publish to it."
            )


def send_onward(client: Client, messages: Mapping[str, list[pa.Table]]) -> dict[str, int]:
    """Send published messages; return topic -> number of messages that were not stored before.

    Args:
        client: client of the broker.
        messages: topic -> schema.SEND.
    """
    stored: dict[str, int] = {}
    for topic, tables in messages.items():
        stored[topic] = 0
        for table in tables:
            for start in range(0, table.num_rows, BATCH_ROWS):
                stored[topic] += send(client, topic, messages=table.slice(start, BATCH_ROWS))
    return stored
