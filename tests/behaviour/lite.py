"""Clients of lite topics, and messages for them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.behaviour.conftest import Endpoint


class Clients:
    """Clients of one consumer group on one topic."""

    def __init__(self, endpoint: Endpoint, topic: str, group: str) -> None:
        self.endpoint = endpoint
        self.topic = topic
        self.group = group

    def sync(self, client: str, action: str, *names: str) -> list[str]:
        found = self.endpoint.broker.sync_lite_subscription(
            self.group, self.topic, client_id=client, action=action, lite_topics=names
        )
        return list(found)

    def receive(self, client: str, **how: Any) -> pa.Table:
        return self.endpoint.broker.receive(self.group, self.topic, client_id=client, **how)

    def drain(self, client: str, *, limit: int = 1_000) -> dict[str, list[int]]:
        """All that comes and is acknowledged, by lite topic."""
        found = defaultdict(list)
        while (got := self.receive(client, limit=limit)).num_rows:
            for row in got.to_pylist():
                found[row["message_group"]].append(int(row["body"]))
            self.endpoint.broker.ack(got)
        return dict(found)


def to_lite(n: int, names: Sequence[str], *, start: int = 0) -> pa.Table:
    """``n`` messages, dealt to these lite topics in turn."""
    return pa.table(
        {
            "body": [b"%d" % i for i in range(start, start + n)],
            "lite_topic": [names[i % len(names)] for i in range(n)],
        }
    )
