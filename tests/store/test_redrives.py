"""What dispatch keeps of redrives does not depend on where transactions are cut."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rmq_pipeline.limits import MIB
from rmq_pipeline.store.database import FILE_NAME, Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID
from tests.histories import histories
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.rows import START_MS, Row, dispatch, event, events, message, messages, on_queue

OUTCOMES = {
    Kind.ACK: "acked",
    Kind.RETRY: "retrying",
    Kind.EXPIRE: "retrying",
    Kind.DEAD_LETTER: "dead_lettered",
    Kind.PARK: "parked",
}
FINAL = {"acked", "dead_lettered", "gone"}
NUMBERS = count()


def redriven(dead_offset: int, origin: int, *, at_ms: int, outcome: str = "waiting") -> Row:
    """Dead letter ``dead_offset`` was opened again as message ``origin`` of topic 2."""
    detail = {
        "topic": "departures",
        "topic_id": 2,
        "queue_id": 0,
        "queue_offset": origin,
        "message_id": f"m-{origin}",
        "outcome": outcome,
    }
    place = {"group_id": 1, "topic_id": 3, "queue_id": 0, "queue_offset": dead_offset}
    return event(Kind.REDRIVEN, **place, at_ms=at_ms, client_id="r", detail=detail)


def begin(database: Database) -> None:
    dispatch(
        database,
        [
            events(
                rows.topic(SCHEDULE_TOPIC_ID, "SCHEDULE_TOPIC_XXXX", queues=19),
                rows.topic(2, "departures"),
                rows.topic(3, "%DLQ%rotations"),
                rows.group(1, "rotations"),
            )
        ],
    )


class Model:
    """Dead letter -> [origin, outcome, when, first outcome]."""

    def __init__(self) -> None:
        self.redrives: dict[int, list[object]] = {}

    def take(self, row: Row, origin: int) -> None:
        kind, at_ms = Kind(row["kind"]), row["at_ms"]
        if kind == Kind.REDRIVEN:
            self.redrives[row["queue_offset"]] = [origin, "waiting", None, None]
            return
        outcome = OUTCOMES.get(kind, "gone")
        if kind == Kind.RELEASE or (kind == Kind.LEASE and row["attempt"] < 2):
            return
        if kind == Kind.LEASE:
            outcome = "retrying"
        for entry in self.redrives.values():
            everything = kind in (Kind.RESET, Kind.TOPIC_DELETED, Kind.GROUP_DELETED)
            if (everything or entry[0] == row["queue_offset"]) and entry[1] not in FINAL:
                entry[1:] = [outcome, at_ms, entry[3] or outcome]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([Kind.REDRIVEN] * 4 + [Kind.LEASE, Kind.RELEASE, Kind.RESET, *OUTCOMES]),
        st.integers(0, 3),
        st.integers(1, 2),
        st.booleans(),
    ),
    max_size=40,
)


@histories(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, deleted=st.sampled_from([None, Kind.TOPIC_DELETED, Kind.GROUP_DELETED]))
def test_outcomes_are_those_of_the_events_one_by_one(
    tmp_path: Path, steps: list[tuple[Kind, int, int, bool]], deleted: Kind | None
) -> None:
    # By its usual name, so that it begins with a copy.
    home = tmp_path / f"home-{next(NUMBERS)}"
    home.mkdir()
    database = Database.open(home / FILE_NAME, memory_bytes=128 * MIB)
    begin(database)
    model, dead = Model(), count()
    frames: list[list[rows.Part]] = []

    for number, (kind, origin, attempt, cut) in enumerate(steps):
        at_ms = START_MS + number
        if kind == Kind.REDRIVEN:
            row = redriven(next(dead), origin, at_ms=at_ms)
        else:
            row = on_queue(kind, origin, attempt=attempt, at_ms=at_ms)
        model.take(row, origin)
        frames.append([events(row)])
        if cut:
            dispatch(database, *frames)
            frames = []
    if deleted is not None:
        last = event(deleted, topic_id=2 * (deleted == Kind.TOPIC_DELETED),
                     group_id=int(deleted == Kind.GROUP_DELETED), at_ms=START_MS + 99)  # fmt: skip
        model.take(last, -1)
        frames.append([events(last)])
    if frames:
        dispatch(database, *frames)

    query = (
        "SELECT dead_letter_offset, queue_offset, outcome, outcome_at_ms, first_outcome"
        " FROM redrives ORDER BY dead_letter_offset"
    )
    found = [tuple(row.values()) for row in database.query(query, timeout_s=60).to_pylist()]
    stored = database.load_state().redriven.column("queue_offset").to_pylist()
    database.close()
    assert found == [(offset, *entry) for offset, entry in model.redrives.items()]
    assert stored == list(model.redrives)


def test_a_message_that_is_gone_has_its_outcome_at_once(open_database: OpenDatabase) -> None:
    database = open_database()
    begin(database)

    dispatch(database, [events(redriven(0, 7, at_ms=START_MS + 5, outcome="gone"))])

    [row] = database.query("FROM redrives", timeout_s=60).to_pylist()
    assert row["consumer_group"] == "rotations"
    assert (row["outcome"], row["first_outcome"], row["outcome_at_ms"]) == (
        "gone",
        "gone",
        START_MS + 5,
    )


@pytest.mark.parametrize("change", [{}, {"message_id": "another"}, {"topic": "gone"}])
def test_origins_are_found_only_where_the_very_message_is(
    open_database: OpenDatabase, change: dict[str, str]
) -> None:
    database = open_database()
    begin(database)
    came_from = {
        "DLQ_ORIGIN_TOPIC": change.get("topic", "departures"),
        "DLQ_ORIGIN_MESSAGE_ID": change.get("message_id", "m-2-0-7"),
        "DLQ_ORIGIN_QUEUE_ID": "0",
        "DLQ_ORIGIN_QUEUE_OFFSET": "7",
    }
    letter = message(3, 0, 0, properties=[*came_from.items()])
    dispatch(database, [messages(message(2, 0, 7, message_group="a"), letter)])

    found = database.dead_letter_origins(
        3, queue_id=np.array([0, 0], np.int32), queue_offset=np.array([5, 0], np.int64)
    ).to_pylist()

    [row] = found
    assert (row["ordinal"], row["queue_offset"]) == (1, 7)
    assert row["topic_id"] == (None if change else 2)
    assert row["message_group_hash"] == (None if change else rows.hash_of("a"))


def test_the_manifest_goes_with_its_dead_letters(open_database: OpenDatabase) -> None:
    database = open_database()
    begin(database)
    dispatch(database, [events(*(redriven(i, i, at_ms=START_MS) for i in range(4)))])

    gone = event(Kind.EXPIRED, topic_id=3, queue_id=0, queue_offset=3)
    dispatch(database, [events(gone)])

    kept = database.query("SELECT dead_letter_offset FROM redrives", timeout_s=60)
    assert kept.column(0).to_pylist() == [3]


def test_effects_go_with_their_group(open_database: OpenDatabase) -> None:
    database = open_database()
    begin(database)
    done = [event(Kind.EFFECT, group_id=group, detail="k", at_ms=START_MS) for group in (1, 2)]
    dispatch(database, [events(*done)])

    dispatch(database, [events(event(Kind.GROUP_DELETED, group_id=1))])

    keys = pa.array(["k", None])
    seen = [database.effects_seen(g, keys=keys, after_ms=0).to_pylist() for g in (1, 2)]
    assert seen == [[None, None], [START_MS, None]]
