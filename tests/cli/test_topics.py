"""``rmq topic``."""

import pytest

from tests.cli.conftest import Name, Rmq


def test_round_trip(rmq: Rmq, name: Name) -> None:
    orders = name("orders")

    created = rmq("topic", "create", orders, "--type", "fifo", "--queues", "3", "--json").json
    altered = rmq("topic", "alter", orders, "--queues", "5", "--partition-time", "born", "--json")
    shown = rmq("topic", "show", orders, "--json").json
    listed = rmq("topic", "list", "--json").json

    assert (created["name"], created["type"], created["queues"]) == (orders, "fifo", 3)
    assert altered.json == {**created, "queues": 5, "partition_time": "born"}
    assert len(shown["offsets"]) == 5
    assert shown["offsets"][0] == {"queue_id": 0, "min_offset": 0, "max_offset": 0}
    assert orders in [topic["name"] for topic in listed]


def test_a_topic_of_transactions(rmq: Rmq, name: Name) -> None:
    payments = name("payments")

    created = rmq("topic", "create", payments, "--type", "transaction", "--json").json

    assert (created["name"], created["type"]) == (payments, "transaction")


def test_people_see_tables(rmq: Rmq, topic: str) -> None:
    listed, shown = rmq("topic", "list").text, rmq("topic", "show", topic).text

    assert listed.split()[:5] == ["name", "type", "queues", "partition_time", "created_at"]
    assert topic in listed
    assert "max_offset" in shown


def test_delete(rmq: Rmq, topic: str) -> None:
    assert topic in rmq("topic", "delete", topic).text

    assert rmq("topic", "show", topic).code == 1


def test_delete_of_a_topic_in_use_needs_force(rmq: Rmq, topic: str, group: str) -> None:
    rmq("send", topic, "--body", "x")
    rmq("receive", topic, group)

    refused = rmq("topic", "delete", topic)

    assert refused.code == 1
    assert refused.err.startswith("InUseError: ")
    assert rmq("topic", "delete", topic, "--force", "--json").json["name"] == topic


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", "a b"], "characters"),
        (["create", "ok", "--type", "odd"], "normal, fifo, delay"),
        (["create", "ok", "--queues", "0"], "queues"),
        (["alter", "nothing", "--queues", "9"], "no topic nothing"),
        (["delete", "nothing"], "no topic nothing"),
    ],
)
def test_bad_input_is_refused(rmq: Rmq, arguments: list[str], says: str) -> None:
    told = rmq("topic", *arguments)

    assert told.code == 1
    assert says in told.err


def test_a_name_is_given_once(rmq: Rmq, topic: str) -> None:
    told = rmq("topic", "create", topic)

    assert told.code == 1
    assert told.err.startswith("AlreadyExistsError: ")


def test_a_topic_is_told_how_long_it_keeps_its_messages(rmq: Rmq, name: Name) -> None:
    kept = name("kept")
    made = rmq("topic", "create", kept, "--retention", "3600.5", "--json").json
    assert (made["retention_ms"], made["retention_bytes"]) == (3_600_500, None)

    changed = rmq("topic", "alter", kept, "--retention-bytes", "1000000", "--json").json
    assert (changed["retention_ms"], changed["retention_bytes"]) == (3_600_500, 1_000_000)
    changed = rmq("topic", "alter", kept, "--retention", "0", "--json").json
    assert (changed["retention_ms"], changed["retention_bytes"]) == (None, 1_000_000)

    refused = rmq("topic", "alter", kept, "--retention", "0.1")
    assert refused.code != 0
    assert "retention_ms" in refused.err


@pytest.mark.parametrize("size", [str(1 << 63), "99999999999999999999"])
def test_a_retention_that_no_column_holds_is_refused(rmq: Rmq, topic: str, size: str) -> None:
    refused = rmq("topic", "alter", topic, "--retention-bytes", size)

    assert refused.code == 1
    assert "retention_bytes" in refused.err
    assert topic in {each["name"] for each in rmq("topic", "list", "--json").json}


@pytest.mark.parametrize("option", ["--retention", "--deduplicate-window"])
@pytest.mark.parametrize("verb", ["create", "alter"])
def test_a_time_that_is_none_is_refused(no_broker: Rmq, verb: str, option: str) -> None:
    for seconds in ("inf", "nan", "1e300"):
        told = no_broker("topic", verb, "any", option, seconds)

        assert told.code == 1
        assert told.err.startswith(f"RequestError: {option} is a number of seconds from 0")
