"""Topics that were made, grown or deleted in one frame with messages are as whole after a crash."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.admin import AlterTopic, CreateTopic, DeleteTopic
from rmq_pipeline.errors import StorageError, TopicNotFoundError
from tests.broker.held import Held
from tests.broker.sealed_home import messages, open_broker

QUEUES = 8
#: Messages before the topic grows, all of them in its only queue.
BEFORE = 3
FAILED = 9


class Dying(Held):
    """A broker whose process ends as soon as its next frame is on disk, before dispatch sees it."""

    dying = False

    @override
    def step(self, name: str) -> None:
        if self.dying and name == "written":
            os._exit(FAILED)
        super().step(name)


@pytest.fixture
def undispatched(held: Held) -> Held:
    """A broker that leaves what it does in the log until it rebuilds its state, as ``fail`` has it.

    It stops nowhere.
    """
    held.let_go.set()
    held.broker.send("t", messages(BEFORE))
    held.engine.dispatched()
    held.engine.dispatcher.stop()
    return held


def grow(held: Held) -> None:
    """A topic grows, and gets a message for each of its queues, in one frame."""
    sends = [held.prepared(messages(1, start=BEFORE + i)) for i in range(QUEUES)]
    answers = held.engine.writer.submit_together([AlterTopic("t", QUEUES, None), *sends])
    assert not [each for each in answers if isinstance(each, Exception)]


def grow_and_die(home: Path) -> None:
    held = Dying(home)
    held.broker.send("t", messages(BEFORE))
    held.engine.dispatched()
    held.dying = True
    grow(held)


def fail(held: Held, topic: str = "t") -> None:
    """A send fails to be written, and the state is rebuilt."""
    state = held.engine.state
    held.arm(error="the disk fails")
    with pytest.raises(StorageError):
        held.broker.send(topic, messages(1))
    assert held.engine.state is not state


def bodies(broker: Broker, topic: str = "t") -> list[bytes]:
    found: list[bytes] = []
    for queue_id in range(len(broker.describe_topic(topic)["offsets"])):
        found += broker.read(topic, queue_id, offset=0, limit=100)["body"].to_pylist()
    return found


def test_a_home_opens_again_after_a_topic_grew_in_one_frame_with_its_messages(home: Path) -> None:
    dying = multiprocessing.get_context("spawn").Process(target=grow_and_die, args=(home,))
    dying.start()
    dying.join()
    assert dying.exitcode == FAILED

    with open_broker(home) as broker:
        assert len(broker.describe_topic("t")["offsets"]) == QUEUES
        assert sorted(bodies(broker)) == sorted(messages(BEFORE + QUEUES)["body"].to_pylist())
        broker.send("t", messages(QUEUES))
        assert len(bodies(broker)) == BEFORE + 2 * QUEUES


def test_a_state_is_rebuilt_after_a_topic_grew_in_one_frame_with_its_messages(
    undispatched: Held,
) -> None:
    grow(undispatched)
    before = [queue.max_offset for queue in undispatched.engine.state.topic("t").queues]

    fail(undispatched)

    after = undispatched.engine.state.topic("t")
    assert [queue.max_offset for queue in after.queues] == before
    assert sorted(bodies(undispatched.broker)) == sorted(
        messages(BEFORE + QUEUES)["body"].to_pylist()
    )


def created(name: str) -> CreateTopic:
    return CreateTopic(name, type="normal", queues=1, partition_time="stored", ensure=False)


def test_messages_of_the_frame_that_made_their_topic_are_there(undispatched: Held) -> None:
    state = undispatched.engine.state
    send = undispatched.prepared(messages(2))
    send = replace(send, topic="new", topic_id=state.next_topic_id)
    undispatched.engine.writer.submit_together([created("new"), send])

    fail(undispatched)

    assert undispatched.engine.state.topic("new").queues[0].max_offset == 2
    assert bodies(undispatched.broker, "new") == messages(2)["body"].to_pylist()


def test_a_name_that_was_given_again_in_one_frame_is_that_of_the_new_topic(
    undispatched: Held,
) -> None:
    old = undispatched.engine.state.topic("t").topic.topic_id
    answers = undispatched.engine.writer.submit_together(
        [undispatched.prepared(messages(1)), DeleteTopic("t", force=False), created("t")]
    )

    undispatched.broker.create_topic("u", queues=1)
    fail(undispatched, "u")

    state = undispatched.engine.state
    assert state.topic("t").topic == answers[-1]
    assert state.topic("t").messages() == 0
    assert old not in state.topics


def test_a_topic_that_was_made_and_deleted_in_one_frame_is_gone(undispatched: Held) -> None:
    undispatched.engine.writer.submit_together(
        [created("new"), DeleteTopic("new", force=False), created("new")]
    )
    undispatched.engine.writer.submit_together([DeleteTopic("new", force=False)])

    fail(undispatched)

    with pytest.raises(TopicNotFoundError):
        undispatched.engine.state.topic("new")
    assert sorted(undispatched.engine.state.topic_ids.values()) == sorted(
        undispatched.engine.state.topics
    )
