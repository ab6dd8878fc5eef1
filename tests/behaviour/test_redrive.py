"""A dead letter is opened again for the group that gave it up: the original, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from tests.behaviour.redrives import OUTCOMES, bodies, redrive

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.mark.every_endpoint
def test_a_redriven_message_comes_again_with_its_attempts_from_one(door: Door, dead: Make) -> None:
    name, readers = dead(3)

    assert redrive(door, readers, 0, 2) == ["redriven", "redriven"]

    got = door.broker.receive(readers, name)
    assert bodies(got) == [b"0", b"2"]
    assert got["delivery_attempt"].to_pylist() == [1, 1]
    assert got["queue_offset"].to_pylist() == [0, 2]
    assert got["message_id"].to_pylist() == ["m-0", "m-2"]


@pytest.mark.every_endpoint
def test_no_other_group_sees_a_redrive_and_nothing_is_copied(
    door: Door, dead: Make, group: Make
) -> None:
    name, readers = dead(3)
    others = group()
    door.drain(name, others)

    redrive(door, readers, 0, 1, 2)

    assert door.broker.receive(others, name).num_rows == 0
    assert door.stored(name) == 3
    assert door.stored(f"%DLQ%{readers}") == 3


def test_a_dead_letter_is_redriven_once_ever(door: Door, dead: Make) -> None:
    name, readers = dead(2)

    assert redrive(door, readers, 0) == ["redriven"]
    assert redrive(door, readers, 0, 1) == ["already", "redriven"]
    assert redrive(door, readers, 0, 1, redrive_id="r-2") == ["already", "already"]

    assert sorted(door.drain(name, readers)) == [b"0", b"1"]
    assert redrive(door, readers, 0, 1, redrive_id="r-3") == ["already", "already"]
    assert door.broker.receive(readers, name).num_rows == 0


def test_a_dead_letter_named_twice_in_one_call_is_redriven_once(door: Door, dead: Make) -> None:
    name, readers = dead(1)

    assert redrive(door, readers, 0, 0) == ["redriven", "already"]

    assert door.drain(name, readers) == [b"0"]


def test_a_second_death_is_a_new_dead_letter(door: Door, dead: Make) -> None:
    name, readers = dead(1)
    redrive(door, readers, 0)
    again = door.broker.receive(readers, name)
    door.broker.forward_to_dead_letter_queue(again, reason="again")

    assert redrive(door, readers, 0) == ["already"]
    assert redrive(door, readers, 1) == ["redriven"]

    assert door.drain(name, readers) == [b"0"]
    assert [row["outcome"] for row in door.sql(OUTCOMES)] == ["dead_lettered", "acked"]


def test_attempts_and_backoff_begin_again(door: Door, dead: Make, fail: Make) -> None:
    name, readers = dead(1, max_attempts=2, backoff_ms=[1_000])
    redrive(door, readers, 0)

    fail(readers, door.broker.receive(readers, name))
    early = door.broker.receive(readers, name).num_rows
    door.advance(1_000)
    second = door.broker.receive(readers, name)
    fail(readers, second)

    assert early == 0
    assert second["delivery_attempt"].to_pylist() == [2]
    assert door.stored(f"%DLQ%{readers}") == 2


def test_a_redrive_wakes_a_receive_that_waits(door: Door, dead: Make) -> None:
    name, readers = dead(1)
    waiting = door.begin(lambda: door.broker.receive(readers, name, wait_ms=20_000))

    redrive(door, readers, 0)

    assert bodies(waiting.result(60)) == [b"0"]


def test_a_message_whose_topic_is_deleted_is_gone(
    door: Door, dead: Make, topic: Make, messages: Make
) -> None:
    name, readers = dead(2)
    door.broker.delete_topic(name)

    assert redrive(door, readers, 0) == ["gone"]
    door.advance(1)
    topic(name, queues=1)
    door.broker.send(name, messages(2, message_id=["m-0", "m-1"]))
    assert redrive(door, readers, 0, 1) == ["already", "gone"]

    assert sorted(door.drain(name, readers)) == [b"0", b"1"]
    assert [row["outcome"] for row in door.sql(OUTCOMES)] == ["gone", "gone"]


def test_a_redriven_message_that_is_to_be_read_anyway_comes_once(door: Door, dead: Make) -> None:
    name, readers = dead(3)
    door.broker.reset_offset(readers, name, to_earliest=True)

    assert redrive(door, readers, 0, 1) == ["redriven", "redriven"]

    assert door.drain(name, readers) == [b"0", b"1", b"2"]


def test_a_redriven_message_that_is_in_flight_again_keeps_its_receipt(
    door: Door, dead: Make
) -> None:
    name, readers = dead(1)
    door.broker.reset_offset(readers, name, to_earliest=True)
    got = door.broker.receive(readers, name)

    redrive(door, readers, 0)
    door.broker.ack(got)

    assert door.broker.receive(readers, name).num_rows == 0
    assert [row["outcome"] for row in door.sql(OUTCOMES)] == ["acked"]


@pytest.mark.every_endpoint
def test_a_place_that_is_no_dead_letter_is_refused_and_nothing_is_redriven(
    door: Door, dead: Make
) -> None:
    name, readers = dead(1)

    with pytest.raises(errors.IllegalOffsetError, match=r"row 1 .*offset 7"):
        redrive(door, readers, 0, 7)
    with pytest.raises(errors.ConsumerGroupNotFoundError):
        redrive(door, "nobody", 0)
    with pytest.raises(errors.RequestError):
        redrive(door, readers, 0, redrive_id="")
    with pytest.raises(errors.TableSchemaError):
        door.broker.redrive(readers, pa.table({"queue_id": [0]}), redrive_id="r")

    assert door.broker.receive(readers, name).num_rows == 0
    assert redrive(door, readers, 0) == ["redriven"]
    assert redrive(door, readers) == []


def test_the_manifest_has_the_first_and_the_last_outcome_of_every_message(
    door: Door, dead: Make, outcomes: Make
) -> None:
    name, readers = dead(5, max_attempts=2, backoff_ms=[0])
    redrive(door, readers, 0, 1, 2, 3)
    before = door.sql("SELECT * FROM redrives ORDER BY dead_letter_offset")
    redriven_at = door.clock.now_ms()
    door.advance(5)
    got = door.broker.receive(readers, name, limit=3)

    done = outcomes(got, ["ack", "retry", "dead_letter"])
    door.broker.settle(readers, done)
    between = door.sql(OUTCOMES)
    door.advance(5)
    door.broker.ack(door.broker.receive(readers, name, limit=1))
    after = door.sql("SELECT * FROM redrives ORDER BY dead_letter_offset")

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


def test_a_lease_that_ended_is_a_first_outcome(door: Door, dead: Make) -> None:
    name, readers = dead(1)
    redrive(door, readers, 0)
    door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(1_000)
    door.broker.ack(door.broker.receive(readers, name))

    [row] = door.sql(OUTCOMES)

    assert (row["outcome"], row["first_outcome"]) == ("acked", "retrying")


@pytest.mark.parametrize("end", ["reset", "topic"])
def test_a_redriven_message_that_is_taken_away_is_gone(door: Door, dead: Make, end: str) -> None:
    name, readers = dead(1)
    redrive(door, readers, 0)

    if end == "reset":
        door.broker.reset_offset(readers, name, to_latest=True)
    else:
        door.broker.delete_topic(name)

    assert [row["outcome"] for row in door.sql(OUTCOMES)] == ["gone"]


def test_dead_letters_say_whether_and_when_they_were_redriven(door: Door, dead: Make) -> None:
    _, readers = dead(2)
    redrive(door, readers, 1, redrive_id="the-fix")

    rows = door.sql(
        "SELECT redrive_id, redriven_at_ms, properties['DLQ_REASON'] AS why FROM dead_letters"
        " ORDER BY queue_offset"
    )

    assert rows == [
        {"redrive_id": None, "redriven_at_ms": None, "why": "boom"},
        {"redrive_id": "the-fix", "redriven_at_ms": door.clock.now_ms(), "why": "boom"},
    ]


@pytest.mark.parametrize("dispatched", [True, False])
def test_redrives_are_there_after_a_restart(door: Door, dead: Make, dispatched: bool) -> None:
    name, readers = dead(3, groups=["a"], more=1)
    redrive(door, readers, 0, 1)
    if dispatched:
        door.sql("SELECT count(*) FROM redrives")

    door.reopen()

    assert redrive(door, readers, 0, 1, 2) == ["already", "already", "redriven"]
    assert door.drain(name, readers) == [b"0", b"1", b"2", b"3"]
    assert [row["outcome"] for row in door.sql(OUTCOMES)] == ["acked"] * 3


def test_outcomes_are_kept_across_a_restart(door: Door, dead: Make, fail: Make) -> None:
    name, readers = dead(2, backoff_ms=[1_000])
    redrive(door, readers, 0, 1)
    fail(readers, door.broker.receive(readers, name, limit=1))
    door.reopen()
    door.advance(1_000)

    door.drain(name, readers)

    said = [(row["outcome"], row["first_outcome"]) for row in door.sql(OUTCOMES)]
    assert said == [("acked", "retrying"), ("acked", "acked")]


def test_a_group_made_again_redrives_what_its_namesake_did_not(
    door: Door, dead: Make, group: Make
) -> None:
    name, readers = dead(2)
    redrive(door, readers, 0)
    door.drain(name, readers)
    door.broker.delete_group(readers)
    group(readers)
    door.broker.reset_offset(readers, name, to_latest=True)

    assert redrive(door, readers, 0, 1) == ["already", "redriven"]

    assert door.drain(name, readers) == [b"1"]
