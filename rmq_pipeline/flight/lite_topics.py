"""Lite topics of a client, from another process."""

from collections.abc import Sequence

import pyarrow as pa

from rmq_pipeline.flight.calls import Calls


class LiteTopics(Calls):
    """What each client of a consumer group is given of a topic of type lite."""

    def sync_lite_subscription(
        self,
        group: str,
        topic: str,
        *,
        client_id: str,
        action: str,
        lite_topics: Sequence[str] = (),
    ) -> list[str]:
        """Change the lite topics of a client; all that it has from now on.

        Args:
            action: add or remove these, replace all by these, or clear.

        Raises:
            MessageTypeError: the topic is not one of type lite.
            IllegalLiteTopicError: a name is no message group.
            LiteSubscriptionQuotaError: they are too many.
        """
        args = {
            "group": group,
            "topic": topic,
            "client_id": client_id,
            "action": action,
            "lite_topics": lite_topics if isinstance(lite_topics, str) else list(lite_topics),
        }
        return list(self._connection.call("sync_lite_subscription", args))

    def lite_subscriptions(self, group: str, topic: str) -> pa.Table:
        """client_id, lite_topic: what every client has subscribed to, in this order."""
        return self._table("lite_subscriptions", group=group, topic=topic)
