"""Members of a consumer group know of each other, and of resets, by their heartbeats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits
from rmq_pipeline.group import GroupMembers
from tests.waiting import until

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tests.behaviour.conftest import Endpoint, Make

TIMEOUT_MS = 120_000


@pytest.fixture
def name(topic: Make) -> str:
    return str(topic(queues=4))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def beat(
    endpoint: Endpoint, readers: str, client_id: str, *topics: str, **how: Any
) -> GroupMembers:
    details = how.pop("details", {})
    return endpoint.broker.heartbeat(readers, client_id, topics=topics, details=details, **how)


def waiting(
    endpoint: Endpoint, readers: str, client_id: str, *topics: str, wait_ms: int = 900
) -> Future[GroupMembers]:
    """A heartbeat that waits for another version than this one."""
    known = beat(endpoint, readers, client_id, *topics)["version"]
    found = endpoint.begin(
        lambda: beat(endpoint, readers, client_id, *topics, known_version=known, wait_ms=wait_ms)
    )
    assert not found.done()
    return found


@pytest.mark.every_endpoint
def test_members_see_each_other_and_their_topics(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    alone = beat(endpoint, readers, "a", name)
    both = beat(endpoint, readers, "b", name, "another")

    assert alone["members"] == {"a": {"topics": [name]}}
    assert both["members"] == {"a": {"topics": [name]}, "b": {"topics": [name, "another"]}}
    assert both["version"] != alone["version"]


def test_another_group_has_members_of_its_own(
    endpoint: Endpoint, name: str, readers: str, group: Make
) -> None:
    beat(endpoint, readers, "a", name)

    assert set(beat(endpoint, group(), "b", name)["members"]) == {"b"}


def test_nothing_changes_while_everybody_stays(endpoint: Endpoint, name: str, readers: str) -> None:
    beat(endpoint, readers, "a", name)
    first = beat(endpoint, readers, "b", name)

    assert beat(endpoint, readers, "a", name, details={"cached": 7}) == first
    assert beat(endpoint, readers, "b", name) == first


def test_who_knows_another_version_does_not_wait(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    version = beat(endpoint, readers, "a", name)["version"]

    assert beat(endpoint, readers, "a", name, known_version=version - 1, wait_ms=60_000)


@pytest.mark.parametrize("wait_ms", [900, 30_000])
def test_a_waiting_member_is_woken_when_another_comes(
    endpoint: Endpoint, name: str, readers: str, wait_ms: int
) -> None:
    found = waiting(endpoint, readers, "a", name, wait_ms=wait_ms)

    beat(endpoint, readers, "b", name)

    assert set(found.result(60)["members"]) == {"a", "b"}


def test_a_waiting_member_is_woken_when_another_has_other_topics(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    beat(endpoint, readers, "b", name)
    found = waiting(endpoint, readers, "a", name)

    beat(endpoint, readers, "b", "another")

    assert found.result(60)["members"]["b"] == {"topics": ["another"]}


@pytest.mark.parametrize("wait_ms", [900, 30_000])
def test_a_waiting_member_is_woken_when_another_leaves(
    endpoint: Endpoint, name: str, readers: str, wait_ms: int
) -> None:
    beat(endpoint, readers, "b", name)
    found = waiting(endpoint, readers, "a", name, wait_ms=wait_ms)

    endpoint.broker.leave(readers, "b")

    assert set(found.result(60)["members"]) == {"a"}


def test_a_waiting_member_is_told_when_its_time_has_come(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    found = waiting(endpoint, readers, "a", name)

    endpoint.advance(900)

    assert set(found.result(60)["members"]) == {"a"}


def test_who_leaves_is_gone_though_its_heartbeat_still_waits(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    found = waiting(endpoint, readers, "a", name, wait_ms=30_000)

    endpoint.broker.leave(readers, "a")

    assert found.result(60)["members"] == {}
    assert set(beat(endpoint, readers, "b", name)["members"]) == {"b"}


@pytest.mark.every_endpoint
def test_a_member_is_gone_after_its_time_without_a_heartbeat(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    beat(endpoint, readers, "a", name)
    endpoint.advance(TIMEOUT_MS - 1)
    assert set(beat(endpoint, readers, "b", name)["members"]) == {"a", "b"}

    endpoint.advance(1)

    assert set(beat(endpoint, readers, "b", name)["members"]) == {"b"}


def test_a_heartbeat_renews_a_membership(endpoint: Endpoint, name: str, readers: str) -> None:
    beat(endpoint, readers, "a", name)
    endpoint.advance(TIMEOUT_MS - 1)
    beat(endpoint, readers, "a", name)
    endpoint.advance(TIMEOUT_MS - 1)

    assert set(beat(endpoint, readers, "b", name)["members"]) == {"a", "b"}


def test_waiting_members_are_woken_when_one_is_gone(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    endpoint.reopen(member_timeout_ms=1_000)
    beat(endpoint, readers, "b", name)
    endpoint.advance(500)
    found = waiting(endpoint, readers, "a", name, wait_ms=900)

    endpoint.advance(500)

    assert set(found.result(60)["members"]) == {"a"}


@pytest.mark.every_endpoint
def test_the_queues_of_who_leaves_are_unlocked(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(name, messages(8))
    beat(endpoint, readers, "a", name)
    endpoint.broker.lock_queues(readers, name, queue_ids=[0, 1], client_id="a")
    got = endpoint.broker.receive(readers, name, client_id="a", queue_ids=[0])

    endpoint.broker.leave(readers, "a")

    assert endpoint.sql("FROM queue_locks") == []
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got)
    again = endpoint.broker.receive(readers, name, client_id="b", limit=100)
    assert again.num_rows == 8
    assert set(again["delivery_attempt"].to_pylist()) == {1}


def test_the_queues_of_who_leaves_are_unlocked_though_the_clock_was_put_back(
    inside: Endpoint, name: str, readers: str
) -> None:
    beat(inside, readers, "a", name)
    inside.broker.lock_queues(readers, name, queue_ids=[0], client_id="a")
    inside.advance(-10_000)

    inside.broker.leave(readers, "a")

    assert inside.broker.describe_group(readers)["locks"] == []


def test_the_queues_of_who_is_gone_are_unlocked(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    beat(endpoint, readers, "a", name)
    endpoint.broker.lock_queues(
        readers, name, queue_ids=[0, 1], client_id="a", duration_ms=10 * TIMEOUT_MS
    )
    endpoint.advance(TIMEOUT_MS)

    # Nobody has to ask for it: the broker looks.
    until(lambda: endpoint.sql("FROM queue_locks") == [])


def test_resets_of_its_topics_are_counted(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(name, messages(8))
    before = beat(endpoint, readers, "a", name)
    assert before["resets"] == {}

    endpoint.broker.reset_offset(readers, name, to_latest=True)
    endpoint.broker.reset_offset(readers, name, to_earliest=True, queue_id=2)

    after = beat(endpoint, readers, "a", name)
    assert after["resets"] == {name: {0: 1, 1: 1, 2: 2, 3: 1}}
    assert after["version"] != before["version"]
    assert after["members"] == before["members"]


@pytest.mark.every_endpoint
@pytest.mark.parametrize("wait_ms", [900, 30_000])
def test_a_waiting_member_is_woken_by_a_reset(
    endpoint: Endpoint, name: str, readers: str, wait_ms: int
) -> None:
    found = waiting(endpoint, readers, "a", name, wait_ms=wait_ms)

    endpoint.broker.reset_offset(readers, name, to_latest=True, queue_id=1)

    assert found.result(60)["resets"] == {name: {1: 1}}


def test_a_group_that_was_put_where_another_is_was_reset(
    endpoint: Endpoint, name: str, readers: str, group: Make
) -> None:
    other = group()
    endpoint.broker.start_offsets(other, name, where="first")
    found = waiting(endpoint, readers, "a", name)

    endpoint.broker.clone_offsets(other, readers, topic=name)

    assert found.result(60)["resets"] == {name: dict.fromkeys(range(4), 1)}


def test_what_a_reader_commits_itself_is_no_reset(
    endpoint: Endpoint, name: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(name, messages(8))
    before = beat(endpoint, readers, "a", name)

    endpoint.broker.commit_offsets(readers, name, offsets={0: (-1, 2)})
    endpoint.broker.commit_offsets(readers, name, offsets={0: (2, 1)})

    assert beat(endpoint, readers, "a", name) == before


def test_a_reset_in_another_topic_wakes_nobody(
    endpoint: Endpoint, name: str, readers: str, topic: Make
) -> None:
    version = beat(endpoint, readers, "a", name)["version"]

    endpoint.broker.reset_offset(readers, topic(), to_latest=True)

    assert beat(endpoint, readers, "a", name)["version"] == version


def test_resets_are_counted_across_a_restart_and_members_have_to_come_again(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    before = beat(endpoint, readers, "a", name)
    endpoint.broker.reset_offset(readers, name, to_latest=True, queue_id=1)
    endpoint.sql("SELECT 1")  # dispatched
    endpoint.reopen()

    endpoint.broker.reset_offset(readers, name, to_latest=True, queue_id=1)
    after = beat(endpoint, readers, "b", name)

    assert after["resets"] == {name: {1: 2}}
    assert set(after["members"]) == {"b"}
    assert after["version"] != before["version"]


def test_what_members_say_of_themselves_is_there_to_see(
    endpoint: Endpoint, name: str, readers: str
) -> None:
    details = {"model": "clustering", "queues": {name: [0, 1]}, "statistics": {name: {"cached": 1}}}
    at_ms = endpoint.clock.now_ms()
    beat(endpoint, readers, "a", name, details={"model": "?"})
    endpoint.advance(10)
    beat(endpoint, readers, "a", name, details=details)

    assert endpoint.broker.describe_group(readers)["members"] == {
        "a": {
            "topics": [name],
            "joined_at_ms": at_ms,
            "seen_at_ms": at_ms + 10,
            "details": details,
        }
    }


@pytest.mark.every_endpoint
@pytest.mark.parametrize(
    "wrong",
    [
        {"client_id": ""},
        {"client_id": "c" * 256},
        {"topics": "orders"},
        {"topics": [""]},
        {"topics": [7]},
        {"topics": [f"t{i}" for i in range(limits.MEMBER_TOPICS + 1)]},
        {"details": {"long": "x" * limits.MEMBER_DETAILS_BYTES}},
        {"wait_ms": -1},
    ],
)
def test_what_is_out_of_range_is_refused(
    endpoint: Endpoint, readers: str, wrong: dict[str, Any]
) -> None:
    args: dict[str, Any] = {"client_id": "a", "topics": [], "details": {}, **wrong}

    with pytest.raises(errors.RequestError):
        endpoint.broker.heartbeat(readers, args.pop("client_id"), **args)

    assert "a" not in beat(endpoint, readers, "b")["members"] or "wait_ms" in wrong


def test_details_are_for_json(inside: Endpoint, group: Make) -> None:
    readers = group()

    with pytest.raises(errors.RequestError, match="JSON"):
        beat(inside, readers, "a", details={"when": object()})
    details = {"numbers": [1, 2]}
    beat(inside, readers, "a", details=details)
    details["numbers"].append(3)
    shown = inside.broker.describe_group(readers)["members"]["a"]["details"]
    assert json.dumps(shown) == '{"numbers": [1, 2]}'


def test_an_unknown_group_has_no_members(endpoint: Endpoint, unused: str) -> None:
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        beat(endpoint, unused, "a")
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        endpoint.broker.leave(unused, "a")
