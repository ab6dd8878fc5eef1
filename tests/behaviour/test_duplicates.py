"""A topic that suppresses repetitions stores a message once within its window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits
from tests.behaviour.test_one_frame import sending

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SECOND = 1_000
WINDOW = 60 * SECOND
RESTARTS = pytest.mark.parametrize("dispatched", [True, False], ids=["from_tables", "from_log"])


@pytest.fixture
def once(topic: Make) -> Make:
    """``once(deduplicate, …)`` creates a topic with a window of a minute and gives its name."""

    def create(deduplicate: str = "message_id", **settings: Any) -> str:
        settings = {"queues": 4, "deduplicate_window_ms": WINDOW, **settings}
        return str(topic(deduplicate=deduplicate, **settings))

    return create


def places(sent: pa.Table, *rows: int) -> list[tuple[str, int, int]]:
    names = ["message_id", "queue_id", "queue_offset"]
    found = [tuple(row.values()) for row in sent.select(names).to_pylist()]
    return [found[row] for row in rows] if rows else found


def duplicates(sent: pa.Table) -> list[bool]:
    flags: list[bool] = sent["duplicate"].to_pylist()
    return flags


def test_a_topic_stores_repetitions_unless_it_says_otherwise(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic()
    described = endpoint.broker.describe_topic(name)

    sent = endpoint.broker.send(name, messages(2, message_id="one", keys=[["k"], ["k"]]))

    assert (described["deduplicate"], described["deduplicate_window_ms"]) == ("none", 600_000)
    assert duplicates(sent) == [False, False]
    assert endpoint.stored(name) == 2


@pytest.mark.every_endpoint
@pytest.mark.parametrize(
    ("deduplicate", "column"), [("message_id", "one"), ("key", [["k"]])], ids=["id", "key"]
)
def test_a_repetition_is_answered_with_the_place_of_the_first(
    endpoint: Endpoint, once: Make, messages: Make, deduplicate: str, column: Any
) -> None:
    name = once(deduplicate)
    columns = {"message_id" if deduplicate == "message_id" else "keys": column}
    first = endpoint.broker.send(name, messages(1, **columns))
    endpoint.broker.send(name, messages(5, start=1))

    again = endpoint.broker.send(name, messages(1, start=6, **columns))

    assert (duplicates(first), duplicates(again)) == ([False], [True])
    assert places(again) == places(first)
    assert endpoint.stored(name) == 6
    assert b"6" not in endpoint.bodies(name)


def test_of_repetitions_in_one_table_the_first_is_stored(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    name = once()
    endpoint.broker.send(name, messages(1, message_id="old"))
    ids = ["a", "b", "a", None, "old", "a", None, "b"]

    sent = endpoint.broker.send(name, messages(8, start=1, message_id=ids))

    assert duplicates(sent) == [False, False, True, False, True, True, False, True]
    assert places(sent, 2, 5, 7) == places(sent, 0, 0, 1)
    assert endpoint.stored(name) == 5
    stored = {bytes(body) for body in endpoint.bodies(name)}
    assert stored == {b"0", b"1", b"2", b"4", b"7"}


def test_a_table_of_nothing_but_repetitions_stores_nothing(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    name = once("key")
    first = endpoint.broker.send(name, messages(3, keys=[["a"], ["b"], ["c"]]))

    again = endpoint.broker.send(name, messages(3, keys=[["c"], ["a"], ["c"]]))

    assert duplicates(again) == [True] * 3
    assert places(again) == places(first, 2, 0, 2)
    assert endpoint.stored(name) == 3


def test_keys_are_the_same_when_all_of_them_are(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    name = once("key")
    keys = [["a"], ["a", "b"], ["b", "a"], ["a", "b"], [], [], None, None, ["a"]]

    sent = endpoint.broker.send(name, messages(9, keys=keys))

    assert duplicates(sent) == [False, False, False, True, False, False, False, False, True]


def test_a_message_that_comes_after_the_window_is_stored_again(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    name = once()
    sends = []
    for after_ms in (0, WINDOW - 1, 1, WINDOW - 1, 1):
        endpoint.advance(after_ms)
        sends.append(endpoint.broker.send(name, messages(1, message_id="one")))

    # A repetition does not prolong the window of the first.
    assert [duplicates(sent)[0] for sent in sends] == [False, True, False, True, False]
    assert places(sends[1]) == places(sends[0])
    assert places(sends[3]) == places(sends[2]) != places(sends[0])
    assert endpoint.stored(name) == 3


def test_topics_do_not_suppress_each_others_messages(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    one, other = once(), once()

    sent = [
        endpoint.broker.send(name, messages(1, message_id="same")) for name in (one, other, one)
    ]

    assert [duplicates(each)[0] for each in sent] == [False, False, True]


@RESTARTS
def test_repetitions_are_known_after_a_restart(
    endpoint: Endpoint, once: Make, messages: Make, dispatched: bool
) -> None:
    by_id, by_key = once(), once("key")
    ids = [f"id-{i}" for i in range(500)]
    first = endpoint.broker.send(by_id, messages(500, message_id=ids))
    keyed = endpoint.broker.send(by_key, messages(2, keys=[["a"], ["b"]]))
    if dispatched:
        endpoint.sql("SELECT 1")
    endpoint.advance(WINDOW - 1)

    endpoint.reopen()

    again = endpoint.broker.send(by_id, messages(501, message_id=[*reversed(ids), "new"]))
    assert duplicates(again) == [True] * 500 + [False]
    assert places(again)[:500] == places(first)[::-1]
    assert places(endpoint.broker.send(by_key, messages(1, keys=[["b"]]))) == places(keyed, 1)
    endpoint.advance(1)
    endpoint.reopen()
    assert duplicates(endpoint.broker.send(by_id, messages(1, message_id="id-0"))) == [False]


# --------------------------------------------------------------------------------------- scheduled


@RESTARTS
def test_a_scheduled_message_is_not_scheduled_twice(
    endpoint: Endpoint, once: Make, group: Make, messages: Make, dispatched: bool
) -> None:
    name, readers = once(type="delay"), group()
    first = endpoint.broker.send(name, messages(2, message_id=["a", "b"], delay_level=[1, 4]))
    if dispatched:
        endpoint.sql("SELECT 1")
    endpoint.reopen()

    again = endpoint.broker.send(name, messages(2, message_id="a", delay_level=2))

    assert duplicates(again) == [True, True]
    assert places(again) == places(first, 0, 0)
    assert again["recall_handle"].to_pylist() == [first["recall_handle"][0].as_py()] * 2
    endpoint.advance(30 * SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 2
    assert sorted(endpoint.drain(name, readers)) == [b"0", b"1"]


@RESTARTS
def test_a_scheduled_message_that_was_delivered_is_still_known(
    endpoint: Endpoint, once: Make, messages: Make, dispatched: bool
) -> None:
    name = once(type="delay")
    first = endpoint.broker.send(name, messages(1, message_id="a", delay_level=1))
    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 1
    assert endpoint.stored(name) == 1
    if dispatched:
        endpoint.sql("SELECT 1")
    endpoint.reopen()

    # The window begins when it was sent, not when it was delivered.
    endpoint.advance(WINDOW - SECOND - 1)
    again = endpoint.broker.send(name, messages(1, message_id="a", delay_level=1))
    endpoint.advance(1)
    late = endpoint.broker.send(name, messages(1, message_id="a", delay_level=1))

    assert (duplicates(again), places(again)) == ([True], places(first))
    assert duplicates(late) == [False]


@RESTARTS
def test_a_recalled_message_may_be_sent_again(
    endpoint: Endpoint, once: Make, messages: Make, dispatched: bool
) -> None:
    name = once(type="delay")
    sent = endpoint.broker.send(name, messages(2, message_id=["a", "b"], delay_level=1))
    endpoint.broker.recall(name, sent.select(["recall_handle"]).slice(0, 1))
    if dispatched:
        endpoint.sql("SELECT 1")

    endpoint.reopen()
    again = endpoint.broker.send(name, messages(2, message_id=["a", "b"], delay_level=1))

    assert duplicates(again) == [False, True]
    endpoint.advance(SECOND)
    assert endpoint.broker.deliver_scheduled()["delivered"] == 2


def test_a_repetition_of_a_scheduled_message_by_key_can_be_recalled(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    name = once("key", type="delay")
    first = endpoint.broker.send(name, messages(1, keys=[["k"]], delay_level=1))
    again = endpoint.broker.send(name, messages(1, keys=[["k"]], delay_level=1))

    recalled = endpoint.broker.recall(name, again.select(["recall_handle"]))

    assert places(again) == places(first)
    assert recalled["message_id"].to_pylist() == first["message_id"].to_pylist()


# ------------------------------------------------------------------------------- with other things


def test_what_is_left_of_a_fifo_table_keeps_its_order(
    endpoint: Endpoint, once: Make, group: Make, messages: Make
) -> None:
    name, readers = once(type="fifo"), group(order="message_group")
    ids = [f"{i // 2}" for i in range(40)]

    endpoint.broker.send(name, messages(40, groups=["a", "a", "b", "b"], message_id=ids))

    got = endpoint.broker.receive(readers, name, limit=100).to_pylist()
    for one, start in (("a", 0), ("b", 2)):
        mine = [int(row["body"]) for row in got if row["message_group"] == one]
        assert mine == list(range(start, 40, 4))


def test_what_a_settle_publishes_twice_is_stored_once(
    endpoint: Endpoint, once: Make, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, source, readers = once(), topic(), group()
    endpoint.broker.send(source, messages(2))
    for _ in range(2):
        got = endpoint.broker.receive(readers, source, limit=1)
        onward = messages(1, message_id="onward")
        endpoint.broker.settle(readers, outcomes(got, "ack"), publish={name: onward})

    assert endpoint.stored(name) == 1


def test_two_sends_of_one_frame_store_a_message_once(
    inside: Endpoint, once: Make, messages: Make
) -> None:
    # In process only: no endpoint lets a caller choose what shares a frame.
    name = once()
    sends = [sending(inside, name, messages(2, message_id=["a", f"b{i}"])) for i in range(3)]

    answers = [sent.table() for sent in inside.inside.writer.submit_together(sends)]

    assert [duplicates(sent) for sent in answers] == [[False, False], [True, False], [True, False]]
    assert inside.stored(name) == 4


def test_many_producers_that_all_send_the_same_store_it_once(
    endpoint: Endpoint, once: Make, messages: Make
) -> None:
    name = once()
    tables = [messages(50, start=i, message_id=[f"{j}" for j in range(50)]) for i in range(16)]

    sent = list(endpoint.pool.map(lambda table: endpoint.broker.send(name, table), tables))

    assert endpoint.stored(name) == 50
    assert sum(duplicates(each).count(False) for each in sent) == 50
    assert {tuple(places(each)) for each in sent} == {tuple(places(sent[0]))}


# ----------------------------------------------------------------------------------------- settings


def test_suppression_begins_with_what_is_sent_after_it_was_switched_on(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic()
    endpoint.broker.send(name, messages(1, message_id="a"))

    altered = endpoint.broker.alter_topic(
        name, deduplicate="message_id", deduplicate_window_ms=WINDOW
    )

    assert (altered["deduplicate"], altered["deduplicate_window_ms"]) == ("message_id", WINDOW)
    endpoint.advance(1)
    endpoint.reopen()
    sent = [endpoint.broker.send(name, messages(1, message_id="a")) for _ in range(2)]
    assert [duplicates(each)[0] for each in sent] == [False, True]
    endpoint.broker.alter_topic(name, deduplicate="none")
    assert duplicates(endpoint.broker.send(name, messages(1, message_id="a"))) == [False]
    endpoint.broker.alter_topic(name, deduplicate="key")
    keyed = [
        endpoint.broker.send(name, messages(1, message_id="a", keys=[["k"]])) for _ in range(2)
    ]
    assert duplicates(keyed[0]) == [False]
    endpoint.advance(1)
    keyed = [
        endpoint.broker.send(name, messages(1, message_id="a", keys=[["k"]])) for _ in range(2)
    ]
    assert [duplicates(each)[0] for each in keyed] == [False, True]


@pytest.mark.parametrize("restart", [True, False])
def test_a_longer_window_does_not_bring_back_what_was_forgotten(
    endpoint: Endpoint, once: Make, messages: Make, restart: bool
) -> None:
    name = once(deduplicate_window_ms=10 * SECOND)
    endpoint.broker.send(name, messages(1, message_id="old"))
    endpoint.advance(10 * SECOND)
    endpoint.broker.send(name, messages(1, message_id="new"))

    endpoint.broker.alter_topic(name, deduplicate_window_ms=WINDOW)
    if restart:
        endpoint.reopen()
    endpoint.advance(20 * SECOND)

    sent = endpoint.broker.send(name, messages(2, message_id=["old", "new"]))
    assert duplicates(sent) == [False, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"deduplicate": "body"},
        {"deduplicate": ""},
        {"deduplicate_window_ms": 0},
        {"deduplicate_window_ms": limits.DEDUPLICATE_WINDOW_MAX_MS + 1},
        {"deduplicate_window_ms": True},
    ],
)
def test_settings_of_suppression_out_of_range_are_refused(
    endpoint: Endpoint, once: Make, unused: str, settings: dict[str, Any]
) -> None:
    name = once()
    before = endpoint.broker.describe_topic(name)

    with pytest.raises(errors.RequestError):
        endpoint.broker.create_topic(unused, **settings)
    with pytest.raises(errors.RequestError):
        endpoint.broker.alter_topic(name, **settings)

    assert endpoint.broker.describe_topic(name) == before


def test_a_topic_of_other_suppression_is_another(endpoint: Endpoint, once: Make) -> None:
    name = once()
    same: dict[str, Any] = {"deduplicate": "message_id", "deduplicate_window_ms": WINDOW}
    same["queues"] = 4

    assert endpoint.broker.ensure_topic(name, **same)["deduplicate"] == "message_id"
    for other in ({"deduplicate": "key"}, {"deduplicate_window_ms": 1}):
        with pytest.raises(errors.AlreadyExistsError):
            endpoint.broker.ensure_topic(name, **{**same, **other})


def test_memory_holds_the_window_and_little_more(
    inside: Endpoint, once: Make, messages: Make
) -> None:
    # In process only: what the broker remembers is not to be seen through an endpoint.
    name = once()
    topic_id = inside.broker.describe_topic(name)["topic_id"]
    rng = np.random.default_rng(1)
    for _ in range(60):
        ids = [f"{number}" for number in rng.integers(0, 1 << 60, 500)]
        inside.broker.send(name, messages(500, message_id=ids))
        inside.advance(10 * SECOND)

    known = inside.inside.engine.state.duplicates.of(topic_id)

    assert known is not None
    assert 6 * 500 <= len(known) <= 3 * 6 * 500
