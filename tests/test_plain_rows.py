"""Few rows are judged as many are: what one row is told, it is told among others."""

from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.admission import FEW_ROWS, RESERVED, admit, are_plain_rows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import Topic, TopicType

PLAIN: dict[str, Any] = {"body": b"x", "tag": "t", "keys": ["k"], "properties": [("a", "b c")]}
_LONG = "x" * limits.PROPERTY_BYTES

RIGHT: list[dict[str, Any]] = [
    {},
    {"tag": None, "keys": None, "properties": None},
    {"tag": "grün", "keys": ["schlüssel"], "properties": [("größe", "klein")]},
    {"message_id": "id-1"},
    {"properties": [("a", None)]},
    {"properties": [("a", "")]},
    {"keys": []},
    {"keys": ["a b"]},
    {"properties": [(str(at), "x") for at in range(limits.PROPERTY_COUNT)]},
    {"tag": "x" * (limits.PROPERTY_BYTES - 6)},
]
WRONG: list[dict[str, Any]] = [
    {"body": b""},
    {"body": bytes(limits.BODY_BYTES + 1)},
    {"tag": ""},
    {"tag": " "},
    {"tag": "a|b"},
    {"tag": "a\n"},
    {"message_id": ""},
    {"message_id": " "},
    {"keys": [""]},
    {"keys": ["a", "b\x7f"]},
    {"keys": ["a", None]},
    {"properties": [("", "x")]},
    {"properties": [("a\t", "x")]},
    {"properties": [("a", "x\n")]},
    {"properties": [("a", "x\x7f")]},
    {"properties": [("a", "x"), (next(iter(RESERVED)), "x")]},
    {"properties": [(str(at), "x") for at in range(limits.PROPERTY_COUNT + 1)]},
    {"properties": [("a", _LONG)]},
    {"keys": [_LONG]},
    {"tag": _LONG},
    {"lite_topic": "l"},
    {"priority": 1},
    {"delay_level": 1},
]


def _told(rows: list[dict[str, Any]], *, kind: TopicType, few: bool) -> str:
    """What a topic says to rows; of many, the last ones are plain."""
    count = len(rows) if few else FEW_ROWS + 1
    filled = [rows[at] if at < len(rows) else _row({}, kind) for at in range(count)]
    table = pa.Table.from_pylist(filled, schema=schema.SEND)
    topic = Topic("t", 100, kind, 4, "stored", 0)
    try:
        admit(topic, columns_of(table, schema.SEND))
    except RequestError as error:
        return f"{type(error).__name__} {error}"
    return "admitted"


def _row(given: dict[str, Any], kind: TopicType) -> dict[str, Any]:
    return PLAIN | ({"message_group": "g"} if kind == "fifo" else {}) | given


@pytest.mark.parametrize("given", [*RIGHT, *WRONG])
@pytest.mark.parametrize("kind", ["normal", "fifo"])
@pytest.mark.parametrize("before", [0, 2])
def test_few_are_judged_as_many(given: dict[str, Any], kind: TopicType, before: int) -> None:
    rows = [*(_row({}, kind) for _ in range(before)), _row(given, kind)]
    told = _told(rows, kind=kind, few=True)
    assert told == _told(rows, kind=kind, few=False)
    assert (told == "admitted") == (given in RIGHT)


@pytest.mark.parametrize("group", ["g", "é", "g" * 63, "g" * 64, "é" * 32, "", " ", "a\n", None])
def test_names_of_few_are_judged_as_those_of_many(group: str | None) -> None:
    rows = [_row({"message_group": group}, "fifo")]
    told = _told(rows, kind="fifo", few=True)
    assert told == _told(rows, kind="fifo", few=False)


def test_a_slice_is_judged_by_its_own_rows() -> None:
    rows = [PLAIN | {"body": b""}, PLAIN, PLAIN | {"tag": "a|b"}]
    table = pa.Table.from_pylist(rows, schema=schema.SEND)
    judged = [are_plain_rows(columns_of(table.slice(at, 1), schema.SEND)) for at in range(3)]
    assert judged == [False, True, False]


def test_text_that_is_no_utf8_is_not_plain() -> None:
    broken = pa.array([b"\xff"]).view(pa.string())
    columns = columns_of(pa.Table.from_pylist([PLAIN], schema=schema.SEND), schema.SEND)
    assert not are_plain_rows(columns | {"tag": broken})
