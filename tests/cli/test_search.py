"""``rmq find``, ``rmq trace``, ``rmq lag``, ``rmq offset``, ``rmq dead-letters``."""

import json

import pytest

from rmq_pipeline.cli.moments import format_ms
from tests.cli.conftest import Rmq


def send(rmq: Rmq, topic: str, *keys: str) -> list[str]:
    """A message a key; their ids."""
    lines = b"".join(json.dumps({"body": key, "keys": [key]}).encode() + b"\n" for key in keys)
    sent = rmq("send", topic, "--file", "-", "--json", stdin=lines).json
    return [row["message_id"] for row in sent]


def test_find_by_key_id_and_time(rmq: Rmq, topic: str) -> None:
    ids = send(rmq, topic, "a", "it's", "c")
    stored = [row["stored_at_ms"] for row in rmq("find", topic, "--from", "0", "--json").json]

    assert [m["message_id"] for m in rmq("find", topic, "--key", "it's", "--json").json] == ids[1:2]
    assert [m["keys"] for m in rmq("find", topic, "--id", ids[2], "--json").json] == [["c"]]
    after = rmq("find", topic, "--from", format_ms(stored[-1] + 1), "--json").json
    before = rmq("find", topic, "--to", str(stored[0]), "--json").json
    during = rmq("find", topic, "--from", str(stored[0]), "--to", "2100-01-01", "-n", "2", "--json")
    assert (after, before, len(during.json)) == ([], [], 2)
    assert "it's" in rmq("find", topic, "--key", "it's").text
    assert rmq("find", topic, "--key", "zzz").text == f"{topic} has no such message.\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing", "--key", "k"], "no topic nothing"),
        (["{topic}"], "--key, --id"),
        (["{topic}", "--from", "yesterday"], "'yesterday' is not a time"),
        (["{topic}", "--to", "9" * 5_000], "is out of range"),
    ],
)
def test_find_refuses_bad_input(rmq: Rmq, topic: str, arguments: list[str], says: str) -> None:
    told = rmq("find", *(argument.format(topic=topic) for argument in arguments))

    assert told.code == 1
    assert says in told.err


def test_trace_tells_the_story_of_a_message(rmq: Rmq, topic: str, group: str) -> None:
    [message_id] = send(rmq, topic, "a")
    rmq("receive", topic, group, "--ack")

    story = rmq("trace", message_id, "--json").json

    assert [step["what"] for step in story] == ["stored", "lease", "ack"]
    assert story[1]["consumer_group"] == group
    assert story[1]["client_id"] == "rmq"
    assert "lease" in rmq("trace", message_id).text
    told = rmq("trace", "nothing").err
    assert told.startswith("MessageNotFoundError: No message has the id nothing. Check the id")


def test_lag(rmq: Rmq, topic: str, group: str) -> None:
    send(rmq, topic, "a", "b", "c")
    rmq("receive", topic, group, "-n", "1", "--ack")
    rmq("receive", topic, group, "-n", "1")

    [row] = rmq("lag", group, "--json").json
    [queue] = rmq("lag", group, "--by-queue", "--json").json

    assert (row["consumer_group"], row["topic"]) == (group, topic)
    assert (row["lag"], row["in_flight"], row["retrying"]) == (2, 1, 0)
    assert row["oldest_unread_at_ms"] > 0
    assert (queue["queue_id"], queue["lag"], queue["committed_offset"]) == (0, 2, 1)
    assert group in rmq("lag").text
    assert rmq("lag", "nobody").err.startswith("ConsumerGroupNotFoundError: ")


def test_lag_of_a_group_that_reads_nothing(rmq: Rmq, group: str) -> None:
    assert rmq("lag", group, "--json").json == []
    assert rmq("lag", group).text == f"{group} reads no topic.\n"


def test_offset_reset(rmq: Rmq, topic: str, group: str) -> None:
    send(rmq, topic, "a", "b", "c")
    rmq("receive", topic, group)

    def keys() -> list[str]:
        return [m["body"] for m in rmq("receive", topic, group, "--json").json]

    [row] = rmq("offset", "reset", group, topic, "--to-earliest", "--json").json
    assert row == {"queue_id": 0, "queue_offset": 0}
    assert keys() == ["a", "b", "c"]
    assert "1" in rmq("offset", "reset", group, topic, "--to-offset", "1", "--queue", "0").text
    assert keys() == ["b", "c"]
    rmq("offset", "reset", group, topic, "--to-latest")
    assert keys() == []
    for none in ("1969-12-31T23:59:59Z", "1893456000000000"):  # before 1970; µs taken for ms
        refused = rmq("offset", "reset", group, topic, "--to-time", none)
        assert refused.code == 1
        assert "is a time in ms since 1970" in refused.err
    rmq("offset", "reset", group, topic, "--to-time", "1970-01-02T00:00:00Z")
    assert keys() == ["a", "b", "c"]


@pytest.mark.parametrize(
    "how", [[], ["--to-latest", "--to-earliest"], ["--to-offset", "99"], ["--to-time", "soon"]]
)
def test_offset_reset_refuses_bad_input(rmq: Rmq, topic: str, group: str, how: list[str]) -> None:
    told = rmq("offset", "reset", group, topic, *how)

    assert told.code == 1
    assert told.err.count("\n") == 1


def test_dead_letters(rmq: Rmq, topic: str, group: str) -> None:
    ids = send(rmq, topic, "a", "b")
    for _ in range(2):
        rmq("receive", topic, group, "--invisible", "0.001", "--wait", "10")
    rmq("receive", topic, group, "--wait", "2")

    dead = rmq("dead-letters", "list", group, "--json").json
    some = rmq("dead-letters", "list", group, "--where", "'b' IN keys -- sic", "--json").json

    assert sorted(letter["message_id"] for letter in dead) == sorted(ids)
    assert {letter["attempts"] for letter in dead} == {2}
    assert {letter["topic"] for letter in dead} == {topic}
    assert [letter["keys"] for letter in some] == [["b"]]
    assert ids[0] in rmq("dead-letters", "list", group).text
    assert rmq("dead-letters", "list", "nobody").err.startswith("ConsumerGroupNotFoundError: ")
    refused = rmq("dead-letters", "list", group, "--where", "1 = 1); DROP TABLE x; --")
    assert refused.err.startswith("QueryError: ")


def test_no_dead_letters(rmq: Rmq, group: str) -> None:
    assert rmq("dead-letters", "list", group, "--json").json == []
    assert "no such dead letters" in rmq("dead-letters", "list", group).text
