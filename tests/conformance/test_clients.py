"""Unmodified official clients get from the broker what RocketMQ promises them."""

from collections import defaultdict
from collections.abc import Callable

import pytest

from rmq_pipeline.flight.client import Client
from tests.conformance.brokers import Facts

Seen = Callable[[str], Facts]

# The first test waits for all that a client does, which takes minutes on a slow machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def bodies(messages: list[Facts]) -> list[str]:
    return [message["body"] for message in messages]


def by_group(messages: list[Facts]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        found[message["group"]].append(message["body"])
    return dict(found)


def test_a_message_arrives_as_it_was_sent(both: Seen) -> None:
    facts = both("normal")

    got = sorted(facts["got"], key=lambda message: message["body"])

    assert bodies(got) == [f"n{i}" for i in range(5)]
    assert [message["id"] for message in got] == facts["sent"]
    assert [message["keys"] for message in got] == [[f"k{i}"] for i in range(5)]
    assert [message["properties"]["p"] for message in got] == [str(i) for i in range(5)]
    assert {message["tag"] for message in got} == {"t"}
    assert {message["attempt"] for message in got} == {1}
    assert not any(message["corrupted"] for message in got)


def test_an_acknowledged_message_does_not_come_again(both: Seen) -> None:
    assert both("normal")["again"] == 0


def test_message_groups_keep_their_order(both: Seen) -> None:
    got = both("fifo")["got"]

    assert by_group(got) == {"g0": ["0", "1", "2"], "g1": ["0", "1", "2"]}


def test_a_scheduled_message_is_not_early(both: Seen) -> None:
    facts = both("delay")

    (got,) = facts["got"]

    assert 0 <= got["at_ms"] - facts["due_ms"] < 20_000


def test_a_recalled_message_does_not_come(both: Seen) -> None:
    facts = both("recall")

    assert facts["recalled"] == facts["id"]
    assert bodies(facts["got"]) == ["yes"]
    assert facts["late"] != ""


def test_the_higher_priority_comes_first(both: Seen) -> None:
    got = both("priority")["got"]

    assert bodies(got) == ["9", "5", "1"]
    assert [message["priority"] for message in got] == [9, 5, 1]


def test_only_committed_halves_come(both: Seen) -> None:
    facts = both("transaction")

    assert bodies(facts["got"] + facts["orphan"]) == ["a", "orphan commit"]


def test_the_producer_is_asked_about_an_orphan(both: Seen) -> None:
    assert set(both("transaction")["asked"]) == {"orphan commit"}


def test_sends_at_once_are_all_answered(both: Seen) -> None:
    facts = both("send_async")

    assert len(set(facts["sent"])) == 100
    assert sorted(message["id"] for message in facts["got"]) == sorted(facts["sent"])


def test_clients_understand_refusals(both: Seen) -> None:
    facts = both("refusals")

    assert facts["wrong_type"] != ""
    assert facts["missing"] != ""
    assert facts["receipt"] == "BadRequestException"


def test_namespaces_do_not_see_each_other(both: Seen) -> None:
    facts = both("namespaces")

    assert bodies(facts["north"]) == ["north"]
    assert bodies(facts["south"]) == ["south"]
    assert facts["north again"] == facts["south again"] == []
    assert {"/", "%"}.isdisjoint(facts["north"][0]["topic"])


def test_tls_endpoint_serves_the_same_topics(both: Seen) -> None:
    facts = both("over_tls")

    assert [message["id"] for message in facts["got"]] == facts["sent"]


def test_only_those_who_may_send(both: Seen) -> None:
    facts = both("access")

    assert facts["good"] == ""
    assert "" not in {facts["bad"], facts["unknown"], facts["anonymous"], facts["denied"]}


def test_filters_choose(both: Seen) -> None:
    facts = both("filters")

    assert sorted(bodies(facts["tags"])) == ["a1", "b5"]
    assert bodies(facts["sql"]) == ["c9"]


def test_a_changed_invisible_duration_ends_on_time(both: Seen) -> None:
    facts = both("invisible")

    (got,) = facts["got"]

    assert got["attempt"] == 2
    # 35 clients start at once, and wait for each other; unchanged it would take 30 s.
    assert 1000 <= got["at_ms"] - facts["asked_ms"] < 20_000
    assert facts["new_handle"]
    assert facts["old_handle"] == "BadRequestException"


def test_push_hears_everything_and_a_failure_again(both: Seen) -> None:
    got = both("push_concurrent")["got"]

    attempts = sorted((message["body"], message["attempt"]) for message in got)

    assert attempts == sorted([*((f"p{i}", 1) for i in range(40)), ("p3", 2)])
    assert {message["properties"]["p"] for message in got} == {"q"}


def test_a_failing_message_holds_up_its_own_group_only(both: Seen) -> None:
    got = both("push_fifo")["got"]

    groups = by_group(got)

    assert groups["g"] == ["g0", "g1", "g2", "g3"]
    assert groups["h"] == ["h0", "h1", "h1", "h1", "h2", "h3"]


def test_a_message_that_keeps_failing_is_a_dead_letter(
    both: Seen, client: Client, prefix: str
) -> None:
    both("push_fifo")

    dead = client.sql(
        f"SELECT topic, message_group FROM dead_letters "
        f"WHERE consumer_group = '{prefix}-push-fifo-group'"
    )

    assert dead.to_pylist() == [{"topic": f"{prefix}-push-fifo", "message_group": "h"}]


def test_a_listener_hears_a_queue_in_order_and_a_failing_message_ends(
    seen: Callable[[str, str], Facts], client: Client
) -> None:
    got = seen("python", "push_queue")["got"]

    groups = by_group(got)
    assert groups["g"] == ["g0", "g1", "g1", "g1", "g2", "g3"]
    assert groups["h"] == ["h0", "h1", "h2", "h3"]
    dead = client.sql(
        "SELECT origin_queue_offset FROM dead_letters WHERE consumer_group = 'py-push-queue-group'"
    )
    assert dead["origin_queue_offset"].to_pylist() == [2]


def test_a_batch_blocks_its_queue_until_it_is_acknowledged(
    seen: Callable[[str, str], Facts],
) -> None:
    facts = seen("python", "queue_order")

    assert bodies(facts["batch"]) == ["q0", "q1"]
    assert facts["blocked"] == []
    assert bodies(facts["got"]) == ["q2", "q3"]


def test_lite_consumers_get_what_they_asked_for(both: Seen) -> None:
    got = both("lite")["push"]

    assert bodies(got) == ["1", "4"]
    assert {message["lite_topic"] for message in got} == {"room-1"}


def test_a_simple_consumer_of_lite_topics(seen: Callable[[str, str], Facts]) -> None:
    got = seen("python", "lite")["simple"]

    assert bodies(got) == ["2", "5"]


def test_a_receive_in_the_background(seen: Callable[[str, str], Facts]) -> None:
    facts = seen("python", "receive_async")

    assert bodies(facts["got"]) == ["x"]
    assert facts["acked"] == ""


def test_groups_come_into_being_at_this_endpoint(both: Seen, client: Client, prefix: str) -> None:
    both("normal")

    groups = set(client.list_groups()["name"].to_pylist())

    assert f"{prefix}-normal-group" in groups
