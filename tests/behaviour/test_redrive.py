"""A dead letter is opened again for the group that gave it up: the original, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from tests.behaviour.redrives import OUTCOMES, bodies, redrive

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.mark.every_endpoint
def test_a_redriven_message_comes_again_with_its_attempts_from_one(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(3)

    assert redrive(endpoint, readers, 0, 2) == ["redriven", "redriven"]

    got = endpoint.broker.receive(readers, name)
    assert bodies(got) == [b"0", b"2"]
    assert got["delivery_attempt"].to_pylist() == [1, 1]
    assert got["queue_offset"].to_pylist() == [0, 2]
    assert got["message_id"].to_pylist() == ["m-0", "m-2"]


@pytest.mark.every_endpoint
def test_no_other_group_sees_a_redrive_and_nothing_is_copied(
    endpoint: Endpoint, dead: Make, group: Make
) -> None:
    name, readers = dead(3)
    others = group()
    endpoint.drain(name, others)

    redrive(endpoint, readers, 0, 1, 2)

    assert endpoint.broker.receive(others, name).num_rows == 0
    assert endpoint.stored(name) == 3
    assert endpoint.stored(f"%DLQ%{readers}") == 3


def test_a_dead_letter_is_redriven_once_ever(endpoint: Endpoint, dead: Make) -> None:
    name, readers = dead(2)

    assert redrive(endpoint, readers, 0) == ["redriven"]
    assert redrive(endpoint, readers, 0, 1) == ["already", "redriven"]
    assert redrive(endpoint, readers, 0, 1, redrive_id="r-2") == ["already", "already"]

    assert sorted(endpoint.drain(name, readers)) == [b"0", b"1"]
    assert redrive(endpoint, readers, 0, 1, redrive_id="r-3") == ["already", "already"]
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_a_dead_letter_named_twice_in_one_call_is_redriven_once(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(1)

    assert redrive(endpoint, readers, 0, 0) == ["redriven", "already"]

    assert endpoint.drain(name, readers) == [b"0"]


def test_a_second_death_is_a_new_dead_letter(endpoint: Endpoint, dead: Make) -> None:
    name, readers = dead(1)
    redrive(endpoint, readers, 0)
    again = endpoint.broker.receive(readers, name)
    endpoint.broker.forward_to_dead_letter_queue(again, reason="again")

    assert redrive(endpoint, readers, 0) == ["already"]
    assert redrive(endpoint, readers, 1) == ["redriven"]

    assert endpoint.drain(name, readers) == [b"0"]
    assert [row["outcome"] for row in endpoint.sql(OUTCOMES)] == ["dead_lettered", "acked"]


def test_attempts_and_backoff_begin_again(endpoint: Endpoint, dead: Make, fail: Make) -> None:
    name, readers = dead(1, max_attempts=2, backoff_ms=[1_000])
    redrive(endpoint, readers, 0)

    fail(readers, endpoint.broker.receive(readers, name))
    early = endpoint.broker.receive(readers, name).num_rows
    endpoint.advance(1_000)
    second = endpoint.broker.receive(readers, name)
    fail(readers, second)

    assert early == 0
    assert second["delivery_attempt"].to_pylist() == [2]
    assert endpoint.stored(f"%DLQ%{readers}") == 2


def test_a_redrive_wakes_a_receive_that_waits(endpoint: Endpoint, dead: Make) -> None:
    name, readers = dead(1)
    waiting = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=20_000))

    redrive(endpoint, readers, 0)

    assert bodies(waiting.result(60)) == [b"0"]


def test_a_message_whose_topic_is_deleted_is_gone(
    endpoint: Endpoint, dead: Make, topic: Make, messages: Make
) -> None:
    name, readers = dead(2)
    endpoint.broker.delete_topic(name)

    assert redrive(endpoint, readers, 0) == ["gone"]
    endpoint.advance(1)
    topic(name, queues=1)
    endpoint.broker.send(name, messages(2, message_id=["m-0", "m-1"]))
    assert redrive(endpoint, readers, 0, 1) == ["already", "gone"]

    assert sorted(endpoint.drain(name, readers)) == [b"0", b"1"]
    assert [row["outcome"] for row in endpoint.sql(OUTCOMES)] == ["gone", "gone"]


def test_a_redriven_message_that_is_to_be_read_anyway_comes_once(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(3)
    endpoint.broker.reset_offset(readers, name, to_earliest=True)

    assert redrive(endpoint, readers, 0, 1) == ["redriven", "redriven"]

    assert endpoint.drain(name, readers) == [b"0", b"1", b"2"]


def test_a_redriven_message_that_is_in_flight_again_keeps_its_receipt(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(1)
    endpoint.broker.reset_offset(readers, name, to_earliest=True)
    got = endpoint.broker.receive(readers, name)

    redrive(endpoint, readers, 0)
    endpoint.broker.ack(got)

    assert endpoint.broker.receive(readers, name).num_rows == 0
    assert [row["outcome"] for row in endpoint.sql(OUTCOMES)] == ["acked"]


@pytest.mark.every_endpoint
def test_a_place_that_is_no_dead_letter_is_refused_and_nothing_is_redriven(
    endpoint: Endpoint, dead: Make
) -> None:
    name, readers = dead(1)

    with pytest.raises(errors.IllegalOffsetError, match=r"row 1 .*offset 7"):
        redrive(endpoint, readers, 0, 7)
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        redrive(endpoint, "nobody", 0)
    with pytest.raises(errors.RequestError):
        redrive(endpoint, readers, 0, redrive_id="")
    with pytest.raises(errors.TableSchemaError):
        endpoint.broker.redrive(readers, pa.table({"queue_id": [0]}), redrive_id="r")

    assert endpoint.broker.receive(readers, name).num_rows == 0
    assert redrive(endpoint, readers, 0) == ["redriven"]
    assert redrive(endpoint, readers) == []


def test_the_manifest_has_the_first_and_the_last_outcome_of_every_message(
    endpoint: Endpoint, dead: Make, outcomes: Make
) -> None:
    name, readers = dead(5, max_attempts=2, backoff_ms=[0])
    redrive(endpoint, readers, 0, 1, 2, 3)
    before = endpoint.sql("SELECT * FROM redrives ORDER BY dead_letter_offset")
    redriven_at = endpoint.clock.now_ms()
    endpoint.advance(5)
    got = endpoint.broker.receive(readers, name, limit=3)

    done = outcomes(got, ["ack", "retry", "dead_letter"])
    endpoint.broker.settle(readers, done)
    between = endpoint.sql(OUTCOMES)
    endpoint.advance(5)
    endpoint.broker.ack(endpoint.broker.receive(readers, name, limit=1))
    after = endpoint.sql("SELECT * FROM redrives ORDER BY dead_letter_offset")

    assert before[1] == {
        "consumer_group": readers,
        "redrive_id": "r-1",
        "dead_letter_queue_id": 0,
        "dead_letter_offset": 1,
        "topic": name,
        "queue_id": 0,
        "queue_offset": 1,
        "message_id": "m-1",
        "redriven_at_ms": redriven_at,
        "outcome": "waiting",
        "outcome_at_ms": None,
        "first_outcome": None,
    }
    assert [row["outcome"] for row in between] == ["acked", "retrying", "dead_lettered", "waiting"]
    said = [(row["outcome"], row["first_outcome"], row["outcome_at_ms"]) for row in after]
    assert said == [
        ("acked", "acked", redriven_at + 5),
        ("acked", "retrying", redriven_at + 10),
        ("dead_lettered", "retrying", redriven_at + 5),
        ("waiting", None, None),
    ]


def test_a_lease_that_ended_is_a_first_outcome(endpoint: Endpoint, dead: Make) -> None:
    name, readers = dead(1)
    redrive(endpoint, readers, 0)
    endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(1_000)
    endpoint.broker.ack(endpoint.broker.receive(readers, name))

    [row] = endpoint.sql(OUTCOMES)

    assert (row["outcome"], row["first_outcome"]) == ("acked", "retrying")


@pytest.mark.parametrize("end", ["reset", "topic"])
def test_a_redriven_message_that_is_taken_away_is_gone(
    endpoint: Endpoint, dead: Make, end: str
) -> None:
    name, readers = dead(1)
    redrive(endpoint, readers, 0)

    if end == "reset":
        endpoint.broker.reset_offset(readers, name, to_latest=True)
    else:
        endpoint.broker.delete_topic(name)

    assert [row["outcome"] for row in endpoint.sql(OUTCOMES)] == ["gone"]


def test_dead_letters_say_whether_and_when_they_were_redriven(
    endpoint: Endpoint, dead: Make
) -> None:
    _, readers = dead(2)
    redrive(endpoint, readers, 1, redrive_id="the-fix")

    rows = endpoint.sql(
        "SELECT redrive_id, redriven_at_ms, properties['DLQ_REASON'] AS why FROM dead_letters"
        " ORDER BY queue_offset"
    )

    assert rows == [
        {"redrive_id": None, "redriven_at_ms": None, "why": "boom"},
        {"redrive_id": "the-fix", "redriven_at_ms": endpoint.clock.now_ms(), "why": "boom"},
    ]


@pytest.mark.parametrize("dispatched", [True, False])
def test_redrives_are_there_after_a_restart(
    endpoint: Endpoint, dead: Make, dispatched: bool
) -> None:
    name, readers = dead(3, groups=["a"], more=1)
    redrive(endpoint, readers, 0, 1)
    if dispatched:
        endpoint.sql("SELECT count(*) FROM redrives")

    endpoint.reopen()

    assert redrive(endpoint, readers, 0, 1, 2) == ["already", "already", "redriven"]
    assert endpoint.drain(name, readers) == [b"0", b"1", b"2", b"3"]
    assert [row["outcome"] for row in endpoint.sql(OUTCOMES)] == ["acked"] * 3


def test_outcomes_are_kept_across_a_restart(endpoint: Endpoint, dead: Make, fail: Make) -> None:
    name, readers = dead(2, backoff_ms=[1_000])
    redrive(endpoint, readers, 0, 1)
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.reopen()
    endpoint.advance(1_000)

    endpoint.drain(name, readers)

    said = [(row["outcome"], row["first_outcome"]) for row in endpoint.sql(OUTCOMES)]
    assert said == [("acked", "retrying"), ("acked", "acked")]


def test_a_group_made_again_redrives_what_its_namesake_did_not(
    endpoint: Endpoint, dead: Make, group: Make
) -> None:
    name, readers = dead(2)
    redrive(endpoint, readers, 0)
    endpoint.drain(name, readers)
    endpoint.broker.delete_group(readers)
    group(readers)
    endpoint.broker.reset_offset(readers, name, to_latest=True)

    assert redrive(endpoint, readers, 0, 1) == ["already", "redriven"]

    assert endpoint.drain(name, readers) == [b"1"]
