"""What is kept of a message, and where it goes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import wait
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

#: Message groups and their queue among 4, 8 and 16.
QUEUE_OF_GROUP = {
    "1": (3, 3, 15),
    "2": (2, 2, 10),
    "A": (0, 0, 11),
    "order-1001": (2, 2, 2),
    "order-1002": (2, 2, 15),
    "user_42": (0, 0, 10),
    "订单1": (3, 7, 13),
    "fifo-group": (1, 1, 11),
}


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_every_message_gets_an_offset_of_its_own_dense_per_queue(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=4)

    sent = pa.concat_tables([endpoint.broker.send(name, messages(n)) for n in (1, 7, 1, 100, 3)])

    assert sent.schema.equals(schema.SENT)
    by_queue: dict[int, list[int]] = {}
    for row in sent.to_pylist():
        by_queue.setdefault(row["queue_id"], []).append(row["queue_offset"])
    assert sorted(by_queue) == [0, 1, 2, 3]
    assert all(offsets == list(range(len(offsets))) for offsets in by_queue.values())
    assert endpoint.max_offsets(name) == [len(by_queue[q]) for q in range(4)]


def test_send_answers_row_for_row(endpoint: Endpoint, topic: Make, messages: Make) -> None:
    name = topic(queues=8)
    batch = messages(50)

    sent = endpoint.broker.send(name, batch)

    assert sent.num_rows == 50
    for row, body in zip(sent.to_pylist(), batch["body"].to_pylist(), strict=True):
        at = row["queue_offset"]
        found = endpoint.broker.read(name, row["queue_id"], offset=at, limit=1)
        assert found["body"].to_pylist() == [body]
        assert found["message_id"].to_pylist() == [row["message_id"]]


def test_message_ids_are_made_where_none_is_given(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=1)

    sent = endpoint.broker.send(name, messages(100, message_id=["mine", *[None] * 99]))

    ids = sent["message_id"].to_pylist()
    assert ids[0] == "mine"
    assert all(ids)
    assert len(set(ids)) == 100


def test_everything_about_a_message_is_kept(endpoint: Endpoint, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1), group()
    row = {
        "body": bytes(range(256)),
        "tag": "météo",
        "keys": ["k1", "k2"],
        "born_at_ms": 1_357_000_000_123,
        "message_id": "A-1",
        "properties": [("colour", "blue"), ("empty", "")],
    }
    columns = [schema.SEND.field(n) for n in row]
    table = pa.table({n: [v] for n, v in row.items()}, schema=pa.schema(columns))

    endpoint.broker.send(name, table)

    read = endpoint.broker.read(name, 0, offset=0, limit=1)
    got = endpoint.broker.receive(readers, name)
    assert read.schema.equals(schema.READ)
    assert got.schema.equals(schema.RECEIVED)
    for found in (read.to_pylist()[0], got.to_pylist()[0]):
        assert {n: found[n] for n in row} == row
        assert found["stored_at_ms"] == endpoint.clock.now_ms()
        assert found["deliver_at_ms"] is None
        assert found["message_group"] is None


def test_a_message_is_born_when_it_is_sent_unless_it_says_otherwise(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=1)

    endpoint.broker.send(name, messages(2, born_at_ms=[17, None]))

    born = endpoint.broker.read(name, 0, offset=0, limit=2)["born_at_ms"].to_pylist()
    assert born == [17, endpoint.clock.now_ms()]


def test_a_text_body_is_taken_as_utf8(endpoint: Endpoint, topic: Make) -> None:
    name = topic(queues=1)

    endpoint.broker.send(name, pa.table({"body": ["grüße", "x"]}))

    assert endpoint.bodies(name) == ["grüße".encode(), b"x"]


def test_large_and_dictionary_strings_are_taken(endpoint: Endpoint, topic: Make) -> None:
    name = topic(queues=1)
    table = pa.table(
        {
            "body": pa.array([b"1", b"2"], pa.large_binary()),
            "tag": pa.array(["a", "a"]).dictionary_encode(),
            "message_id": pa.array(["x", "y"], pa.large_string()),
        }
    )

    sent = endpoint.broker.send(name, table)

    assert sent["message_id"].to_pylist() == ["x", "y"]
    assert endpoint.broker.read(name, 0, offset=0, limit=2)["tag"].to_pylist() == ["a", "a"]


def test_an_empty_batch_is_nothing(endpoint: Endpoint, topic: Make, messages: Make) -> None:
    name = topic()

    sent = endpoint.broker.send(name, messages(0))

    assert sent.num_rows == 0
    assert endpoint.stored(name) == 0


# ------------------------------------------------------------------------------- queue choice


@pytest.mark.parametrize("place", [0, 1, 2], ids=["4", "8", "16"])
def test_message_group_goes_to_the_queue_rocketmq_chooses(
    endpoint: Endpoint, topic: Make, messages: Make, place: int
) -> None:
    name = topic(type="fifo", queues=(4, 8, 16)[place])
    groups = list(QUEUE_OF_GROUP)

    batch = endpoint.broker.send(name, messages(16, groups=groups))
    single = [endpoint.broker.send(name, messages(1, groups=[g]))["queue_id"][0] for g in groups]

    expected = [QUEUE_OF_GROUP[g][place] for g in groups]
    assert batch["queue_id"].to_pylist() == expected * 2
    assert [q.as_py() for q in single] == expected


def test_any_text_is_hashed_over_its_utf16_units(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    groups = ["😀", "a😀b", "é", "žluťoučký", *(f"N{i}AA" for i in range(200))]
    name = topic(type="fifo", queues=100)

    sent = endpoint.broker.send(name, messages(len(groups), groups=groups))

    assert sent["queue_id"].to_pylist() == [consistent_hash(java_hash(g), 100) for g in groups]


def java_hash(text: str) -> int:
    data = text.encode("utf-16-be")
    h = 0
    for i in range(0, len(data), 2):
        h = (31 * h + int.from_bytes(data[i : i + 2], "big")) & 0xFFFFFFFF
    return h - (1 << 32) if h >= 1 << 31 else h


def consistent_hash(seed: int, n: int) -> int:
    state, candidate = seed % (1 << 64), 0
    while True:
        state = (state * 2862933555777941757 + 1) % (1 << 64)
        following = int((candidate + 1) / (((state >> 33) + 1) / (1 << 31)))
        if not 0 <= following < n:
            return candidate
        candidate = following


def test_messages_of_one_group_share_a_queue_in_the_order_sent(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=8)

    sent = endpoint.broker.send(name, messages(300, groups=["a", "b", "c"])).to_pylist()

    for start in range(3):
        mine = sent[start::3]
        assert len({row["queue_id"] for row in mine}) == 1
        offsets = [row["queue_offset"] for row in mine]
        assert offsets == sorted(offsets)


def test_messages_without_a_group_are_spread_evenly(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=8)

    batch = Counter(endpoint.broker.send(name, messages(83))["queue_id"].to_pylist())
    single = Counter(
        endpoint.broker.send(name, messages(1))["queue_id"][0].as_py() for _ in range(20)
    )

    assert sorted(batch) == list(range(8))
    assert max(batch.values()) - min(batch.values()) <= 1
    assert sorted(single) == list(range(8))
    assert max(single.values()) - min(single.values()) <= 1


def test_senders_at_the_same_time_get_different_offsets(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=2)

    futures = [endpoint.pool.submit(endpoint.broker.send, name, messages(5)) for _ in range(40)]
    wait(futures)

    places = [
        (row["queue_id"], row["queue_offset"]) for f in futures for row in f.result().to_pylist()
    ]
    assert len(set(places)) == len(places) == 200 == endpoint.stored(name)
