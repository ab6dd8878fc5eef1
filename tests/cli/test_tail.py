"""``rmq tail``, ``rmq ack`` and ``--if-not-exists``."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.cli.conftest import RMQ, Name, Rmq, Served


def bodies(rmq: Rmq, *arguments: str) -> list[str]:
    """The bodies of the lines that tail prints with --json."""
    return [
        json.loads(line)["body"] for line in rmq("tail", *arguments, "--json").text.split("\n")[:-1]
    ]


def test_tail_shows_the_newest_and_consumes_nothing(rmq: Rmq, topic: str, group: str) -> None:
    for n in range(5):
        rmq("send", topic, "--body", f"m{n}")

    assert bodies(rmq, topic, "-n", "3") == ["m2", "m3", "m4"]
    assert bodies(rmq, topic, "-n", "0") == []
    assert bodies(rmq, topic) == ["m0", "m1", "m2", "m3", "m4"]
    received = rmq("receive", topic, group, "--json").json
    assert {row["delivery_attempt"] for row in received} == {1}
    assert len(received) == 5


def test_a_line_of_tail_has_place_group_tag_and_body(rmq: Rmq, topic: str) -> None:
    rmq("send", topic, "--body", "two\nlines \x1b[31m", "--tag", "new", "--key", "k")

    (line,) = rmq("tail", topic).text.splitlines()

    assert "tag=new  keys=['k']  two⏎lines" in line
    assert "\x1b" not in line


def test_a_body_that_is_no_text_is_shown(rmq: Rmq, topic: str) -> None:
    rmq("send", topic, "--file", "-", stdin=b'{"body_base64": "/wA="}\n')

    assert rmq("tail", topic).text.endswith(r"b'\xff\x00'" + "\n")
    (row,) = (json.loads(line) for line in rmq("tail", topic, "--json").text.splitlines())
    assert (row["body"], row["body_base64"]) == (None, "/wA=")


def test_tail_follows_until_ctrl_c(rmq: Rmq, topic: str, served: Served) -> None:
    rmq("send", topic, "--body", "before")
    command = [RMQ, "tail", topic, "-f", "--json", "--home", str(served.home)]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["body"] == "before"

    rmq("send", topic, "--body", "after")

    assert json.loads(following.stdout.readline())["body"] == "after"
    following.send_signal(signal.SIGINT)
    rest, _ = following.communicate(timeout=60)
    assert (following.returncode, rest) == (0, "")


def test_an_unknown_topic_is_refused(rmq: Rmq) -> None:
    told = rmq("tail", "nowhere")

    assert told.code == 1
    assert "nowhere" in told.err


def test_ack_takes_receipts(rmq: Rmq, topic: str, group: str) -> None:
    for n in range(2):
        rmq("send", topic, "--body", str(n))
    receipts = [row["receipt_handle"] for row in rmq("receive", topic, group, "--json").json]

    assert rmq("ack", *receipts).text == "2 messages are acknowledged.\n"
    assert rmq("lag", group, "--json").json[0]["in_flight"] == 0
    again = rmq("ack", receipts[0])
    assert again.code == 1
    assert "receipt" in again.err


@pytest.mark.parametrize("noun", ["topic", "group"])
def test_what_exists_may_be_created_again_if_asked(rmq: Rmq, name: Name, noun: str) -> None:
    new = name(noun)

    first = rmq(noun, "create", new, "--if-not-exists", "--json").json
    assert rmq(noun, "create", new, "--if-not-exists", "--json").json == first
    assert rmq(noun, "create", new).code == 1
