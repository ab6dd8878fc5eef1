"""``rmq send``, ``receive``, ``recall``, ``find`` and ``trace``."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.cli.messages import _warn_of_the_end
from rmq_pipeline.text import format_ms
from tests.cli.conftest import Name, Rmq

RECEIVED = [
    "body",
    "tag",
    "keys",
    "message_group",
    "queue_id",
    "queue_offset",
    "delivery_attempt",
    "message_id",
    "receipt_handle",
    "properties",
]


def ndjson(*messages: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def test_what_was_sent_is_received(rmq: Rmq, topic: str, group: str) -> None:
    sent = rmq(
        *("send", topic, "--body", "grüße", "--tag", "new", "--key", "a", "--key", "b"),
        *("--property", "x=1", "--property", "y=2=3", "--json"),
    ).json

    [received] = rmq("receive", topic, group, "--ack", "--json").json

    assert list(received) == RECEIVED
    assert received["body"] == "grüße"
    assert (received["tag"], received["keys"]) == ("new", ["a", "b"])
    assert received["properties"] == {"x": "1", "y": "2=3"}
    assert received["delivery_attempt"] == 1
    assert (sent[0]["recall_handle"], sent[0]["duplicate"]) == (None, False)
    for name in ("message_id", "queue_id", "queue_offset"):
        assert received[name] == sent[0][name]
    assert rmq("lag", group, "--json").json[0]["lag"] == 0


def test_without_ack_messages_stay_in_flight(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "x")

    assert "x" in rmq("receive", topic, group).text
    assert rmq("receive", topic, group, "--json").json == []
    assert rmq("lag", group, "--json").json[0]["in_flight"] == 1


def test_an_unacknowledged_message_comes_again(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "x")
    rmq("receive", topic, group, "--invisible", "0.001")

    [again] = rmq("receive", topic, group, "--wait", "10", "--json").json

    assert again["delivery_attempt"] == 2


def test_receive_takes_as_many_as_asked_for(rmq: Rmq, topic: str, group: str) -> None:
    lines = ndjson(*({"body": str(i), "tag": "ab"[i % 2]} for i in range(10)))
    rmq("send", topic, "--file", "-", stdin=lines)

    some = rmq("receive", topic, group, "-n", "3", "--filter", "b", "--json").json

    assert [message["body"] for message in some] == ["1", "3", "5"]


def test_a_file_has_every_field(rmq: Rmq, name: Name, group: str, tmp_path: Path) -> None:
    topic = name("mixed")
    rmq("topic", "create", topic, "--type", "fifo", "--queues", "1")
    file = tmp_path / "messages.ndjson"
    body = bytes([0, 255])
    file.write_bytes(
        ndjson(
            {"body": "text", "message_group": "g", "tag": "t", "keys": ["k"], "born_at_ms": 5},
            {"body_base64": base64.b64encode(body).decode(), "message_group": "h"},
        )
        + b"\n"
        + ndjson({"body": "last", "message_group": "g", "properties": {"p": "v"}})
    )

    sent = rmq("send", topic, "--file", str(file), "--json").json
    received = rmq("receive", topic, group, "--json").json
    found = rmq("find", topic, "--key", "k", "--json").json

    assert [row["queue_offset"] for row in sent] == [0, 1, 2]
    by_offset = {message["queue_offset"]: message for message in received}
    assert by_offset[0]["body"] == "text"
    assert by_offset[1]["body"] is None
    assert base64.b64decode(by_offset[1]["body_base64"]) == body
    assert by_offset[2]["properties"] == {"p": "v"}
    assert found[0]["born_at_ms"] == 5


def test_options_are_for_lines_that_do_not_say(rmq: Rmq, topic: str, group: str) -> None:
    lines = ndjson({"body": "a"}, {"body": "b", "tag": "own"})

    rmq("send", topic, "--file", "-", "--tag", "given", stdin=lines)

    received = rmq("receive", topic, group, "--json").json
    assert [message["tag"] for message in received] == ["given", "own"]


def test_a_long_file_is_sent_in_batches(rmq: Rmq, topic: str) -> None:
    lines = ndjson(*({"body": str(i)} for i in range(2_500)))

    told = rmq("send", topic, "--file", "-", stdin=lines)

    assert told.text == f"2,500 messages are stored in {topic}.\n"
    [queue] = rmq("topic", "show", topic, "--json").json["offsets"]
    assert queue["max_offset"] == 2_500


def test_a_refused_batch_says_what_is_stored(rmq: Rmq, topic: str) -> None:
    lines = ndjson(*({"body": str(i)} for i in range(1_000)), {"body": "ok"}, {"body": ""})

    told = rmq("send", topic, "--file", "-", stdin=lines)

    assert told.code == 1
    assert "lines 1001 to 1002" in told.err
    assert "first 1,000 messages of the file are stored" in told.err
    [queue] = rmq("topic", "show", topic, "--json").json["offsets"]
    assert queue["max_offset"] == 1_000


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            rb'{"body": "b", "tag": "\ud83d"}',
            r'Line 1001: tag cannot be written in UTF-8: "\ud83d"',
        ),
        (rb'{"body": "b", "properties": {"\ud83d": ""}}', "Line 1001: properties cannot"),
        (b"[" * 100_000, "Line 1001 is nested too deeply"),
    ],
)
def test_a_line_after_others_that_is_refused_says_what_is_stored(
    rmq: Rmq, topic: str, line: bytes, says: str
) -> None:
    told = rmq("send", topic, "--file", "-", stdin=b'{"body": "a"}\n' * 1_000 + line)

    assert told.code == 1
    assert says in told.err
    assert "first 1,000 messages of the file are stored" in told.err
    assert told.err.count("\n") == 1
    [queue] = rmq("topic", "show", topic, "--json").json["offsets"]
    assert queue["max_offset"] == 1_000


def test_a_body_may_be_no_text(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--file", "-", stdin=rb'{"body": "\ud83d"}')

    [received] = rmq("receive", topic, group, "--json").json

    assert base64.b64decode(received["body_base64"]) == b"\xed\xa0\xbd"


def test_a_file_without_messages_is_sent(rmq: Rmq, topic: str) -> None:
    assert rmq("send", topic, "--file", "-", "--json").json == []
    assert rmq("send", topic, "--file", "-").text == f"0 messages are stored in {topic}.\n"


def test_a_message_may_wait_for_its_time(rmq: Rmq, name: Name, group: str) -> None:
    topic = name("later")
    rmq("topic", "create", topic, "--type", "delay", "--queues", "1")

    rmq("send", topic, "--body", "level", "--delay-level", "18")
    tomorrow = format_ms(time.time_ns() // 1_000_000 + 86_400_000)
    rmq("send", topic, "--body", "iso", "--deliver-at", tomorrow)

    query = f"SELECT delay_level, deliver_at_ms FROM scheduled WHERE topic = '{topic}' ORDER BY 1"
    assert rmq("receive", topic, group, "--json").json == []
    [level, iso] = rmq("sql", query, "--json").json
    assert level["delay_level"] == 18
    assert format_ms(iso["deliver_at_ms"]) == tomorrow


def test_a_delayed_message_comes(rmq: Rmq, name: Name, group: str) -> None:
    topic = name("soon")
    rmq("topic", "create", topic, "--type", "delay", "--queues", "1")
    rmq("send", topic, "--body", "x", "--delay-level", "1")

    [received] = rmq("receive", topic, group, "--wait", "20", "--json").json

    assert received["body"] == "x"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "Line 1 is not JSON"),
        (b"[]", "Line 1 is not a JSON object"),
        (b'{"tag": "t"}', "either body or body_base64"),
        (b'{"body": "a", "body_base64": "YQ=="}', "either body or body_base64"),
        (b'{"body": 7}', "body is text, not 7"),
        (b'{"body": "a", "keys": "k"}', "keys is a list of texts"),
        (b'{"body": "a", "deliver_at_ms": "soon"}', "deliver_at_ms is ms since 1970"),
        (b'{"body": "a", "properties": {"n": 1}}', "properties is an object of texts"),
        (b'{"body": "a", "delay_level": true}', "delay_level is a whole number"),
        (b'{"body": "a", "key": "k"}', "has a field 'key'"),
        (b'{"body": "a", "priority": 2147483648}', "priority is a whole number of 32 bits"),
        (b'{"body_base64": "?"}', "is not base64"),
        ('{"body_base64": "é"}'.encode(), "is not base64"),
        (b"\xff\xfe", "Line 1 is not JSON"),
    ],
)
def test_a_line_that_is_no_message_is_refused(rmq: Rmq, topic: str, line: bytes, says: str) -> None:
    told = rmq("send", topic, "--file", "-", stdin=line)

    assert told.code == 1
    assert says in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either --body or --file"),
        (["--body", "a", "--file", "-"], "either --body or --file"),
        (["--file", "/nowhere/at.all"], "cannot be read"),
        (["--body", ""], "body is empty"),
        (["--body", "a", "--property", "x"], "KEY=VALUE"),
        (["--body", "a", "--deliver-at", "soon"], "is not a time"),
        (["--body", "a", "--message-group", "g"], "message_group"),
        (["--body", "a", "--tag", "a|b"], "tag"),
        (["--body", "a", "--delay-level", "19"], "delay"),
        (["--body", "a", "--delay-level", "99999999999"], "delay_level is a whole number"),
        (["--body", "a", "--priority", "99999999999"], "priority is a whole number of 32 bits"),
        (["--body", "a", "--deliver-at", "99999999999999999999"], "is out of range"),
        (["--body", "a", "--tag", "\udcff"], "tag cannot be written in UTF-8"),
    ],
)
def test_bad_input_is_refused(rmq: Rmq, topic: str, arguments: list[str], says: str) -> None:
    told = rmq("send", topic, *arguments)

    assert told.code == 1
    assert says in told.err.lower() or says in told.err
    assert told.err.count("\n") == 1


def test_receive_refuses_bad_input(rmq: Rmq, topic: str, group: str) -> None:
    assert rmq("receive", topic, "nobody").err.startswith("ConsumerGroupNotFoundError: ")
    assert rmq("receive", "nothing", group).err.startswith("TopicNotFoundError: ")
    assert rmq("receive", topic, group, "-n", "0").code == 1
    assert rmq("receive", topic, group, "--filter", "||").err.startswith("FilterExpression")
    assert rmq("receive", topic, group, "--invisible", "0").err.startswith("InvisibleDuration")


@pytest.mark.parametrize("option", ["--wait", "--invisible"])
@pytest.mark.parametrize("seconds", ["inf", "nan", "-inf", "-1", "1e300"])
def test_receive_refuses_what_is_no_time(
    rmq: Rmq, topic: str, group: str, option: str, seconds: str
) -> None:
    told = rmq("receive", topic, group, option, seconds)

    assert told.code == 1
    assert f"{option} is a number of seconds from 0" in told.err
    assert told.err.count("\n") == 1


def test_receive_takes_a_condition_on_properties(rmq: Rmq, topic: str, group: str) -> None:
    lines = ndjson(*({"body": str(i), "properties": {"region": "ewn"[i % 3]}} for i in range(6)))
    rmq("send", topic, "--file", "-", stdin=lines)
    condition = ("--filter", "region IN ('e','w')", "--filter-type", "sql92")

    some = rmq("receive", topic, group, *condition, "--json").json

    assert [message["body"] for message in some] == ["0", "1", "3", "4"]


def test_a_condition_is_not_taken_for_tags(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "x", "--property", "a=1", "--tag", "a=1")

    refused = rmq("receive", topic, group, "--filter", "a=1")

    assert refused.code == 1
    assert "--filter-type" in refused.err
    assert len(rmq("receive", topic, group, "--filter", "a=1", "--filter-type", "tag").out) > 0
    assert rmq("lag", group, "--json").json[0]["in_flight"] == 1


def test_a_condition_that_does_not_parse_is_shown_with_its_place(
    rmq: Rmq, topic: str, group: str
) -> None:
    refused = rmq("receive", topic, group, "--filter", "a IN (5)", "--filter-type", "sql92")

    assert refused.code == 1
    assert refused.err.splitlines()[:3] == [
        "FilterExpressionError: The filter does not parse at character 7:",
        "  a IN (5)",
        "        ^",
    ]


def test_what_is_shown_cannot_command_the_terminal(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "\x1b[31mred [bold]")

    shown = rmq("receive", topic, group).text

    assert "\x1b" not in shown
    assert "red [bold]" in shown


def test_lite_topics_are_sent_to_and_received_from(rmq: Rmq, name: Name, group: str) -> None:
    topic = name("topic")
    rmq("topic", "create", topic, "--type", "lite", "--queues", "2")
    lines = ndjson({"body": "1", "lite_topic": "a"}, {"body": "2", "lite_topic": "b"})
    rmq("send", topic, "--body", "0", "--lite-topic", "a")
    rmq("send", topic, "--file", "-", stdin=lines)

    nothing = rmq("receive", topic, group, "--json").json
    of_a = rmq("receive", topic, group, "--lite-topic", "a", "--ack", "--json").json
    both = rmq(*("receive", topic, group, "--lite-topic", "a", "--lite-topic", "b"), "--json").json

    assert nothing == []
    assert [(row["body"], row["message_group"]) for row in of_a] == [("0", "a"), ("1", "a")]
    assert [(row["body"], row["message_group"]) for row in both] == [("2", "b")]


def test_the_queue_of_a_message_may_be_chosen(rmq: Rmq, name: Name) -> None:
    topic = name("topic")
    rmq("topic", "create", topic, "--queues", "4")
    lines = ndjson({"body": "1", "queue_id": 3}, {"body": "2"})

    (sent,) = rmq("send", topic, "--body", "0", "--queue-id", "2", "--json").json
    both = rmq("send", topic, "--file", "-", "--queue-id", "1", "--json", stdin=lines).json
    refused = rmq("send", topic, "--body", "0", "--queue-id", "4")

    assert [sent["queue_id"], *(row["queue_id"] for row in both)] == [2, 3, 1]
    assert refused.code == 1
    assert f"topic {topic} has no queue 4" in refused.err


def test_a_message_of_a_lite_topic_must_name_it(rmq: Rmq, name: Name) -> None:
    topic = name("topic")
    rmq("topic", "create", topic, "--type", "lite")

    refused = rmq("send", topic, "--body", "0")

    assert refused.code != 0
    assert "it has no lite_topic" in refused.err


def test_a_scheduled_message_is_recalled_by_what_send_printed(rmq: Rmq, name: Name) -> None:
    later = name("later")
    rmq("topic", "create", later, "--type", "delay")
    sent = rmq("send", later, "--body", "x", "--delay-level", "18", "--json").json[0]
    printed = rmq("send", later, "--body", "y", "--delay-level", "18").text

    recalled = rmq("recall", later, sent["recall_handle"], "--json").json

    assert recalled == [{name: sent[name] for name in ("recall_handle", "message_id")}]
    assert "recall_handle" in printed
    waiting = rmq("sql", "SELECT topic, message_id FROM scheduled", "--format", "json").json
    assert sent["message_id"] not in [row["message_id"] for row in waiting]
    assert [row["topic"] for row in waiting].count(later) == 1


def test_a_second_recall_is_an_error_and_changes_nothing(rmq: Rmq, name: Name) -> None:
    later = name("later")
    rmq("topic", "create", later, "--type", "delay")
    one, other = (
        rmq("send", later, "--body", "x", "--delay-level", "18", "--json").json[0]["recall_handle"]
        for _ in range(2)
    )
    assert one in rmq("recall", later, one).text

    refused = rmq("recall", later, other, one)

    assert refused.code == 1
    assert refused.err.startswith("RecallError: Row 1 ")
    assert rmq("recall", later, other).code == 0


def test_the_higher_priority_is_received_first(rmq: Rmq, name: Name, group: str) -> None:
    ranked = name("ranked")
    rmq("topic", "create", ranked, "--type", "priority")
    lines = [{"body": "0", "priority": 0}, {"body": "5", "priority": 5}, {"body": "2"}]
    text = "\n".join(map(json.dumps, lines)).encode()

    rmq("send", ranked, "--file", "-", "--priority", "2", stdin=text)
    rmq("send", ranked, "--body", "7", "--priority", "7")

    received = rmq("receive", ranked, group, "--ack", "--json").json
    assert [row["body"] for row in received] == ["7", "5", "2", "0"]


def test_a_repetition_is_told(rmq: Rmq, name: Name) -> None:
    once = name("once")
    made = rmq("topic", "create", once, "--deduplicate", "key", "--json").json
    altered = rmq("topic", "alter", once, "--deduplicate-window", "60.5", "--json").json

    first = rmq("send", once, "--body", "x", "--key", "k", "--json").json
    again = rmq("send", once, "--body", "x", "--key", "k", "--json").json
    printed = rmq("send", once, "--body", "x", "--key", "k").text

    assert (made["deduplicate"], made["deduplicate_window_ms"]) == ("key", 600_000)
    assert (altered["deduplicate"], altered["deduplicate_window_ms"]) == ("key", 60_500)
    assert again == [{**first[0], "duplicate": True}]
    assert "duplicate" in printed


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


def test_find_shows_bodies(rmq: Rmq, topic: str) -> None:
    encoded = base64.b64encode(b"\x00\xff").decode()
    lines = ndjson({"body": "two\nlines", "keys": ["a"]}, {"body_base64": encoded, "keys": ["b"]})
    rmq("send", topic, "--file", "-", stdin=lines)

    text, other = (rmq("find", topic, "--key", key).text for key in "ab")
    [text_json], [other_json] = (rmq("find", topic, "--key", key, "--json").json for key in "ab")

    assert "two⏎lines" in text
    assert r"b'\x00\xff'" in other
    assert text_json["body"] == "two\nlines"
    assert (other_json["body"], other_json["body_base64"]) == (None, encoded)


def test_find_without_bodies(rmq: Rmq, topic: str) -> None:
    rmq("send", topic, "--body", "secret", "--key", "k")

    shown = rmq("find", topic, "--key", "k", "--no-body")
    (row,) = rmq("find", topic, "--key", "k", "--no-body", "--json").json

    assert "secret" not in shown.text
    assert row["body"] is None


def test_find_says_that_the_bodies_may_have_ended_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = pa.table({"body": [bytes(61 << 20)]})

    _warn_of_the_end(found, 1)
    assert capsys.readouterr().err == ""
    _warn_of_the_end(found, 2)
    assert capsys.readouterr().err.startswith("The bodies take 61 MiB, so the answer may")


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
        assert "must be a time in ms since 1970" in refused.err
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
