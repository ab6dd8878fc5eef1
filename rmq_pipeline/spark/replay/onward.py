"""What the handler publishes in a replay, sent onward when that is asked for.

A message without an id of its own gets one of the replay's id and its content, so that a replay
that runs again sends the same ids, and a topic that drops repetitions stores each message once.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import pyarrow as pa

from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.replay.republishing import BATCH_ROWS, send


def check_topics(client: Client, topics: Iterable[str]) -> None:
    """See to it that a replay that runs again changes nothing in these topics.

    Raises:
        RequestError: one stores repetitions.
    """
    for topic in topics:
        if client.describe_topic(topic)["deduplicate"] != "message_id":
            raise RequestError(
                f"Topic {topic} stores repetitions: with deduplicate = message_id a replay may"
                " publish to it."
            )


def send_onward(
    client: Client, messages: Mapping[str, list[pa.Table]], *, replay_id: str
) -> dict[str, int]:
    """Send what was published; topic -> messages that were not stored before.

    Args:
        client: of the broker.
        messages: topic -> schema.SEND.
        replay_id: the same again is the same messages.
    """
    stored: dict[str, int] = {}
    for topic, tables in messages.items():
        copies: Counter[str] = Counter()
        stored[topic] = 0
        for table in tables:
            for start in range(0, table.num_rows, BATCH_ROWS):
                part = table.slice(start, BATCH_ROWS)
                known = identified(part, f"{replay_id}/{topic}", copies=copies)
                stored[topic] += send(client, topic, messages=known)
    return stored


def identified(messages: pa.Table, label: str, *, copies: Counter[str]) -> pa.Table:
    """The messages, each with an id.

    Args:
        messages: schema.SEND.
        label: what tells these ids from others of the same content.
        copies: how many of a content there were before; counted on.
    """
    at = messages.column_names.index("message_id")
    own = messages.column(at).to_pylist()
    ids = []
    for mine, row in zip(own, messages.drop_columns(["message_id"]).to_pylist(), strict=True):
        content = hashlib.sha256(f"{label}/{row!r}".encode()).hexdigest()[:24]
        number = copies[content]
        copies[content] += 1
        ids.append(mine or f"{content}-{number}")
    return messages.set_column(at, "message_id", pa.array(ids, pa.string()))
