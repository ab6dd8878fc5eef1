"""No client receives from system topics, and their names are reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


HIDDEN = ("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC")
ONE = pa.table({"body": [b"x"]})
#: Every verb by which a group or a sender would touch a topic: (broker, group, topic).
VERBS: dict[str, Callable[[Any, str, str], object]] = {
    "reset_offset": lambda b, g, t: b.reset_offset(g, t, to_earliest=True),
    "reset_offset of a queue": lambda b, g, t: b.reset_offset(g, t, to_offset=0, queue_id=0),
    "reset_offset to a time": lambda b, g, t: b.reset_offset(g, t, to_time_ms=1),
    "update_offsets": lambda b, g, t: b.update_offsets(g, t, offsets={0: 0}),
    "commit_offsets": lambda b, g, t: b.commit_offsets(g, t, offsets={0: (-1, 0)}, client_id="c"),
    "committed_offsets": lambda b, g, t: b.committed_offsets(g, t),
    "start_offsets": lambda b, g, t: b.start_offsets(g, t, where="first"),
    "clone_offsets": lambda b, g, t: b.clone_offsets(g, g, topic=t),
    "receive": lambda b, g, t: b.receive(g, t),
    "subscribe": lambda b, g, t: b.subscribe(g, t),
    "pull": lambda b, _, t: b.pull(t, {0: 0}),
    "lock_queues": lambda b, g, t: b.lock_queues(g, t, queue_ids=[0], client_id="c"),
    "send": lambda b, _, t: b.send(t, ONE),
    "send_half": lambda b, _, t: b.send_half(t, ONE, producer_group="p"),
    "create_topic": lambda b, _, t: b.create_topic(t),
    "ensure_topic": lambda b, _, t: b.ensure_topic(t),
    "alter_topic": lambda b, _, t: b.alter_topic(t, queues=64),
    "delete_topic": lambda b, _, t: b.delete_topic(t, force=True),
}


@pytest.mark.parametrize("topic_name", HIDDEN)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_what_waits_for_its_time(
    endpoint: Endpoint, group: Make, verb: str, topic_name: str
) -> None:
    broker, readers = endpoint.broker, str(group())
    before = endpoint.sql("SELECT count(*) AS n FROM progress")

    with pytest.raises(errors.IllegalTopicError):
        VERBS[verb](broker, readers, topic_name)

    assert endpoint.sql("SELECT count(*) AS n FROM progress") == before


@pytest.mark.parametrize(
    "name", ["BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC", "rmq_sys_x", "TBW102"]
)
def test_names_of_rocketmqs_own_topics_are_kept(endpoint: Endpoint, name: str) -> None:
    broker = endpoint.broker
    for make in (broker.create_topic, broker.ensure_topic):
        with pytest.raises(errors.IllegalTopicError, match="reserved for the system"):
            make(name)
    with pytest.raises(errors.IllegalTopicError):
        broker.send(name, ONE)


@pytest.mark.parametrize("name", ["no/name", "", " ", "t" * 128, "%DLQ%" + "g" * 251, "ü"])
def test_a_name_that_no_topic_can_have_is_not_to_be_created(
    endpoint: Endpoint, group: Make, name: str
) -> None:
    broker, readers = endpoint.broker, str(group())
    for use in (
        lambda: broker.send(name, ONE),
        lambda: broker.receive(readers, name),
        lambda: broker.describe_topic(name),
    ):
        with pytest.raises(errors.IllegalTopicError) as caught:
            use()
        assert "create" not in str(caught.value)


def test_a_name_that_a_topic_could_have_is_not_found(endpoint: Endpoint) -> None:
    for name in ("nowhere", "%DLQ%nobody", "%RETRY%nobody"):
        with pytest.raises(errors.TopicNotFoundError):
            endpoint.broker.describe_topic(name)


@pytest.mark.parametrize("name", ["no/name", "", "g" * 121, "CID_RMQ_SYS_x"])
def test_a_name_that_no_group_can_have_is_not_to_be_created(endpoint: Endpoint, name: str) -> None:
    with pytest.raises(errors.IllegalConsumerGroupError):
        endpoint.broker.describe_group(name)
