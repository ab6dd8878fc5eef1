"""Keyed state: the last row of a message group, typed as its consumer typed it."""

from collections.abc import Iterable
from datetime import UTC, datetime, time

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline.store.database import Database
from rmq_pipeline.store.fold import Fold
from rmq_pipeline.store.log.stretch import Rows
from tests.store import rows
from tests.store.conftest import OpenDatabase
from tests.store.rows import dispatch, events, hash_of, keyed, rows_of


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    database = open_database()
    names = [rows.topic(2, "departures"), rows.topic(3, "late-aircraft"), rows.group(1, "Turn-1")]
    dispatch(database, [events(*names, rows.group(4, "turn_1"))])
    return database


def state(database: Database, *, topic_id: int = 2) -> dict[str, tuple[object, ...]]:
    found = database.keyed_state(1, topic_id, hashes=None)
    assert found is not None
    return {row[0]: row[1:] for row in rows_of(found)}


def test_last_row_of_a_message_group_wins(database: Database) -> None:
    first = keyed([{"message_group": "a", "n": 1}, {"message_group": "b", "n": 1}], n=pa.int64())
    second = keyed([{"message_group": "a", "n": 2}, {"message_group": "a", "n": 3}], n=pa.int64())
    third = keyed([{"message_group": "c", "n": 9}, {"message_group": "b", "n": 7}], n=pa.int64())

    dispatch(database, [first, second])
    dispatch(database, [third])

    assert state(database) == {"a": (3,), "b": (7,), "c": (9,)}


def test_removed_state_is_gone_until_written_again(database: Database) -> None:
    dispatch(database, [keyed([{"message_group": g, "n": 1} for g in "abc"], n=pa.int64())])

    gone = [{"message_group": g, "removed": True} for g in "ab"]
    dispatch(database, [keyed([*gone, {"message_group": "a", "n": 5}], n=pa.int64())])

    assert state(database) == {"a": (5,), "c": (1,)}


def test_types_are_those_of_the_consumer(database: Database) -> None:
    at = datetime(2013, 1, 1, 5, 15, tzinfo=UTC)
    row = {"leg": 2, "late": True, "delay": 1.5, "at": at, "stops": ["EWR"], "plane": {"id": "N1"}}
    types = {
        "leg": pa.int32(),
        "late": pa.bool_(),
        "delay": pa.float64(),
        "at": pa.timestamp("ms", "UTC"),
        "stops": pa.list_(pa.string()),
        "plane": pa.struct([("id", pa.string())]),
    }

    dispatch(database, [keyed([{"message_group": "a", **row}], **types)])

    found = database.keyed_state(1, 2, hashes=None)
    assert found is not None
    assert found.drop_columns(["message_group"]).to_pylist() == [row]
    assert [found.schema.field(name).type for name in types] == list(types.values())


def test_schema_may_grow_and_change_inside_a_transaction(database: Database) -> None:
    old = keyed([{"message_group": g, "n": 1} for g in "ab"], n=pa.int32())
    grown = keyed([{"message_group": "b", "n": 2, "why": "x"}], n=pa.int64(), why=pa.string())
    changed = keyed(
        [{"message_group": "c", "why": "y", "n": "many"}], why=pa.string(), n=pa.string()
    )

    dispatch(database, [old])
    dispatch(database, [grown, changed])

    found = database.query("SELECT * FROM keyed_state_turn_1 ORDER BY message_group", timeout_s=30)
    assert found.to_pylist() == [
        {"message_group": "a", "n": "1", "why": None},
        {"message_group": "b", "n": "2", "why": "x"},
        {"message_group": "c", "n": "many", "why": "y"},
    ]


def test_a_narrower_schema_leaves_the_other_columns_null(database: Database) -> None:
    both = {"n": pa.int64(), "m": pa.int64()}
    dispatch(database, [keyed([{"message_group": g, "n": 1, "m": 1} for g in "ab"], **both)])

    dispatch(database, [keyed([{"message_group": "a", "n": 2}], n=pa.int64())])

    assert state(database) == {"a": (2, None), "b": (1, 1)}


def test_state_without_own_columns_is_a_set(database: Database) -> None:
    dispatch(database, [keyed([{"message_group": "a"}, {"message_group": "b"}])])

    assert state(database) == {"a": (), "b": ()}


def test_each_topic_of_a_group_has_its_own(database: Database) -> None:
    dispatch(
        database,
        [
            keyed([{"message_group": "a", "n": 1}], n=pa.int64()),
            keyed([{"message_group": "a", "t": "x"}], topic_id=3, t=pa.string()),
            keyed([{"message_group": "a", "n": 4}], group_id=4, n=pa.int64()),
        ],
    )

    assert state(database) == {"a": (1,)}
    assert state(database, topic_id=3) == {"a": ("x",)}
    for view, value in [
        ("keyed_state_turn_1", (1,)),
        ("keyed_state_turn_1_late_aircraft", ("x",)),
        ("keyed_state_turn_1_departures", (4,)),
    ]:
        found = database.query(f"SELECT * FROM {view}", timeout_s=30)
        assert rows_of(found) == [("a", *value)]


