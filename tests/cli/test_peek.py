"""``rmq peek``: what a group would get next."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.cli.conftest import Name, Rmq
from tests.waiting import until


def peeked(rmq: Rmq, group: str, topic: str, *options: str) -> list[tuple[str, int]]:
    """Body and attempt of each message."""
    rows: list[dict[str, Any]] = rmq("peek", group, topic, *options, "--json").json
    return [(row["body"], row["delivery_attempt"]) for row in rows]


def receive(rmq: Rmq, topic: str, group: str, *options: str) -> list[str]:
    return [row["body"] for row in rmq("receive", topic, group, *options, "--json").json]


@pytest.fixture
def ordered(rmq: Rmq, name: Name) -> tuple[str, str]:
    """A fifo topic with one queue and a group in order by message group."""
    topic, group = name("fifo"), name("group")
    rmq("topic", "create", topic, "--type", "fifo", "--queues", "1")
    rmq("group", "create", group, "--order", "message_group", "--backoff-ms", "0")
    return topic, group


def test_peek_shows_what_receive_gets_and_leases_nothing(rmq: Rmq, topic: str, group: str) -> None:
    for body in "abcde":
        rmq("send", topic, "--body", body)

    for _ in range(2):
        assert peeked(rmq, group, topic, "-n", "2") == [("a", 1), ("b", 1)]
    assert receive(rmq, topic, group, "-n", "2", "--ack") == ["a", "b"]
    assert peeked(rmq, group, topic) == [("c", 1), ("d", 1), ("e", 1)]
    assert rmq("sql", f"FROM in_flight WHERE topic = '{topic}'", "--json").json == []


def test_leased_and_settled_messages_are_not_next(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "a")
    assert receive(rmq, topic, group) == ["a"]

    assert peeked(rmq, group, topic) == []
    assert rmq("peek", group, topic).text == f"{topic} has nothing for {group} now.\n"


def test_messages_whose_lease_has_ended_come_first(rmq: Rmq, topic: str, group: str) -> None:
    for body in "ab":
        rmq("send", topic, "--body", body)
    assert receive(rmq, topic, group, "-n", "1", "--invisible", "0.001") == ["a"]

    until(lambda: peeked(rmq, group, topic) == [("a", 2), ("b", 1)])
    assert peeked(rmq, group, topic, "-n", "1") == [("a", 2)]

    assert receive(rmq, topic, group, "-n", "1", "--invisible", "0.001") == ["a"]
    # That was its last attempt: it goes to the dead letters.
    until(lambda: peeked(rmq, group, topic) == [("b", 1)])


def test_messages_behind_a_settled_one_are_next(rmq: Rmq, ordered: tuple[str, str]) -> None:
    topic, group = ordered
    for body, message_group in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        rmq("send", topic, "--body", body, "--message-group", message_group)
    [a1] = rmq("receive", topic, group, "-n", "1", "--json").json
    assert receive(rmq, topic, group, "-n", "1", "--ack") == ["b1"]
    assert peeked(rmq, group, topic) == []

    rmq("ack", a1["receipt_handle"])

    assert peeked(rmq, group, topic) == [("a2", 1)]
    assert receive(rmq, topic, group) == ["a2"]


def test_messages_of_all_queues_are_in_the_order_of_storing(
    rmq: Rmq, name: Name, group: str
) -> None:
    topic = name("queues")
    rmq("topic", "create", topic, "--queues", "3")
    for at, queue in enumerate((2, 0, 1, 0)):
        rmq("send", topic, "--body", str(at), "--queue-id", str(queue))

    rows = rmq("peek", group, topic, "--json").json
    first = rmq("peek", group, topic, "-n", "3", "--json").json

    assert sorted(row["body"] for row in rows) == ["0", "1", "2", "3"]
    assert rows == sorted(
        rows, key=lambda row: (row["stored_at_ms"], row["queue_id"], row["queue_offset"])
    )
    assert first == rows[:3]


def test_bodies_are_shown_as_in_tail(rmq: Rmq, topic: str, group: str) -> None:
    encoded = base64.b64encode(b"\xff\x00").decode()
    rmq("send", topic, "--body", "two\nlines", "--tag", "new")
    rmq("send", topic, "--file", "-", stdin=f'{{"body_base64": "{encoded}"}}\n'.encode())

    text = rmq("peek", group, topic).text
    rows = rmq("peek", group, topic, "--json").json

    assert "two⏎lines" in text
    assert "new" in text
    assert r"b'\xff\x00'" in text
    assert (rows[1]["body"], rows[1]["body_base64"]) == (None, encoded)


def test_peek_refuses_what_does_not_exist(rmq: Rmq, topic: str, group: str) -> None:
    for arguments, says in (((group, "nowhere"), "topic nowhere"), (("nobody", topic), "nobody")):
        told = rmq("peek", *arguments)
        assert told.code == 1
        assert says in told.err
    assert rmq("peek", group, topic, "-n", "0").code == 2


def test_an_answer_ends_where_the_bodies_of_a_queue_are_too_many(
    rmq: Rmq, name: Name, group: str
) -> None:
    topic = name("large")
    rmq("topic", "create", topic, "--queues", "2")
    large = b'{"body": "' + b"x" * (3 << 20) + b'"}'
    rmq("send", topic, "--queue-id", "0", "--file", "-", stdin=b"\n".join([large] * 2))
    rmq("send", topic, "--queue-id", "1", "--body", "later")
    shown = rmq("peek", group, topic, "--json").json

    # The second message of the first queue comes before that of the other one.
    assert [(row["queue_id"], row["queue_offset"]) for row in shown] == [(0, 0)]
    assert len(receive(rmq, topic, group)) == 3
