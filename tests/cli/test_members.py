"""``rmq group show`` with members, and ``rmq offset show`` and ``clone``."""

from collections.abc import Iterator

import pytest

from rmq_pipeline.cli.members import show_group
from rmq_pipeline.flight.client import Client
from tests.cli.conftest import Name, Rmq, Served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(home=served.home) as client:
        yield client


def test_members_their_queues_and_statistics_are_shown(
    rmq: Rmq, client: Client, topic: str, group: str
) -> None:
    statistics = {"consume_rt_ms": 1.5, "consume_ok_per_s": 12.25, "cached": 7}
    details = {
        "model": "clustering",
        "order": "concurrently",
        "queues": {topic: [0]},
        "statistics": {topic: statistics},
    }
    client.heartbeat(group, "machine@1", topics=[topic], details=details)
    client.lock_queues(group, topic, queue_ids=[0], client_id="machine@1")

    text = rmq("group", "show", group).text
    shown = rmq("group", "show", group, "--json").json

    assert [line for line in ("Members", "Queues", "Statistics") if line in text.splitlines()] == [
        "Members",
        "Queues",
        "Statistics",
    ]
    assert text.count("machine@1") == 4  # a member, an owner, a holder, and its numbers
    for word in ("clustering", "concurrently", topic, "1.5", "12.25", "7"):
        assert word in text
    assert shown["members"]["machine@1"]["details"] == details
    assert [lock["client_id"] for lock in shown["locks"]] == ["machine@1"]


def test_a_group_without_members_says_so(rmq: Rmq, group: str) -> None:
    text = rmq("group", "show", group).text

    assert "The group has no members." in text
    assert "Queues" not in text


def test_lag_is_shown_with_what_the_filter_takes(
    rmq: Rmq, client: Client, topic: str, group: str
) -> None:
    client.receive(group, topic, filter="wanted")
    for tag in ("wanted", "other", "other"):
        assert rmq("send", topic, "--body", "x", "--tag", tag).code == 0

    text = rmq("group", "show", group).text
    shown = rmq("group", "show", group, "--json").json
    (told,) = rmq("lag", group, "--json").json
    queues = rmq("lag", group, "--by-queue", "--json").json

    assert "Lag" in text.splitlines()
    assert shown["lag"] == [told]
    assert (told["lag"], told["matching_lag"], told["estimated"]) == (3, 1, False)
    assert told["filters"] == ["wanted"]
    assert sum(queue["matching_lag"] for queue in queues) == 1


def test_whatever_a_member_says_of_itself_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"details": {"queues": {"t": ["x", 1]}, "statistics": {"t": 5}, "model": ["m"]}}
    also_odd = {"details": {"queues": [1], "statistics": "many"}, "topics": []}

    show_group({"name": "g", "members": {"a": odd, "b": also_odd}, "locks": []}, as_json=False)

    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("Queues") + 2].split() == ["t", "1", "a", "-", "-"]


def test_clone(rmq: Rmq, client: Client, topic: str, group: str, name: Name) -> None:
    other = name("other")
    client.create_group(other)
    assert rmq("send", topic, "--body", "x").code == 0
    assert f"read nothing of {topic}" in rmq("offset", "clone", group, other, topic).text
    client.start_offsets(group, topic, where="last")

    cloned = rmq("offset", "clone", group, other, topic, "--json").json

    assert cloned == [{"queue_id": 0, "queue_offset": 1}]
    assert client.start_offsets(other, topic, where="first") == {0: 1}


def test_where_a_group_is(rmq: Rmq, client: Client, topic: str, group: str) -> None:
    assert f"has read nothing of {topic}" in rmq("offset", "show", group, topic).text
    client.commit_offsets(group, topic, offsets={0: (-1, 0)})
    client.reset_offset(group, topic, to_offset=0)

    shown = rmq("offset", "show", group, topic, "--json").json

    assert shown[0] == {"queue_id": 0, "queue_offset": 0, "resets": 1}


def test_members_that_receive_with_different_filters_are_warned_of(
    rmq: Rmq, client: Client, topic: str, group: str
) -> None:
    for client_id, tag in (("one", "new"), ("two", "old")):
        client.receive(group, topic, filter=tag, client_id=client_id)

    text = rmq("group", "show", group).text

    assert "Filters" in text.splitlines()
    assert f"WARNING: topic {topic} is received with 2 filters" in text
    assert rmq("group", "show", group, "--json").json["mixed_filters"] == {topic: ["new", "old"]}
