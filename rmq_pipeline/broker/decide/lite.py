"""Changing a client's lite topics; the log stores them."""

import json
from dataclasses import dataclass

from rmq_pipeline.broker.decide.deliver import subscribe_events
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.event_rows import single
from rmq_pipeline.broker.state.lite import synced
from rmq_pipeline.broker.state.state import State, TopicState
from rmq_pipeline.errors import MessageTypeError
from rmq_pipeline.store.events import Kind


def lite_topic(state: State, name: str) -> TopicState:
    """Return the topic, which must be of type lite.

    Raises:
        TopicNotFoundError: the topic does not exist.
        MessageTypeError: it is of another type.
    """
    topic = state.topic(name)
    if topic.topic.type != "lite":
        raise MessageTypeError(
            f"Topic {name} is {topic.topic.type} and has no lite topics.",
            remedy="Subscribe to lite topics of a topic of type lite.",
        )
    return topic


@dataclass(frozen=True, slots=True)
class SyncLiteSubscription(Request):
    """Request that changes a client's lite topics; it gets messages that wait in new ones."""

    group: str
    topic: str
    client_id: str
    action: str
    names: tuple[str, ...]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event with all lite topics of the client, if they changed.

        The answer is the client's lite topics.
        """
        topic, group = lite_topic(state, self.topic), state.group(self.group)
        topic_id = topic.topic.topic_id
        before = state.subscriptions.of(group.group_id, topic_id, client_id=self.client_id)
        after = synced(before, self.action, names=self.names)
        decision = Decision(after)
        if after == before.names:
            return decision
        decision.events.extend(subscribe_events(state, topic, group=group, now_ms=now_ms))
        decision.events.append(
            single(
                Kind.LITE_SUBSCRIPTION,
                now_ms,
                group_id=group.group_id,
                topic_id=topic_id,
                client_id=self.client_id,
                detail=json.dumps(after),
            )
        )
        return decision
