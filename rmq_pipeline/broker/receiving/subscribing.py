"""Which lite topics a client is given: changed by the client, kept in the log."""

import json
from dataclasses import dataclass

from rmq_pipeline.broker.event_rows import single
from rmq_pipeline.broker.receiving.deliver import subscribe_events
from rmq_pipeline.broker.receiving.lite import synced
from rmq_pipeline.broker.state import State, TopicState
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import MessageTypeError
from rmq_pipeline.store.events import Kind


def lite_topic(state: State, name: str) -> TopicState:
    """The topic of that name, which is one of type lite.

    Raises:
        TopicNotFoundError: there is none.
        MessageTypeError: it is of another type.
    """
    topic = state.topic(name)
    if topic.topic.type != "lite":
        raise MessageTypeError(f"Topic {name} is {topic.topic.type} and has no lite topics.")
    return topic


@dataclass(frozen=True, slots=True)
class SyncLiteSubscription(Request):
    """A client's lite topics change; what waits of new ones is for it from now on."""

    group: str
    topic: str
    client_id: str
    action: str
    names: tuple[str, ...]

    def decide(self, state: State, now_ms: int) -> Decision:
        """One event with all its lite topics, unless nothing changes; the answer is them."""
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
