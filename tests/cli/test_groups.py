"""``rmq group``."""

from collections.abc import Iterator

import pytest

from rmq_pipeline.cli.groups import show_group
from rmq_pipeline.flight.client import Client
from tests.cli.conftest import Name, Rmq, Served


def test_round_trip(rmq: Rmq, name: Name) -> None:
    billing = name("billing")

    created = rmq(
        *("group", "create", billing, "--order", "message_group", "--max-attempts", "3"),
        *("--backoff-ms", "10,20", "--on-failure", "dead_letter", "--json"),
    ).json
    altered = rmq("group", "alter", billing, "--max-attempts", "4", "--backoff-ms", "5", "--json")
    shown = rmq("group", "show", billing, "--json").json
    listed = rmq("group", "list", "--json").json

    assert created["order"] == "message_group"
    assert (created["max_attempts"], created["backoff_ms"]) == (3, [10, 20])
    assert altered.json == {**created, "max_attempts": 4, "backoff_ms": [5]}
    assert shown["max_attempts"] == 4
    assert billing in [group["name"] for group in listed]
    assert billing in rmq("group", "list").text


def test_backoff_is_the_delay_levels_by_default(rmq: Rmq, name: Name) -> None:
    created = rmq("group", "create", name("billing"), "--json").json

    assert created["max_attempts"] == 17
    assert created["backoff_ms"][:2] == [1_000, 5_000]


def test_delete(rmq: Rmq, group: str) -> None:
    assert group in rmq("group", "delete", group).text

    assert rmq("group", "show", group).code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", "a b"], "characters"),
        (["create", "ok", "--order", "odd"], "message_group"),
        (["create", "ok", "--max-attempts", "0"], "max_attempts"),
        (["create", "ok", "--backoff-ms", "soon"], "--backoff-ms 'soon'"),
        (["create", "ok", "--on-failure", "odd"], "on_failure"),
        (["alter", "nothing"], "no consumer group nothing"),
    ],
)
def test_bad_input_is_refused(rmq: Rmq, arguments: list[str], says: str) -> None:
    told = rmq("group", *arguments)

    assert told.code == 1
    assert says in told.err


def test_a_rate_is_set_altered_and_taken_away(rmq: Rmq, name: Name) -> None:
    group = name("group")
    made = rmq("group", "create", group, "--max-rate", "2.5", "--json").json

    altered = rmq("group", "alter", group, "--max-rate", "10", "--json").json
    free = rmq("group", "alter", group, "--max-rate", "0", "--json").json

    rates = [each["max_rate_per_s"] for each in (made, altered, free)]
    assert rates == [2.5, 10.0, None]
    assert rmq("group", "alter", group, "--max-rate", "-1").code != 0


def test_the_window_of_idempotency_keys_is_set_and_altered(rmq: Rmq, name: Name) -> None:
    group = name("group")
    made = rmq("group", "create", group, "--idempotency-window-ms", "5000", "--json").json

    altered = rmq("group", "alter", group, "--idempotency-window-ms", "60000", "--json").json

    assert (made["idempotency_window_ms"], altered["idempotency_window_ms"]) == (5_000, 60_000)
    assert rmq("group", "alter", group, "--idempotency-window-ms", "0").code == 1


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
