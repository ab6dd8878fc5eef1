"""``rmq recall``, and what else of sending is said on the command line: priority, repetitions."""

from __future__ import annotations

import json

from tests.cli.conftest import Name, Rmq


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
