"""Heartbeats of one member that cross each other, or its goodbye."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from rmq_pipeline.consumer.membership import Membership
from rmq_pipeline.verbs import Verbs
from tests.consumer.pieces import Gate
from tests.waiting import until


class Hub:
    """Answers heartbeats as a broker does; one that waits is answered when the test says so."""

    def __init__(self) -> None:
        self.version = 7
        self.members: set[str] = set()
        #: What was asked for, by heartbeats that have waited or still do.
        self.waited: list[list[str]] = []
        self.answer = Gate()
        self.refresh: Gate | None = None

    def heartbeat(
        self, group: str, client_id: str, *, topics: list[str], wait_ms: int, **_: Any
    ) -> dict[str, Any]:
        del group
        self.members.add(client_id)
        answer = {
            "version": self.version,
            "members": {client_id: {"topics": topics}},
            "resets": {topic: {0: 3} for topic in topics},
        }
        if wait_ms:
            self.waited.append(topics)
            self.answer.pass_through()
        elif self.refresh is not None:
            self.refresh.pass_through()
            self.members.add(client_id)
        return answer

    def leave(self, group: str, client_id: str) -> None:
        del group
        self.members.discard(client_id)
        self.answer.open()


class Setup:
    """A member with a list of topics, and what it knew each time the group had changed."""

    def __init__(self, **how: float) -> None:
        self.hub = Hub()
        self.topics = ["one"]
        self.known: list[set[str]] = []
        self.membership = Membership(
            cast(Verbs, self.hub),
            group="g",
            client_id="a",
            topics=lambda: list(self.topics),
            details=dict,
            changed=self._changed,
            **how,
        )
        self.membership.join()

    def _changed(self) -> None:
        self.known.append({topic for topic, _ in self.membership.members.resets})


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.membership.leave()


def test_a_heartbeat_waits_at_the_broker_from_the_first_moment_on() -> None:
    """A process that dies before is missed after 120 s only, and its queues stand."""
    setup = Setup(gap_s=60.0)

    waits = setup.hub.answer.arrived.wait(10)

    setup.membership._closed.set()
    setup.hub.answer.open()
    setup.membership.leave()
    assert waits


def test_an_answer_that_does_not_know_a_new_topic_is_forgotten(setup: Setup) -> None:
    assert setup.hub.answer.arrived.wait(30)
    setup.topics.append("two")
    setup.hub.version = 8
    setup.membership.refresh()

    setup.hub.answer.open()
    until(lambda: len(setup.hub.waited) >= 2)

    assert setup.hub.waited[:2] == [["one"], ["one", "two"]]
    assert setup.known == [{"one"}, {"one", "two"}]


def test_a_heartbeat_that_comes_after_the_goodbye_says_it_again(setup: Setup) -> None:
    assert setup.hub.answer.arrived.wait(30)
    late = setup.hub.refresh = Gate()
    refreshing = threading.Thread(target=setup.membership.refresh)
    refreshing.start()
    assert late.arrived.wait(30)

    setup.membership.leave()
    late.open()
    refreshing.join(30)

    assert setup.hub.members == set()
