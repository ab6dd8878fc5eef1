"""What operators do: topics grow, groups are altered and put back, clients ask for lite topics."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rmq_pipeline import errors
from tests.simulation.consuming import Consuming
from tests.simulation.crashing import Trouble
from tests.simulation.model.consumer import Consumer
from tests.simulation.scenery import (
    ANY,
    CLIENTS,
    KEYS,
    MOST_QUEUES,
    POLICIES,
    RATES,
    ROWS,
    SUPPRESSING,
    TROUBLE,
    Rows,
    some,
)


class Administering(Consuming):
    """Histories of what is sent and read while it is altered."""

    @rule(which=ANY, earliest=st.booleans())
    def reset_offset(self, which: int, earliest: bool) -> None:
        consumer = self.consumer(which)
        if self.record(consumer):
            where = {"to_earliest": True} if earliest else {"to_latest": True}
            self.crashing.broker.reset_offset(consumer.name, consumer.topic, **where)
            consumer.reset(self.now, earliest=earliest)

    @rule(
        which=ANY,
        policy=st.sampled_from(POLICIES),
        rate=st.sampled_from(RATES),
        deduplicate=st.sampled_from(("none", "message_id", "key")),
        what=st.sampled_from(("policy", "rate", "deduplicate")),
        trouble=TROUBLE,
    )
    def alter(
        self,
        which: int,
        policy: str,
        rate: int,
        deduplicate: str,
        what: str,
        trouble: Trouble | None,
    ) -> None:
        """One of these, of a consumer group or a topic."""
        if what == "policy":
            self.alter_policy(self.consumer(which), policy)
        elif what == "rate":
            self.set_rate(self.consumer(which), rate, trouble)
        else:
            self.suppress(self.names[which % len(self.names)], deduplicate, trouble)

    def alter_policy(self, consumer: Consumer, policy: str) -> None:
        """What is parked was so under the old policy: groups without any are altered."""
        if consumer.by_queue and policy == "dead_letter_group":
            with pytest.raises(errors.RequestError, match="queue"):
                self.crashing.broker.alter_group(consumer.name, on_failure=policy)
        elif self.record(consumer) and not consumer.having("parked"):
            self.crashing.broker.alter_group(consumer.name, on_failure=policy)
            consumer.on_failure = policy

    def suppress(self, name: str, deduplicate: str, trouble: Trouble | None) -> None:
        """Repetitions are stored again, or not any more: of what is sent from the next ms on."""
        if name in SUPPRESSING:
            how = {"deduplicate": deduplicate}
            if self.crashing.ask("alter_topic", name, trouble=trouble, **how)[1]:
                self.model.topics[name].suppress(deduplicate)
                self.crashing.clock.advance(1)

    @rule(which=ANY, more=st.integers(1, 2), rows=ROWS, trouble=TROUBLE)
    def grow(self, which: int, more: int, rows: Rows, trouble: Trouble | None) -> None:
        """More queues: message groups move, and keep their order with what they get there."""
        name = self.names[which % len(self.names)]
        topic = self.model.topics[name]
        queues = min(MOST_QUEUES, topic.queues + more)
        if queues > topic.queues:
            _, done = self.crashing.ask("alter_topic", name, queues=queues, trouble=trouble)
            topic.queues = queues if done else topic.queues
            self.send(which, rows, "fifo", False, None)

    @precondition(lambda self: any(one.by_queue for one in self.model.consumers))
    @rule(
        which=ANY,
        limit=st.sampled_from((1, 3, 100)),
        attempts=st.lists(st.sampled_from(("one", "two", "")), min_size=1, max_size=4),
    )
    def repeat(self, which: int, limit: int, attempts: list[str]) -> None:
        """A client that has not heard of what it was given asks for it again."""
        lines = [one for one in self.model.consumers if one.by_queue]
        for attempt in attempts:
            self.take(lines[which % len(lines)], limit, attempt=attempt)

    @precondition(lambda self: any(one.by_queue for one in self.model.consumers))
    @rule(
        which=ANY,
        limits=st.lists(st.sampled_from((1, 3, 8, 8)), min_size=3, max_size=5),
        said=st.one_of(
            st.sampled_from((["retry", None, None], [None, "ack"], [None])),
            some(st.sampled_from(("ack", "ack", "retry", "retry", None, None, "dead_letter"))),
        ),
        after=st.sampled_from((0, 0, 1_000)),
        pause=st.sampled_from((0, 500, 500)),
    )
    def struggle(
        self, which: int, limits: list[int], said: list[str | None], after: int, pause: int
    ) -> None:
        """The same messages again and again, never all of them."""
        numbers = [n for n, one in enumerate(self.model.consumers) if one.by_queue]
        number = numbers[which % len(numbers)]
        for limit in limits:
            self.take(self.model.consumers[number], limit, duration=500)
            self.settle(number, said, after, False, False, [None], {}, None, None)
            self.crashing.clock.advance(pause)

    @precondition(lambda self: "chats" in self.model.topics)
    @rule(
        client=st.sampled_from(CLIENTS[1:]),
        action=st.sampled_from(("add", "add", "remove", "replace", "clear")),
        asked=st.sets(st.sampled_from(KEYS), max_size=3),
        trouble=TROUBLE,
    )
    def ask_for_lite_topics(
        self, client: str, action: str, asked: set[str], trouble: Trouble | None
    ) -> None:
        [consumer] = [one for one in self.model.consumers if one.clients]
        asked = set() if action == "clear" else asked
        before = consumer.clients[client]
        after = {
            "add": before | asked,
            "remove": before - asked,
            "replace": asked,
            "clear": set(),
        }[action]
        has, done = self.crashing.ask(
            "sync_lite_subscription",
            consumer.name,
            consumer.topic,
            client_id=client,
            action=action,
            lite_topics=sorted(asked),
            trouble=trouble,
        )
        if done:
            consumer.clients[client] = after
            assert has is None or has == sorted(after)
