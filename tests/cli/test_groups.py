"""``rmq group``."""

import pytest

from tests.cli.conftest import Name, Rmq


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
