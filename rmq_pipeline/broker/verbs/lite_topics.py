"""Lite topics: small ordered topics inside one topic, given to the clients that asked for them."""

from collections.abc import Sequence

import pyarrow as pa

from rmq_pipeline.broker.receiving import lite
from rmq_pipeline.broker.receiving.subscribing import SyncLiteSubscription, lite_topic
from rmq_pipeline.broker.verbs.opened import Opened


class LiteTopics(Opened):
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

        What waits of them is delivered from where the group stands. They are kept until the client
        gives them up, across restarts of it and of the broker.

        Args:
            action: add or remove these, replace all by these, or clear.

        Raises:
            MessageTypeError: the topic is not one of type lite.
            IllegalLiteTopicError: a name is no message group.
            LiteSubscriptionQuotaError: they are too many.
        """
        request = SyncLiteSubscription(
            group,
            topic,
            lite.check_client(client_id),
            action,
            lite.check_names(lite_topics),
        )
        after: tuple[str, ...] = self._engine.submit(request)
        return list(after)

    def lite_subscriptions(self, group: str, topic: str) -> pa.Table:
        """client_id, lite_topic: what every client has subscribed to, in this order."""
        state = self._engine.state
        found = lite_topic(state, topic)
        clients = state.subscriptions.clients(state.group(group).group_id, found.topic.topic_id)
        rows = [(client, name) for client in sorted(clients) for name in clients[client].names]
        return pa.table(
            {
                "client_id": pa.array([client for client, _ in rows], pa.string()),
                "lite_topic": pa.array([name for _, name in rows], pa.string()),
            }
        )
