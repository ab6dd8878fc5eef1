"""``rmq top``: groups and topics, once, again and again, and as of a moment."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.cli.conftest import RMQ, Rmq, Served


def row_of(look: dict[str, list[dict[str, object]]], kind: str, name: str) -> dict[str, object]:
    column = "consumer_group" if kind == "groups" else "topic"
    (found,) = [row for row in look[kind] if row[column] == name]
    return found


def test_top_shows_groups_and_topics_once(rmq: Rmq, topic: str, group: str) -> None:
    for _ in range(3):
        rmq("send", topic, "--body", "m")
    rmq("receive", topic, group, "-n", "1")

    shown = rmq("top").text
    look = json.loads(rmq("top", "--once", "--json").text)

    assert topic in shown
    assert group in shown
    found = row_of(look, "groups", group)
    assert (found["topic"], found["lag"], found["in_flight"]) == (topic, 3, 1)
    assert row_of(look, "topics", topic)["messages"] == 3


def test_top_shows_a_moment(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "m")
    (stored,) = (json.loads(line) for line in rmq("tail", topic, "--json").text.splitlines())
    rmq("receive", topic, group, "-n", "1", "--ack")
    rmq("send", topic, "--body", "later")

    look = json.loads(rmq("top", "--at", str(stored["stored_at_ms"]), "--json").text)

    assert row_of(look, "topics", topic)["messages"] == 1
    now = json.loads(rmq("top", "--once", "--json").text)
    assert row_of(now, "topics", topic)["messages"] == 2
    assert row_of(now, "groups", group)["lag"] == 1


def test_top_goes_on_until_ctrl_c(rmq: Rmq, topic: str, served: Served) -> None:
    command = [RMQ, "top", "--json", "--interval", "0.1", "--home", str(served.home)]
    looking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert looking.stdout is not None
    assert row_of(json.loads(looking.stdout.readline()), "topics", topic)["messages"] == 0

    rmq("send", topic, "--body", "m")

    while row_of(json.loads(looking.stdout.readline()), "topics", topic)["messages"] != 1:
        pass
    looking.send_signal(signal.SIGINT)
    looking.communicate(timeout=30)
    assert looking.returncode == 0


@pytest.mark.parametrize("arguments", [("--at", "yesterday"), ("--interval", "-1")])
def test_top_refuses_wrong_options(rmq: Rmq, arguments: tuple[str, str]) -> None:
    assert rmq("top", *arguments).code == 1
