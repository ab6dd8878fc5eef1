"""Verbs: lite topics."""

from collections.abc import Sequence

import pyarrow as pa

from rmq_pipeline.access.rights import CONSUMES
from rmq_pipeline.broker.decide.members import SyncLiteSubscription, lite_topic
from rmq_pipeline.broker.state import members
from rmq_pipeline.broker.verbs.declaration import Opened, verb


class LiteTopics(Opened):
    """Verbs for lite topics."""

    @verb(rights=CONSUMES, repeatable=True)
    def sync_lite_subscription(
        self,
        group: str,
        topic: str,
        *,
        client_id: str,
        action: str,
        lite_topics: Sequence[str] = (),
    ) -> list[str]:
        """Change the lite topics that a client subscribes to.

        Messages that wait in them are delivered from the group's offset on. The subscription
        lasts until the client ends it, across restarts of the client and of the broker.

        Args:
            group: consumer group of the client.
            topic: topic of type lite.
            client_id: client that subscribes.
            action: add or remove these lite topics, replace all by these, or clear.
            lite_topics: names of message groups.

        Returns:
            All lite topics of the client from now on.

        Raises:
            MessageTypeError: the topic is not of type lite.
            IllegalLiteTopicError: a name is not a valid message group.
            LiteSubscriptionQuotaError: the client would have too many.
        """
        request = SyncLiteSubscription(
            group,
            topic,
            members.check_client(client_id),
            action,
            members.check_names(lite_topics),
        )
        after: tuple[str, ...] = self._engine.submit(request)
        return list(after)

    @verb(rights=CONSUMES, repeatable=True)
    def lite_subscriptions(self, group: str, topic: str) -> pa.Table:
        """Return client_id and lite_topic of all subscriptions, in this order."""
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