def test_only_the_groups_asked_for_are_read(database: Database) -> None:
    dispatch(database, [keyed([{"message_group": g, "n": 1} for g in "abcd"], n=pa.int64())])
    hashes = np.array([hash_of("d"), hash_of("b"), hash_of("unknown")])

    found = database.keyed_state(1, 2, hashes=hashes)

    assert found is not None
    assert sorted(found.column("message_group").to_pylist()) == ["b", "d"]
    assert database.keyed_state(1, 9, hashes=hashes) is None


def test_state_outlives_reopening(database: Database, open_database: OpenDatabase) -> None:
    dispatch(database, [keyed([{"message_group": "a", "n": 1}], n=pa.int64())])

    again = open_database()
    dispatch(again, [keyed([{"message_group": "b", "n": 2, "m": 3}], n=pa.int64(), m=pa.int64())])

    assert state(again) == {"a": (1, None), "b": (2, 3)}


def test_a_failed_transaction_leaves_the_state_as_it_was(database: Database) -> None:
    dispatch(database, [keyed([{"message_group": "a", "n": 1}], n=pa.int64())])
    broken = (9, keyed([{"message_group": "z"}])[1])
    added = keyed([{"message_group": "b", "n": 2, "m": 3}], n=pa.int64(), m=pa.int64())

    with pytest.raises(KeyError):
        dispatch(database, [added, broken])
    dispatch(database, [added])

    assert state(database) == {"a": (1, None), "b": (2, 3)}


def test_what_was_rolled_back_is_forgotten_though_nothing_can_be_asked(database: Database) -> None:
    connection = database._root.cursor()
    fold = Fold(connection)
    fold._dead_letter_topics = frozenset()
    connection.close()  # as where there is no memory for an answer

    fold.forget()

    assert fold._dead_letter_topics is None


def test_a_table_whose_transaction_was_rolled_back_is_made_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = database._fold.apply
    attempts: list[int] = []

    def apply(rows: Iterable[Rows], end: int) -> None:
        original(rows, end)
        attempts.append(end)
        if len(attempts) == 1:
            raise duckdb.OutOfMemoryException("could not allocate block of size 256.0 KiB")

    monkeypatch.setattr(database._fold, "apply", apply)

    dispatch(database, [keyed([{"message_group": "a", "n": 1}], n=pa.int64())])

    assert len(attempts) == 2
    assert state(database) == {"a": (1,)}


@pytest.mark.parametrize(
    ("of_type", "value"),
    [(pa.string(), "x"), (pa.list_(pa.string()), ["x"]), (pa.struct([("a", pa.int8())]), {"a": 1})],
)
def test_a_column_without_values_changes_nothing_of_others(
    database: Database, of_type: pa.DataType, value: object
) -> None:
    first = keyed([{"message_group": g, "v": value, "n": 1} for g in "ab"], v=of_type, n=pa.int8())
    nothing = keyed([{"message_group": "b", "V": None, "n": 2}], V=pa.null(), n=pa.int8())

    dispatch(database, [first])
    dispatch(database, [nothing])

    found = database.keyed_state(1, 2, hashes=None)
    assert found is not None
    assert found.schema.field("v").type == of_type
    assert state(database) == {"a": (value, 1), "b": (None, 2)}


def test_empty_lists_and_parts_without_values_change_nothing_of_others(database: Database) -> None:
    part = pa.struct([("a", pa.string()), ("b", pa.int64())])
    types = {"l": pa.list_(pa.string()), "s": part, "d": pa.list_(part)}
    value = {"l": ["x"], "s": {"a": "y", "b": 1}, "d": [{"a": "z", "b": 2}]}
    part = pa.struct([("a", pa.null()), ("b", pa.int64())])
    without = {"l": pa.list_(pa.null()), "s": part, "d": pa.list_(part)}
    nothing = {"l": [], "s": {"a": None, "b": 3}, "d": [{"a": None, "b": 4}]}
    dispatch(database, [keyed([{"message_group": "a", **value}], **types)])

    dispatch(database, [keyed([{"message_group": "b", **nothing}], **without)])

    found = database.keyed_state(1, 2, hashes=None)
    assert found is not None
    assert found.schema.types[1:] == list(types.values())
    assert state(database) == {"a": tuple(value.values()), "b": tuple(nothing.values())}


