"""The questions of docs/incident_night.md, as printed there, on a night that was like that."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline.failure import signature_of
from tests.incident_night import NIGHT, QUESTIONS, Night, Rows, live_through

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    night = Night(tmp_path_factory.mktemp("night") / "home")
    live_through(night)
    yield night
    night.broker.close()


def test_there_are_twelve_questions() -> None:
    assert sorted(QUESTIONS) == sorted(ANSWERS) == list(range(1, 13))


def at(moment: str) -> datetime:
    hours, minutes = moment.split(":")
    return NIGHT.replace(hour=int(hours), minute=int(minutes), tzinfo=None)


STATION = ("at", "what", "consumer_group", "attempt", "run_id", "client_id", "reason")
ANSWERS: dict[int, Rows] = {
    1: [
        {"consumer_group": "shipping", "topic": "orders", "lag": 17, "oldest": at("02:00")},
        {"consumer_group": "billing", "topic": "orders", "lag": 16, "oldest": at("02:00")},
    ],
    2: [
        {"moment": f"02:{minute}", "consumer_group": group, "lag": lag}
        for minute, billing, shipping in (
            *(("00", 20, 20), ("10", 14, 20), ("20", 13, 20)),
            *(("30", 16, 21), ("40", 16, 17), ("50", 16, 17)),
        )
        for group, lag in (("billing", billing), ("shipping", shipping))
    ],
    3: [
        {
            "consumer_group": "shipping",
            "client_id": "van-2",
            "messages": 2,
            "held_until": at("03:50"),
        }
    ],
    4: [
        {
            "consumer_group": "billing",
            "run_id": "run-1",
            "delivery_attempt": 1,
            "held_until": at("02:20"),
        }
    ],
    5: [
        {
            "consumer_group": "shipping",
            "signature": signature_of("carrier timeout after 1 s", error_type="Timeout"),
            "last_reason": "carrier timeout after 6 s",
            "failures": 9,
            "messages": 5,
            "first": "02:30",
            "last": "02:50",
        },
        {
            "consumer_group": "billing",
            "signature": signature_of("card 3 was declined", error_type="CardError"),
            "last_reason": "card 5 was declined",
            "failures": 3,
            "messages": 2,
            "first": "02:13",
            "last": "02:15",
        },
    ],
    6: [
        {"consumer_group": group, "topic": "orders", "delivery_attempts": n, "messages": m}
        | {"next": at(moment)}
        for group, n, m, moment in (
            ("billing", 1, 3, "02:16"),
            ("billing", 0, 3, "02:20"),
            ("shipping", 1, 1, "02:55"),
        )
    ],
    7: [
        {
            "consumer_group": "billing",
            "message_group": "customer-1",
            "message_id": "order-5",
            "reason": "card 5 was declined",
            "delivery_attempts": 2,
            "waiting": 3,
        }
    ],
    8: [
        {
            "consumer_group": "shipping",
            "error_type": "Timeout",
            "for_example": "carrier timeout after 0 s",
            "messages": 4,
            "not_redriven": 4,
        }
    ],
    9: [
        dict(zip(STATION, row, strict=True))
        for row in (
            ("02:00", "stored", None, None, None, None, None),
            ("02:10", "lease", "billing", 1, "run-1", None, None),
            ("02:13", "retry", "billing", 1, "run-1", None, "card 5 was declined"),
            ("02:15", "lease", "billing", 2, "run-2", None, None),
            ("02:15", "park", "billing", 2, "run-2", None, "card 5 was declined"),
            ("02:30", "lease", "shipping", 1, None, "van-1", None),
            ("02:30", "ack", "shipping", 1, None, None, None),
        )
    ],
    10: [
        {"consumer_group": "billing", "client_id": None, "run_id": run, "ran_out": ran_out}
        | {"came_back": came_back, "given": given}
        for run, ran_out, came_back, given in (("run-2", 3, 7, "02:15"), ("run-1", 0, 2, "02:10"))
    ],
    11: [{"delivered": 3, "median_late_ms": 360_000, "most_late_ms": 360_000}],
    12: [
        {
            "at": when,
            "kind": kind,
            "topic": topic,
            "consumer_group": group,
            "queue_id": place,
            "queue_offset": place,
        }
        for when, kind, topic, group, place in (
            ("01:45", "topic_deleted", "audit", None, -1),
            ("01:50", "reset", "orders", "shipping", 0),
        )
    ],
}


@pytest.mark.parametrize("number", sorted(ANSWERS))
def test_the_query_answers_the_question(night: Night, number: int) -> None:
    assert night.ask(number) == ANSWERS[number]
