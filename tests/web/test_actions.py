"""Actions of an operator: each shows its effect first, and then has this effect."""

from __future__ import annotations

import time

import pytest

from rmq_pipeline.errors import BusyError
from rmq_pipeline.web import actions
from rmq_pipeline.web.server import Where
from tests.conftest import Eventually
from tests.incident_night import Night
from tests.web.conftest import Visitor


def parked(night: Night) -> list[tuple[str, str]]:
    rows = night.broker.sql("SELECT message_group, message_id FROM parked").to_pylist()
    return [(row["message_group"], row["message_id"]) for row in rows]


def test_unpark_delivers_the_message_again(night: Night, visitor: Visitor) -> None:
    plan = visitor.get("/plan/unpark/billing", message_group="customer-1")

    assert "1 parked messages are delivered again from attempt 1 on" in plan.text
    assert "the 3 messages behind them follow" in plan.text
    assert parked(night) == [("customer-1", "order-5")]

    done = visitor.post("/do/unpark/billing", message_group="customer-1")

    assert done.text.startswith("1 messages are delivered again, 0 are dead-lettered")
    assert parked(night) == []
    assert 5 in [number for number, _ in night.receive("billing", 100)]


def test_unpark_may_skip_the_message(night: Night, visitor: Visitor) -> None:
    assert "are dead-lettered" in visitor.get("/plan/unpark/billing", skip="1").text

    done = visitor.post("/do/unpark/billing", skip="1")

    assert "1 are dead-lettered" in done.text
    dead = night.broker.sql("FROM dead_letters WHERE consumer_group = 'billing'")
    assert dead["message_id"].to_pylist() == ["order-5"]


def test_a_plan_without_an_effect_cannot_be_carried_out(visitor: Visitor) -> None:
    plan = visitor.get("/plan/unpark/shipping")

    assert "0 parked messages" in plan.text
    assert 'id="confirm" class="danger" disabled' in plan.html


@pytest.mark.parametrize(
    ("form", "again", "skipped", "committed"),
    [
        ({"to": "earliest"}, 20, 0, 0),
        ({"to": "latest"}, 0, 3, 23),
        # The page shows UTC, wherever it runs.
        ({"to": "time", "time": "2026-03-07 02:25:00"}, 0, 0, 20),
    ],
)
def test_a_reset_does_what_its_plan_says(
    night: Night,
    visitor: Visitor,
    form: dict[str, str],
    again: int,
    skipped: int,
    committed: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    request.addfinalizer(time.tzset)
    request.addfinalizer(monkeypatch.undo)
    plan = visitor.get("/plan/reset/billing", topic="orders", **form)

    assert f"{again} messages are delivered again, {skipped} are skipped" in plan.text
    assert night.broker.committed_offsets("billing", "orders")[0][0] == 5

    done = visitor.post("/do/reset/billing", topic="orders", **form)

    assert done.text.startswith("billing was moved in 1 queues of orders.")
    assert night.broker.committed_offsets("billing", "orders")[0][0] == committed


def test_a_redrive_delivers_the_dead_letters_of_a_signature(
    night: Night, visitor: Visitor, eventually: Eventually
) -> None:
    query = "SELECT DISTINCT signature FROM dead_letters WHERE consumer_group = 'shipping'"
    (signature,) = night.broker.sql(query)["signature"].to_pylist()

    plan = visitor.get("/plan/redrive/shipping", signature=signature)
    assert plan.text.startswith("Redrive shipping? 4 dead letters are delivered to shipping again")
    assert "0 dead letters" in visitor.get("/plan/redrive/shipping", signature="other").text

    done = visitor.post("/do/redrive/shipping", signature=signature, rate="1000")

    assert done.text.startswith("Redrive redrive-")
    counted = "SELECT count(*) AS n FROM redrives WHERE consumer_group = 'shipping'"
    eventually(lambda: night.broker.sql(counted)["n"].to_pylist() == [4])
    got = night.receive("shipping", 100)
    night.settle("shipping", got)
    (row,) = visitor.get("/groups/shipping").table("Redrives")
    assert row[2:] == ["4", "4", "0", "0"]


@pytest.mark.parametrize(
    ("path", "form", "said"),
    [
        ("/plan/reset/billing", {"topic": "orders"}, "The form has no target."),
        ("/plan/reset/billing", {"topic": "none", "to": "earliest"}, "none"),
        ("/plan/reset/billing", {"topic": "orders", "to": "time", "time": "x"}, "is not a time"),
        ("/plan/redrive/billing", {"rate": "fast"}, "no number of messages per second"),
        ("/plan/redrive/billing", {"rate": "0.001"}, "no number of messages per second"),
        ("/plan/redrive/billing", {"rate": "nan"}, "no number of messages per second"),
    ],
)
def test_a_wrong_form_is_refused(
    visitor: Visitor, path: str, form: dict[str, str], said: str
) -> None:
    for answer in (visitor.get(path, **form), visitor.post(path.replace("plan", "do"), **form)):
        assert answer.status in (400, 404)
        assert said in answer.text


def test_only_some_redrives_run_at_a_time() -> None:
    with (
        Where("127.0.0.1:1").connect(None, None) as client,
        pytest.raises(BusyError, match="redrives run in this process"),
    ):
        actions.Redrives(most=0).start(client, "shipping", form={})
