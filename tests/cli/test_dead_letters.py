"""``rmq dead-letters redrive``."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import RMQ, Rmq, Served, process

#: Region and price of each message; the last has neither.
FLIGHTS = [("east", "5"), ("east", "12"), ("west", "30"), ("east", "x"), ("east", "40"), None]


def make_dead_letters(rmq: Rmq, topic: str, group: str, *keys: str) -> list[str]:
    """Messages with these keys, dead-lettered; their ids."""
    lines = b"".join(json.dumps({"body": key, "keys": [key]}).encode() + b"\n" for key in keys)
    sent = rmq("send", topic, "--file", "-", "--json", stdin=lines).json
    for _ in range(2):
        rmq("receive", topic, group, "-n", "32", "--invisible", "0.001", "--wait", "10")
    rmq("receive", topic, group, "--wait", "2")
    return [row["message_id"] for row in sent]


def test_redrive_gives_the_chosen_messages_again_and_says_what_became_of_them(
    rmq: Rmq, topic: str, group: str
) -> None:
    ids = make_dead_letters(rmq, topic, group, "a", "b", "c")

    told = rmq(
        "dead-letters", "redrive", group, "--where", "'b' IN keys OR 'c' IN keys", "--wait", "0",
        "--json",
    )  # fmt: skip
    got = rmq("receive", topic, group, "-n", "32", "--ack", "--json").json
    again = rmq("dead-letters", "redrive", group, "--id", told.json["redrive_id"], "--json",
                "--where", "'b' IN keys")  # fmt: skip

    assert (told.json["status"], told.json["chosen"], told.json["redriven"]) == ("waiting", 2, 2)
    assert [m["outcome"] for m in told.json["messages"]] == ["waiting", "waiting"]
    assert sorted(message["message_id"] for message in got) == sorted(ids[1:])
    assert {message["delivery_attempt"] for message in got} == {1}
    assert (again.json["status"], again.json["outcomes"]) == ("done", {"acked": 2})


def test_redrive_tells_people_how_it_went(rmq: Rmq, topic: str, group: str) -> None:
    make_dead_letters(rmq, topic, group, "a")

    many = str(1 << 80)  # more than there are, and than Arrow can count
    told = rmq("dead-letters", "redrive", group, "--limit", many, "--rate", "5", "--wait", "0")

    assert told.code == 0
    assert "waiting" in told.text
    [letter] = rmq("dead-letters", "list", group, "--json").json
    assert letter["redrive_id"] in told.text
    assert letter["redriven_at_ms"] > 0
    assert rmq("dead-letters", "redrive", group, "--json").json["chosen"] == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--where", "attempts >"], "QueryError: "),
        (["--where", "1 = 1; DROP TABLE x"], "QueryError: "),
        (["--where", "1 = 1) UNION SELECT 0, 0 FROM messages WHERE (1 = 1"], "QueryError: "),
        (["--where", "(SELECT count(*) FROM read_csv('/etc/passwd')) > 0"], "QueryError: "),
        (["--max-failed-share", "2"], "RequestError: "),
        (["--rate", "-1"], "RequestError: "),
    ],
)
def test_redrive_refuses_bad_input_and_redrives_nothing(
    rmq: Rmq, topic: str, group: str, arguments: list[str], error: str
) -> None:
    make_dead_letters(rmq, topic, group, "a")

    told = rmq("dead-letters", "redrive", group, *arguments)

    assert told.code == 1
    assert told.err.startswith(error)
    assert [row["redrive_id"] for row in rmq("dead-letters", "list", group, "--json").json] == [
        None
    ]


@pytest.mark.parametrize("option", ["--rate", "--wait"])
def test_redrive_takes_numbers_only(no_broker: Rmq, option: str) -> None:
    told = no_broker("dead-letters", "redrive", "group", option, "nan")

    assert told.code == 1
    assert told.err.startswith(f"RequestError: {option} is a number of ")


def test_redrive_of_a_group_that_does_not_exist_is_refused(rmq: Rmq) -> None:
    told = rmq("dead-letters", "redrive", "nobody")

    assert told.err.startswith("ConsumerGroupNotFoundError: ")


def buried(rmq: Rmq, topic: str, group: str) -> list[str]:
    """These messages, dead-lettered; their ids."""
    rows = [
        {"body": str(i), "tag": "late" if i % 2 else "early"}
        | ({"properties": dict(zip(("region", "price"), flight, strict=True))} if flight else {})
        for i, flight in enumerate(FLIGHTS)
    ]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    sent = rmq("send", topic, "--file", "-", "--json", stdin=lines).json
    for _ in range(2):
        rmq("receive", topic, group, "-n", "32", "--invisible", "0.001", "--wait", "10")
    rmq("receive", topic, group, "--wait", "2")
    return [row["message_id"] for row in sent]


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["--filter", "region = 'east' AND price > 9"], [1, 4]),
        (["--filter", "region <> 'east' OR region IS NULL"], [2, 5]),
        (["--filter", "TAGS = 'late'", "--where", "properties['region'] = 'east'"], [1, 3]),
        (["--filter", "region = 'east'", "--limit", "2"], [0, 1]),
    ],
)
def test_what_the_filter_wants_comes_again_and_nothing_else(
    rmq: Rmq, topic: str, group: str, arguments: list[str], chosen: list[int]
) -> None:
    ids = buried(rmq, topic, group)

    told = rmq("dead-letters", "redrive", group, *arguments, "--wait", "0", "--json").json
    got = rmq("receive", topic, group, "-n", "32", "--ack", "--json").json

    assert told["chosen"] == told["redriven"] == len(chosen)
    assert [message["message_id"] for message in told["messages"]] == [ids[i] for i in chosen]
    assert [message["body"] for message in got] == [str(i) for i in chosen]
    left = rmq("dead-letters", "list", group, "--where", "redriven_at_ms IS NULL", "--json").json
    assert len(left) == len(FLIGHTS) - len(chosen)


def test_the_command_in_a_process_of_its_own_takes_the_filter(
    rmq: Rmq, topic: str, group: str, served: Served
) -> None:
    ids = buried(rmq, topic, group)

    told = process(
        *(RMQ, "dead-letters", "redrive", group, "--filter", "price BETWEEN 10 AND 35"),
        *("--wait", "0", "--json", "--home", str(served.home)),
    )

    assert told.returncode == 0, told.stderr
    said = json.loads(told.stdout)
    assert [message["message_id"] for message in said["messages"]] == [ids[1], ids[2]]


def test_a_filter_that_does_not_parse_redrives_nothing(rmq: Rmq, topic: str, group: str) -> None:
    buried(rmq, topic, group)

    for bad in ("price >", "price > 'x'", "price IN (5)", "1 = 1; DROP TABLE x"):
        told = rmq("dead-letters", "redrive", group, "--filter", bad, "--wait", "0")
        assert told.code == 1
        assert told.err.startswith("FilterExpressionError: ")
        assert "^" in told.err

    letters = rmq("dead-letters", "list", group, "--json").json
    assert {letter["redrive_id"] for letter in letters} == {None}
