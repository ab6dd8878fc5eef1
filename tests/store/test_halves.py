"""Dispatch keeps the half messages that are open, and how the others ended."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import HALF_TOPIC_ID
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.rows import Part, dispatch, event, message, rows_of


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    return open_database()


def half(kind: Kind, offset: int, **columns: Any) -> rows.Row:
    return event(
        kind,
        topic_id=HALF_TOPIC_ID,
        queue_id=0,
        queue_offset=offset,
        message_group_hash=1000 + offset,
        client_id=f"p{offset % 2}",
        **columns,
    )


def history() -> list[list[Part]]:
    """Frames: six half messages are stored, two are checked twice, each end occurs once."""

    def begun(offset: int) -> list[Part]:
        sent = message(HALF_TOPIC_ID, 0, offset, target_topic_id=7)
        other = message(9, 0, offset)
        said = half(Kind.HALF, offset, visible_at_ms=100, delivery=6_000)
        return [rows.messages(other), rows.messages(sent), rows.events(said)]

    def checked(offset: int, attempt: int) -> list[Part]:
        at = 100 + 30 * attempt
        said = half(Kind.HALF, offset, visible_at_ms=at, delivery=6_000, attempt=attempt)
        return [rows.events(said)]

    def ended(kind: Kind, offset: int) -> list[Part]:
        return [rows.events(half(kind, offset, at_ms=rows.START_MS + 500 + offset))]

    return [
        *(begun(offset) for offset in range(4)),
        checked(0, 1),
        ended(Kind.HALF_COMMITTED, 1),
        checked(0, 2),
        *(begun(offset) for offset in range(4, 6)),
        checked(2, 1),
        ended(Kind.HALF_ROLLED_BACK, 2),
        ended(Kind.HALF_GIVEN_UP, 4),
        checked(5, 1),
    ]


CUTS = [(), *itertools.combinations(range(1, len(history())), 2), tuple(range(1, len(history())))]


@pytest.mark.parametrize("cuts", CUTS)
def test_the_tables_are_the_same_however_the_frames_are_cut(
    database: Database, cuts: tuple[int, ...]
) -> None:
    frames = history()
    for start, stop in itertools.pairwise([0, *cuts, len(frames)]):
        dispatch(database, *frames[start:stop])

    halves = database.load_state().halves
    ended = database.ended_halves(np.arange(10))

    kept = ("queue_offset", "target_topic_id", "message_id_hash", "producer_group", "checks")
    told = rows_of(halves.select([*kept, "next_check_ms", "immunity_ms"]))
    assert told == [
        (0, 7, 1000, "p0", 2, 160, 6_000),
        (3, 7, 1003, "p1", 0, 100, 6_000),
        (5, 7, 1005, "p1", 1, 130, 6_000),
    ]
    # Each frame's first section begins 64 bytes into it, and the half message is in the second.
    assert halves["position"][0].as_py() == 64 + 128
    assert sorted(rows_of(ended)) == [
        (1, 1001, "p1", int(Kind.HALF_COMMITTED)),
        (2, 1002, "p0", int(Kind.HALF_ROLLED_BACK)),
        (4, 1004, "p0", int(Kind.HALF_GIVEN_UP)),
    ]


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_an_end_is_forgotten_with_a_later_one(database: Database, cuts: tuple[int, ...]) -> None:
    day_ms = 24 * 3600 * 1000
    days = (0, 1, 7)
    frames = [
        [
            rows.messages(message(HALF_TOPIC_ID, 0, offset, target_topic_id=7)),
            rows.events(half(Kind.HALF, offset, at_ms=day * day_ms)),
            rows.events(half(Kind.HALF_COMMITTED, offset, at_ms=day * day_ms + offset)),
            rows.events(event(Kind.WINDOW, detail="w", epoch=1, at_ms=(day + 9) * day_ms)),
        ]
        for offset, day in enumerate(days)
    ]

    for start, stop in itertools.pairwise([0, *cuts, len(frames)]):
        dispatch(database, *frames[start:stop])

    left = database.ended_halves(np.arange(3)).column("queue_offset").to_pylist()
    assert sorted(left) == [1, 2]


def test_only_what_was_asked_about_is_answered(database: Database) -> None:
    dispatch(database, *history())

    assert rows_of(database.ended_halves(np.array([1, 3, 77])).select(["queue_offset"])) == [(1,)]