def test_a_column_that_had_no_values_gets_the_type_of_its_first(database: Database) -> None:
    dispatch(database, [keyed([{"message_group": "a", "v": None}], v=pa.null())])
    before = state(database)

    dispatch(database, [keyed([{"message_group": "b", "v": ["x"]}], v=pa.list_(pa.string()))])

    assert before == {"a": (None,)}
    assert state(database) == {"a": (None,), "b": (["x"],)}


EURO, DOLLAR = pa.struct([("eur", pa.int64())]), pa.struct([("usd", pa.int64())])
FIRST, SECOND = {"eur": 1}, {"usd": 2}
#: A column whose type DuckDB casts to another in no way: before and after.
UNLIKE = {
    "struct": (EURO, FIRST, DOLLAR, SECOND),
    "nested": (
        pa.struct([("total", EURO)]),
        {"total": FIRST},
        pa.struct([("total", DOLLAR)]),
        {"total": SECOND},
    ),
    "list": (pa.list_(EURO), [FIRST], pa.list_(DOLLAR), [SECOND]),
    "map": (
        pa.map_(pa.string(), EURO),
        [("k", FIRST)],
        pa.map_(pa.string(), DOLLAR),
        [("k", SECOND)],
    ),
    "empty": (pa.struct([]), {}, DOLLAR, SECOND),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_values_without_a_form_in_the_new_type_become_null(database: Database, what: str) -> None:
    old, first, new, second = UNLIKE[what]
    dispatch(database, [keyed([{"message_group": "a", "v": first, "n": 1}], v=old, n=pa.int64())])

    after = keyed([{"message_group": "b", "v": second, "n": 2}], v=new, n=pa.int64())
    dispatch(database, [after])

    assert state(database) == {"a": (None, 1), "b": (second, 2)}


def test_what_has_a_form_in_the_new_type_is_kept(database: Database) -> None:
    both = pa.struct([("eur", pa.int64()), ("usd", pa.int64())])
    dispatch(database, [keyed([{"message_group": "a", "v": FIRST}], v=EURO)])

    dispatch(database, [keyed([{"message_group": "b", "v": SECOND}], v=both)])

    assert state(database) == {"a": ({"eur": 1, "usd": None},), "b": ({"eur": None, "usd": 2},)}


@pytest.mark.parametrize(("old", "new"), [("É", "é"), ("ẞ", "ß")])
def test_letters_beyond_ascii_are_told_apart(database: Database, old: str, new: str) -> None:
    dispatch(database, [keyed([{"message_group": "a", old: 1}], **{old: pa.int64()})])

    dispatch(database, [keyed([{"message_group": "b", new: 2}], **{new: pa.int64()})])

    assert state(database) == {"a": (1, None), "b": (None, 2)}


def test_a_column_has_the_name_that_it_was_given_last(database: Database) -> None:
    dispatch(database, [keyed([{"message_group": "a", "Score": 1}], Score=pa.int64())])
    dispatch(database, [keyed([{"message_group": "a", "score": 2}], score=pa.int64())])
    dispatch(
        database,
        [keyed([{"message_group": "b", "SCORE": 3, "m": 4}], SCORE=pa.int32(), m=pa.int8())],
    )

    found = database.keyed_state(1, 2, hashes=None)

    assert found is not None
    assert found.schema.names == ["message_group", "SCORE", "m"]
    assert found.schema.types[1:] == [pa.int32(), pa.int8()]
    assert state(database) == {"a": (2, None), "b": (3, 4)}


#: Types that DuckDB does not tell apart, where a value of the older one has no form in the newer.
ALIKE = {
    "bytes": (pa.binary(2), b"ab", pa.binary(3), None),
    "text": (pa.string(), "abc", pa.binary(2), None),
    "moment": (
        pa.timestamp("us", "UTC"),
        datetime(2013, 1, 1, 0, 0, 1, 500_001, tzinfo=UTC),
        pa.timestamp("ms", "UTC"),
        datetime(2013, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC),
    ),
    "time": (pa.time64("us"), time(1, 2, 3, 4), pa.time32("s"), time(1, 2, 3)),
    "list": (pa.list_(pa.binary(2)), [b"ab"], pa.list_(pa.binary(3)), None),
}


@pytest.mark.parametrize("what", ALIKE)
def test_state_is_read_in_its_newest_types(database: Database, what: str) -> None:
    old, value, new, now = ALIKE[what]
    dispatch(database, [keyed([{"message_group": "a", "v": value, "n": 1}], v=old, n=pa.int8())])

    dispatch(database, [keyed([{"message_group": "b", "v": None, "n": 2}], v=new, n=pa.int8())])

    found = database.keyed_state(1, 2, hashes=None)
    assert found is not None
    assert found.schema.field("v").type == new
    assert state(database) == {"a": (now, 1), "b": (None, 2)}
