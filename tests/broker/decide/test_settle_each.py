"""Receipts that have nothing to do with each other, settled together."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import receipt
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.settle import DEAD_LETTER, Outcomes, Settle
from rmq_pipeline.broker.decide.settle_each import AckEach, ReleaseEach, Renew
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(tmp_path: Path, clock: ManualClock) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", clock=clock, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=2)
        broker.create_group("g")
        broker.create_topic("orders", type="fifo", queues=1)
        broker.create_group("ordered", order="message_group")
        broker.send("t", pa.table({"body": [b"0", b"1", b"2", b"3"]}))
        table = pa.table({"body": [b"0", b"1", b"2"], "message_group": ["A", "A", "A"]})
        broker.send("orders", table)
        yield broker


def received(broker: Broker, topic: str = "t", group: str = "g") -> Receipts:
    return receipt.decode(broker.receive(group, topic)["receipt_handle"])


def twice(receipts: Receipts) -> Receipts:
    rows = [*range(len(receipts)), 0]
    return receipts.take(rows)  # type: ignore[arg-type]


def test_acks_take_effect_but_for_those_that_do_not_hold(broker: Broker) -> None:
    receipts = received(broker)
    first = receipts.take([0])  # type: ignore[arg-type]
    assert broker.engine.submit(AckEach(first)).tolist() == [True]

    assert broker.engine.submit(AckEach(receipts)).tolist() == [False, True, True, True]
    assert broker.engine.submit(AckEach(receipts)).tolist() == [False] * 4
    assert broker.sql("SELECT * FROM in_flight").num_rows == 0


def test_of_an_ack_given_twice_the_first_takes_effect(broker: Broker) -> None:
    done = broker.engine.submit(AckEach(twice(received(broker)))).tolist()

    assert done == [True, True, True, True, False]


def test_an_ack_that_holds_is_not_refused_for_an_older_one_beside_it(
    broker: Broker, clock: ManualClock
) -> None:
    older = received(broker)
    clock.advance(60_000)
    newer = received(broker)
    columns = zip(
        *((r.group_id, r.topic_id, r.queue_id, r.queue_offset, r.delivery) for r in (older, newer)),
        strict=True,
    )

    done = broker.engine.submit(AckEach(Receipts(*map(np.concatenate, columns)))).tolist()

    assert done == [False] * 4 + [True] * 4
    assert broker.sql("SELECT * FROM in_flight").num_rows == 0


def test_leases_are_renewed_under_the_receipts_they_have(
    broker: Broker, clock: ManualClock
) -> None:
    receipts = received(broker)
    broker.ack(receipt.encode(receipts).to_pylist()[:1])
    clock.advance(59_000)

    assert broker.engine.submit(Renew(receipts, 60_000)).tolist() == [False, True, True, True]
    clock.advance(59_999)

    assert broker.receive("g", "t").num_rows == 0
    assert broker.engine.submit(AckEach(receipts)).tolist() == [False, True, True, True]


def test_a_lease_that_has_ended_is_not_renewed(broker: Broker, clock: ManualClock) -> None:
    receipts = received(broker)

    clock.advance(60_000)

    assert not broker.engine.submit(Renew(receipts, 60_000)).any()
    assert broker.receive("g", "t")["delivery_attempt"].to_pylist() == [2] * 4


def test_what_is_released_was_never_delivered(broker: Broker) -> None:
    receipts = received(broker)
    broker.ack(receipt.encode(receipts).to_pylist()[:1])

    broker.engine.submit(ReleaseEach(receipts))

    assert not broker.engine.submit(AckEach(receipts)).any()
    assert broker.receive("g", "t")["delivery_attempt"].to_pylist() == [1] * 3


def test_a_pause_grows_with_what_waits_already(broker: Broker, clock: ManualClock) -> None:
    broker.create_topic("many", queues=1)
    broker.send("many", pa.table({"body": [b"x"] * 200}))

    def paused(limit: int) -> list[int]:
        given = broker.receive("g", "many", limit=limit)
        receipts = receipt.decode(given.column("receipt_handle"))
        broker.engine.submit(ReleaseEach(receipts, 10_000))
        offsets: list[int] = given["queue_offset"].to_pylist()
        return offsets

    first, second = paused(100), paused(100)
    clock.advance(10_000)
    assert paused(200) == first
    clock.advance(5_000)
    assert broker.receive("g", "many", limit=200)["queue_offset"].to_pylist() == second


def test_a_message_group_released_comes_again_in_order(broker: Broker) -> None:
    receipts = received(broker, "orders", "ordered")

    broker.engine.submit(ReleaseEach(receipts))

    again = broker.receive("ordered", "orders")
    assert again["body"].to_pylist() == [b"0", b"1", b"2"]
    assert again["delivery_attempt"].to_pylist() == [1, 1, 1]


def test_what_is_kept_behind_a_dead_letter_holds_before_that_is_dead_lettered(
    broker: Broker, clock: ManualClock
) -> None:
    broker.send("orders", pa.table({"body": [b"3"], "message_group": ["B"]}))
    receipts = received(broker, "orders", "ordered")
    failed, behind, other = ([row] for row in (0, 1, 3))
    broker.change_invisible_duration(
        receipt.encode(receipts.take(other)).to_pylist(),  # type: ignore[arg-type]
        duration_ms=1_000,
    )
    clock.advance(1_000)
    rejected = Outcomes(
        receipts.take(failed),  # type: ignore[arg-type]
        np.array([DEAD_LETTER], dtype=np.int8),
        np.array([-1], dtype=np.int64),
        pa.nulls(1, pa.string()),
    )

    broker.engine.submit(Settle(rejected, keep_behind=True))

    acked = broker.engine.submit(AckEach(receipts.take(behind)))  # type: ignore[arg-type]
    assert acked.tolist() == [True]
