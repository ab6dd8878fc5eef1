"""``rmq parked``, and the options of ``rmq group`` that say what a final failure does."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Name, Rmq


@pytest.fixture
def parked(rmq: Rmq, name: Name) -> tuple[str, str]:
    """A topic of three messages of a and of b each, whose first ones are parked; topic, group."""
    topic, group = name("topic"), name("group")
    lines = b"".join(
        b'{"body": "%d", "message_group": "%s"}\n' % (i, (b"a", b"b")[i % 2]) for i in range(6)
    )
    assert rmq("topic", "create", topic, "--type", "fifo", "--queues", "1").code == 0
    created = rmq(
        *("group", "create", group, "--order", "message_group", "--max-attempts", "1"),
        *("--on-failure", "park", "--json"),
    )
    assert created.json["on_failure"] == "park"
    assert rmq("send", topic, "--file", "-", stdin=lines).code == 0
    # No ack comes: the lease ends, and with it the only attempt.
    assert rmq("receive", topic, group, "-n", "6", "--invisible", "0.001").code == 0
    return topic, group


def bodies(rmq: Rmq, topic: str, group: str) -> list[str]:
    got = rmq("receive", topic, group, "-n", "10", "--ack", "--json").json
    return [message["body"] for message in got]


def test_parked_messages_are_listed(rmq: Rmq, parked: tuple[str, str]) -> None:
    topic, group = parked
    assert bodies(rmq, topic, group) == []

    rows = rmq("parked", "list", group, "--json").json

    assert [(row["message_group"], row["queue_offset"], row["waiting"]) for row in rows] == [
        ("a", 0, 2),
        ("b", 1, 2),
    ]
    assert {row["state"] for row in rows} == {"parked"}
    assert {row["reason"] for row in rows} == {"no attempt left"}
    assert group in rmq("parked", "list").text
    assert rmq("parked", "list", "nobody").err.startswith("ConsumerGroupNotFoundError: ")


def test_unpark_one_message_group_and_skip_the_other(rmq: Rmq, parked: tuple[str, str]) -> None:
    topic, group = parked
    assert bodies(rmq, topic, group) == []

    again = rmq("parked", "unpark", group, "--message-group", "b", "--topic", topic, "--json").json
    of_b = bodies(rmq, topic, group)
    skipped = rmq("parked", "unpark", group, "--all", "--skip", "--json").json
    of_a = bodies(rmq, topic, group)

    assert again == {"unparked": 1, "skipped": 0, "lifted": 0, "pardoned": 0}
    assert of_b == ["1", "3", "5"]
    assert skipped == {"unparked": 0, "skipped": 1, "lifted": 0, "pardoned": 0}
    assert of_a == ["2", "4"]
    assert len(rmq("dead-letters", "list", group, "--json").json) == 1
    assert rmq("parked", "list", group).text.strip() == "Nothing is parked."
    assert "0 messages are redelivered" in rmq("parked", "unpark", group, "--all").text


@pytest.mark.parametrize("chosen", [(), ("--all", "--message-group", "a")])
def test_unpark_asks_what_is_meant(
    rmq: Rmq, parked: tuple[str, str], chosen: tuple[str, ...]
) -> None:
    refused = rmq("parked", "unpark", parked[1], *chosen)

    assert refused.code == 1
    assert refused.err.startswith("RequestError: ")


def test_a_group_has_a_backoff_that_grows(rmq: Rmq, name: Name) -> None:
    group = name("billing")

    created = rmq("group", "create", group, "--backoff", "exponential", "--json").json
    numbers = ("--backoff-initial-ms", "10", "--backoff-max-ms", "70", "--backoff-multiplier", "3")
    altered = rmq("group", "alter", group, *numbers, "--json").json
    shown = rmq("group", "show", group, "--json").json
    back = rmq("group", "alter", group, "--backoff", "customized", "--json").json
    refused = rmq("group", "alter", group, "--backoff", "customized", *numbers)

    assert created["backoff"] == {"initial_ms": 5_000, "max_ms": 7_200_000, "multiplier": 2}
    assert altered["backoff"] == {"initial_ms": 10, "max_ms": 70, "multiplier": 3}
    nothing: dict[str, object] = {"members": {}, "filters": {}, "mixed_filters": {}, "lag": []}
    assert shown == {**altered, **nothing, "locks": []}
    assert back["backoff"] == "customized"
    assert refused.code == 1


def test_a_group_is_altered_to_another_final_failure(rmq: Rmq, group: str) -> None:
    altered = rmq("group", "alter", group, "--on-failure", "dead_letter_group", "--json").json
    refused = rmq("group", "alter", group, "--on-failure", "shrug")

    assert altered["on_failure"] == "dead_letter_group"
    assert refused.err.startswith("RequestError: ")
