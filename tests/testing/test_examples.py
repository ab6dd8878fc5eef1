"""Tests of a shop's pipeline, as a user writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.orchestration.transaction_checker import transaction_checker
from rmq_pipeline.testing import TestBroker
from tests.testing import shop
from tests.testing.shop import billing, charging, dunning, ledger, mailing, packing

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _nothing_done_yet() -> Iterator[None]:
    shop.ADDRESSES.clear()
    shop.CHARGED.clear()
    yield
    shop.ADDRESSES.clear()
    shop.CHARGED.clear()


def session() -> object:
    """The Spark session of this process, which another test may have started."""
    spark = sys.modules.get("pyspark.core.context")
    return spark and spark.SparkContext._active_spark_context


def item(order: str, **body: Any) -> Row:
    return {"body": body, "message_group": order}


def test_totals_add_up_in_the_order_of_each_group(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", amount=1), item("b", amount=10), item("a", amount=2)])

    result = rmq.drain(billing)

    totals = [(row["order"], row["total"]) for row in result.rows.to_pylist()]
    assert sorted(totals) == [("a", 1), ("a", 3), ("b", 10)]
    assert totals.index(("a", 1)) < totals.index(("a", 3))


def test_state_lives_from_one_window_to_the_next(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", amount=1)])
    rmq.drain(billing)
    rmq.publish(shop.ORDERS, [item("a", amount=2)])

    second = rmq.drain(billing)

    assert second.rows["total"].to_pylist() == [3]
    assert rmq.rows(billing)["total"].to_pylist() == [1, 3]


def test_a_delayed_message_comes_at_its_time(rmq: TestBroker) -> None:
    rmq.publish(shop.REMINDERS, ["pay"], delay="10s")

    rmq.advance("9999ms")
    before = rmq.drain(mailing)
    rmq.advance("1ms")
    after = rmq.drain(mailing)

    assert (before.acked, after.acked) == (0, 1)


def test_a_handler_that_raises_says_why(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", price=1)])

    result = rmq.drain(billing)

    (failure,) = result.failures
    assert failure.reason == "KeyError: 'amount'"
    assert failure.error_type == "KeyError"
    assert failure.traceback.endswith("KeyError: 'amount'")
    assert (failure.message_group, failure.body) == ("a", b'{"price": 1}')
    assert (result.acked, result.retried) == (0, 1)


def test_a_failed_message_comes_back_after_its_backoff(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", price=1)])
    rmq.drain(billing)

    rmq.advance("9s")
    too_early = rmq.drain(billing)
    rmq.advance("1s")
    second = rmq.drain(billing)

    assert too_early.delivered == 0
    assert [failure.delivery_attempt for failure in second.failures] == [2]


def test_after_the_last_attempt_it_is_a_dead_letter(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", price=1)])

    results = []
    for wait in ("0s", "10s", "1m"):
        rmq.advance(wait)
        results.append(rmq.drain(billing))

    assert [(r.retried, r.dead_lettered) for r in results] == [(1, 0), (1, 0), (0, 1)]
    (letter,) = rmq.dead_letters(billing).to_pylist()
    assert (letter["body"], letter["attempts"]) == (b'{"price": 1}', 3)
    assert letter["reason"] == "KeyError: 'amount'"


def test_a_failing_order_holds_up_no_other(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", price=1), item("a", amount=5), item("b", amount=7)])

    result = rmq.drain(billing)

    assert [row["order"] for row in result.rows.to_pylist()] == ["b"]
    assert (result.acked, result.retried, result.released) == (1, 1, 1)


def test_an_order_goes_on_after_its_dead_letter(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", price=1), item("a", amount=5)])
    for wait in ("0s", "10s", "1m"):
        rmq.advance(wait)
        rmq.drain(billing)

    assert rmq.rows(billing)["total"].to_pylist() == [5]


def test_a_parked_message_holds_its_group(rmq: TestBroker) -> None:
    parcels = [{"body": "x", "message_group": g} for g in ("nowhere", "nowhere", "here")]
    rmq.publish(shop.PARCELS, parcels)

    result = rmq.drain(packing)

    assert (result.parked, result.acked) == (1, 1)
    (parked,) = rmq.parked(packing).to_pylist()
    assert (parked["message_group"], parked["waiting"]) == ("nowhere", 1)
    assert parked["reason"] == "LookupError: no address of nowhere"


def test_an_unparked_message_is_delivered_before_its_successors(rmq: TestBroker) -> None:
    parcels = [{"body": body, "message_group": "nowhere"} for body in ("1", "2")]
    rmq.publish(shop.PARCELS, parcels)
    rmq.drain(packing)
    shop.ADDRESSES.append("nowhere")

    rmq.broker.unpark("packing")
    result = rmq.drain(packing)

    assert result.acked == 2
    assert rmq.parked(packing).num_rows == 0


def test_what_a_consumer_publishes_reaches_the_next(rmq: TestBroker) -> None:
    rmq.publish(shop.ORDERS, [item("a", amount=1), item("b", amount=2)])

    first = rmq.drain(billing)
    second = rmq.drain(dunning)

    assert first.published["invoices"].num_rows == 2
    assert second.acked == 2
    assert rmq.messages(shop.INVOICES).num_rows == 2


def test_a_reminder_is_due_ten_days_later(rmq: TestBroker) -> None:
    rmq.publish(shop.INVOICES, [{"order": "a"}])
    reminders = rmq.drain(dunning).published["reminders"]
    in_ten_days = rmq.clock.now_ms() + 10 * 86_400_000

    assert reminders["deliver_at_ms"].to_pylist() == [in_ten_days]
    assert rmq.drain(mailing).acked == 0
    rmq.advance("10d")
    assert rmq.drain(mailing).acked == 1


def test_a_committed_payment_is_delivered(rmq: TestBroker) -> None:
    rmq.prepare(shop.PAYMENTS, ["commit 5"])
    assert rmq.drain(charging).acked == 0

    rmq.advance("6s")
    assert rmq.check(shop.payment_checker)["commit"] == 1

    assert rmq.drain(charging).acked == 1


def test_a_payment_that_is_rolled_back_never_comes(rmq: TestBroker) -> None:
    rmq.prepare(shop.PAYMENTS, ["rollback 5"])

    rmq.advance("6s")
    counts = rmq.check(shop.payment_checker)
    rmq.advance("1h")

    assert counts == {"commit": 0, "rollback": 1, "unknown": 0, "failed": 0}
    assert rmq.drain(charging).delivered == 0


def test_an_unknown_payment_is_checked_again(rmq: TestBroker) -> None:
    rmq.prepare(shop.PAYMENTS, ["unknown 5"])
    rmq.advance("6s")

    first, at_once = rmq.check(shop.payment_checker), rmq.check(shop.payment_checker)
    rmq.advance("30s")
    second = rmq.check(shop.payment_checker)

    assert [each["unknown"] for each in (first, at_once, second)] == [1, 0, 1]
    assert rmq.sql("SELECT checks FROM half")["checks"].to_pylist() == [2]


def test_a_checker_that_raises_leaves_the_payment_open(rmq: TestBroker) -> None:
    @transaction_checker(topic=shop.PAYMENTS)
    def away(checks: pa.Table) -> list[str]:  # noqa: ARG001
        raise ConnectionError("the bank is away")

    rmq.prepare(shop.PAYMENTS, ["commit 5"])
    rmq.advance("6s")

    assert rmq.check(away)["failed"] == 1
    rmq.advance("30s")
    assert rmq.check(shop.payment_checker)["commit"] == 1


def test_a_filter_by_tag_passes_the_others_over(rmq: TestBroker) -> None:
    offers = [{"body": "1", "tag": tag} for tag in ("summer", "winter", "sale")]
    rmq.publish(shop.OFFERS, offers)

    assert rmq.drain(shop.summer).acked == 2


def test_a_filter_on_properties_selects(rmq: TestBroker) -> None:
    offers = [{"body": "1", "properties": {"price": str(price)}} for price in (5, 15)]
    rmq.publish(shop.OFFERS, offers)

    assert rmq.drain(shop.cheap).acked == 1


def test_a_rejected_offer_is_a_dead_letter_at_once(rmq: TestBroker) -> None:
    rmq.publish(shop.OFFERS, [{"body": body, "tag": "sale"} for body in ("5", "?")])

    result = rmq.drain(shop.summer)

    assert (result.acked, result.dead_lettered) == (1, 1)
    assert [failure.reason for failure in result.failures] == ["no price"]


def test_a_card_is_charged_once_for_a_key(rmq: TestBroker) -> None:
    for body in ("commit 5", "commit 5 again"):
        rmq.prepare(shop.PAYMENTS, [{"body": body, "keys": ["order-1"]}])
        rmq.advance("6s")
        rmq.check(shop.payment_checker)
        rmq.drain(charging)

    assert shop.CHARGED == ["commit 5"]


def test_a_spark_consumer_needs_no_jvm(rmq: TestBroker) -> None:
    rmq.publish(shop.INVOICES, [{"order": "a"}, {"order": "b"}])
    before = session()

    result = rmq.drain(ledger)

    assert sorted(result.rows["order"].to_pylist()) == ["a", "b"]
    assert session() is before


def test_a_dead_letter_is_redriven_once_the_handler_is_right(rmq: TestBroker) -> None:
    rmq.publish(shop.OFFERS, [{"body": "?", "tag": "sale"}])
    rmq.drain(shop.summer)
    letters = rmq.dead_letters(shop.summer).select(["queue_id", "queue_offset"])

    rmq.broker.redrive("summer", letters, redrive_id="corrected")

    assert rmq.drain(shop.summer).delivered == 1


def test_a_message_of_a_dead_worker_comes_back(rmq: TestBroker) -> None:
    rmq.create(shop.PIPELINE)
    rmq.publish("invoices", [{"order": "a"}])
    rmq.broker.receive("ledger", "invoices", invisible_duration_ms=60_000)

    rmq.advance("59s")
    assert rmq.drain(ledger).delivered == 0
    rmq.advance("1s")
    result = rmq.drain(ledger)

    assert result.acked == 1
    assert json.loads(rmq.messages("invoices")["body"][0].as_py()) == {"order": "a"}
