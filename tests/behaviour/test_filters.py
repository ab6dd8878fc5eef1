"""SQL92 filters: which messages they give, at every endpoint, and what becomes of the others."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits
from rmq_pipeline.broker.state.queue_index import PAGE_ROWS
from rmq_pipeline.broker.work import filtering

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.behaviour.conftest import Endpoint, Make

SQL: dict[str, Any] = {"filter_type": "sql92"}
LIKED = "a > 5 AND region IN ('e','w')"


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def numbered(n: int, *, start: int = 0) -> list[dict[str, str]]:
    """Properties: a counts 0 to 9, region goes through n, e, s, w."""
    numbers = range(start, start + n)
    return [{"a": str(i % 10), "region": "nesw"[i % 4]} for i in numbers]


def liked(n: int) -> list[bytes]:
    """The bodies of n numbered messages that LIKED wants."""
    return [str(i).encode() for i in range(n) if i % 10 > 5 and i % 4 in (1, 3)]


def test_receive_gives_what_a_condition_is_true_for(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    endpoint.broker.send(name, messages(100, properties=numbered(100)))

    got = endpoint.broker.receive(readers, name, limit=100, filter=LIKED, **SQL)

    assert Counter(got["body"].to_pylist()) == Counter(liked(100))


def test_a_condition_sees_tag_and_keys_too(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    keys = [["k1", "k2"], ["k2"], None, ["k1", "k2"]]
    endpoint.broker.send(name, messages(4, tag=["t", "t", "t", None], keys=keys))

    got = endpoint.broker.receive(readers, name, filter="TAGS = 't' AND KEYS = 'k1 k2'", **SQL)

    assert got["body"].to_pylist() == [b"0"]


def test_small_receives_give_every_wanted_message_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    for start in range(0, 1000, 250):
        endpoint.broker.send(
            name, messages(250, start=start, properties=numbered(250, start=start))
        )

    found: list[bytes] = []
    while (got := endpoint.broker.receive(readers, name, limit=7, filter=LIKED, **SQL)).num_rows:
        endpoint.broker.ack(got)
        found += got["body"].to_pylist()

    assert Counter(found) == Counter(liked(1000))


def test_what_a_condition_passed_over_is_done_with(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(100, properties=numbered(100)))
    got = endpoint.broker.receive(readers, name, limit=100, filter="a = 3", **SQL)
    endpoint.broker.ack(got)

    again = endpoint.broker.receive(readers, name, limit=100)

    assert got.num_rows == 10
    assert again.num_rows == 0


@pytest.mark.one_endpoint
def test_a_rare_message_is_found_far_into_a_queue(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    rows = [{"a": "no"}] * 79_999 + [{"a": "yes"}]
    endpoint.broker.send(name, messages(80_000, properties=rows))

    got = endpoint.broker.receive(readers, name, filter="a = 'yes'", **SQL)

    assert got["body"].to_pylist() == [b"79999"]


def test_groups_with_other_conditions_do_not_meddle(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, one, other = topic(queues=2), group(), group()
    endpoint.broker.send(name, messages(40, properties=numbered(40)))

    low = endpoint.broker.receive(one, name, limit=40, filter="a < 5", **SQL)
    high = endpoint.broker.receive(other, name, limit=40, filter="a >= 5", **SQL)

    assert {int(body) % 10 for body in low["body"].to_pylist()} == {0, 1, 2, 3, 4}
    assert {int(body) % 10 for body in high["body"].to_pylist()} == {5, 6, 7, 8, 9}
    assert low.num_rows + high.num_rows == 40


def test_what_failed_comes_again_whatever_the_condition_is_then(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[1_000])
    endpoint.broker.send(name, messages(10, properties=numbered(10)))
    fail(readers, endpoint.broker.receive(readers, name, filter="a = 7", **SQL))
    endpoint.advance(1_000)

    again = endpoint.broker.receive(readers, name, filter="a = 6", **SQL)

    # 6 comes no more: the receive for 7 has passed over it.
    assert again["body"].to_pylist() == [b"7"]
    assert again["delivery_attempt"].to_pylist() == [2]


# --------------------------------------------------------------------------------------- order


def test_a_condition_keeps_the_order_of_a_message_group(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(order="message_group")
    endpoint.broker.send(name, messages(60, groups=["g", "h", "i"], properties=numbered(60)))

    got = endpoint.broker.receive(readers, name, limit=100, filter="a BETWEEN 2 AND 4", **SQL)

    for index, message_group in enumerate("ghi"):
        mine = [r["body"] for r in got.to_pylist() if r["message_group"] == message_group]
        expected = [i for i in range(60) if i % 3 == index and i % 10 in (2, 3, 4)]
        assert mine == [str(i).encode() for i in expected]


@pytest.mark.parametrize("reopened", [False, True])
def test_a_condition_holds_for_messages_that_waited_behind_a_blocked_group(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, reopened: bool
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    rows = [{"a": "1"}, *[{"a": str(i % 2)} for i in range(1, 21)]]
    endpoint.broker.send(name, messages(21, groups=["g"], properties=rows))
    first = endpoint.broker.receive(readers, name, limit=1, filter="a = 0 OR a = 1", **SQL)
    assert endpoint.broker.receive(readers, name, limit=100, filter="a = 1", **SQL).num_rows == 0
    if reopened:
        endpoint.reopen()

    endpoint.broker.ack(first)
    got = endpoint.broker.receive(readers, name, limit=100, filter="a = 1", **SQL)

    assert got["body"].to_pylist() == [str(i).encode() for i in range(1, 21, 2)]


# ------------------------------------------------------------------------------------- restart


def test_a_condition_goes_on_where_it_was_after_a_restart(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group()
    endpoint.broker.send(name, messages(100, properties=numbered(100)))
    first = endpoint.broker.receive(readers, name, limit=5, filter=LIKED, **SQL)
    endpoint.broker.ack(first)
    endpoint.reopen()

    rest = endpoint.broker.receive(readers, name, limit=100, filter=LIKED, **SQL)

    both = first["body"].to_pylist() + rest["body"].to_pylist()
    assert Counter(both) == Counter(liked(100))


# ----------------------------------------------------------------------------------- long poll


def test_a_long_poll_sleeps_through_what_its_condition_refuses(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    poll = endpoint.begin(
        lambda: endpoint.broker.receive(readers, name, wait_ms=30_000, filter="a > 5", **SQL)
    )

    for i, a in enumerate(["1", "3.5", "none", "6"]):
        endpoint.broker.send(name, messages(1, start=i, properties=[{"a": a}]))

    assert poll.result(60)["body"].to_pylist() == [b"3"]


def test_a_condition_wants_nothing_where_nothing_is(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    got = endpoint.broker.receive(group(), topic(), filter="a IS NULL", **SQL)

    assert got.num_rows == 0


# ---------------------------------------------------------------------------------------- read


@pytest.mark.parametrize(
    ("expression", "kind", "expected"),
    [
        ("a = 3", "sql92", [b"3"]),
        ("a >= 8 OR a = 2", "sql92", [b"2", b"8", b"9"]),
        ("a = 77", "sql92", []),
        ("TRUE", "sql92", [b"%d" % i for i in range(2, 10)]),
        ("FALSE", "sql92", []),
        ("odd", "tag", [b"3", b"5", b"7", b"9"]),
        ("odd || even", "tag", [b"%d" % i for i in range(2, 10)]),
        ("*", "tag", [b"%d" % i for i in range(2, 10)]),
    ],
)
def test_read_gives_what_a_filter_wants_of_the_offsets_it_is_asked_for(
    endpoint: Endpoint,
    topic: Make,
    messages: Make,
    expression: str,
    kind: str,
    expected: list[bytes],
) -> None:
    name = topic(queues=1)
    rows = messages(12, properties=numbered(12), tag=["even", "odd"] * 6)
    endpoint.broker.send(name, rows)

    got = endpoint.broker.read(name, 0, offset=2, limit=8, filter=expression, filter_type=kind)

    assert got["body"].to_pylist() == expected
    assert got["queue_offset"].to_pylist() == [int(body) for body in expected]


# ----------------------------------------------------------------------------------- bad input


BAD: dict[str, tuple[str, str]] = {
    "nothing": (" -- a comment\n", "at least one condition"),
    "half a comparison": ("a >", "at character 4"),
    "a number in a list of texts": ("a IN (5)", "at character 7"),
    "an order of texts": ("a > 'x'", "at character 5"),
    "limits the wrong way round": ("a BETWEEN 5 AND 1", "Nothing is between 5 and 1"),
    "no condition": ("5", "not a condition"),
    "an open text": ("a = 'x", "quote"),
    "too much": ("a = 1 b", "at character 7"),
    "too long": ("a = 1 OR " * limits.FILTER_LENGTH + "a = 1", "characters"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("verb", ["receive", "read"])
def test_a_condition_that_does_not_parse_is_refused_and_the_place_is_shown(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, case: str, verb: str
) -> None:
    expression, says = BAD[case]
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    verbs: dict[str, Callable[[], object]] = {
        "receive": lambda: endpoint.broker.receive(readers, name, filter=expression, **SQL),
        "read": lambda: endpoint.broker.read(name, 0, offset=0, limit=9, filter=expression, **SQL),
    }

    with pytest.raises(errors.FilterExpressionError, match=says):
        verbs[verb]()

    assert endpoint.drain(name, readers) == [b"0", b"1", b"2"]


def test_the_place_of_an_error_is_marked_by_a_caret(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    with pytest.raises(errors.FilterExpressionError) as refused:
        endpoint.broker.receive(group(), topic(), filter="a = 1 AND\n  b IN (5)", **SQL)

    assert refused.value.message.splitlines()[1:3] == ["    b IN (5)", "          ^"]


@pytest.mark.parametrize("kind", ["SQL", "", "sql"])
def test_a_filter_of_an_unknown_type_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, kind: str
) -> None:
    with pytest.raises(errors.FilterExpressionError, match="tag or sql92"):
        endpoint.broker.receive(group(), topic(), filter="a = 1", filter_type=kind)


# -------------------------------------------------------------------------- inside the broker


def test_messages_are_judged_once_for_all_receives_of_a_condition(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    inside.broker.send(name, messages(2000, properties=numbered(2000)))
    verdicts = inside.inside.engine.filter_results

    sizes = []
    for _ in range(20):
        inside.broker.receive(readers, name, limit=10, filter="a = 1", **SQL)
        sizes.append(len(verdicts))

    assert sizes == [1] * 20


def test_filter_results_stay_within_their_bound(inside: Endpoint, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1), group()
    verdicts = inside.inside.engine.filter_results
    verdicts._most = 2
    n = 12_000
    inside.broker.send(
        name,
        pa.table({"body": [b"x"] * n, "tag": ["t" if i % 997 == 0 else "u" for i in range(n)]}),
    )

    found: list[int] = []
    while (got := inside.broker.receive(readers, name, filter="TAGS = 't'", **SQL)).num_rows:
        assert len(verdicts) <= 2
        found += got["queue_offset"].to_pylist()

    assert found == list(range(0, n, 997))


def test_filter_results_are_cleared_after_a_failed_write(
    inside: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    inside.broker.send(name, messages(1, properties=[{"a": "1"}]))
    inside.broker.receive(readers, name, filter="a = 2", **SQL)
    verdicts = inside.inside.engine.filter_results
    assert len(verdicts) == 1

    inside.inside.engine._rebuild()

    assert len(verdicts) == 0


def test_more_queues_than_are_judged_at_once_all_give_their_messages(
    inside: Endpoint, topic: Make, group: Make
) -> None:
    queues = filtering.JUDGED_ROWS // PAGE_ROWS + 4
    name, readers, n = topic(queues=queues), group(), queues * PAGE_ROWS
    inside.broker.send(name, pa.table({"body": [b"x"] * n, "tag": ["t"] * n}))

    found: Counter[int] = Counter()
    while (
        got := inside.broker.receive(readers, name, limit=100_000, filter="TAGS = 't'", **SQL)
    ).num_rows:
        found.update(got["queue_id"].to_pylist())

    assert found == dict.fromkeys(range(queues), PAGE_ROWS)
