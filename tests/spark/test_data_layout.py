"""A stranger reads a topic with the code of docs/data_layout.md, and no broker."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.clock import ManualClock
from tests.broker.archive_home import HOUR_MS, opened
from tests.broker.sealed_home import seal_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).parents[2] / "docs" / "data_layout.md"
PLACE = "home/topics/departures/4"
COLUMNS = schema.READ.names


def blocks() -> dict[str, str]:
    """The Python of the page, by the line before it."""
    found = re.findall(r"([^\n]*)\n\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names = [text.split(" ")[0].rstrip(":,") for text, _ in found]
    assert names == ["DuckDB", "pandas", "Spark", "which", "DuckDB", "pandas", "Spark"]
    code = [text for _, text in found]
    by_folder = dict(zip(["DuckDB", "pandas", "Spark"], code[:3], strict=True))
    by_manifest = {name: code[3] + text for name, text in zip(by_folder, code[4:], strict=True)}
    return {f"{name} by folder": text for name, text in by_folder.items()} | {
        f"{name} by manifest": text for name, text in by_manifest.items()
    }


def published(turn: int) -> pa.Table:
    """Messages with everything that a message may have, and without."""
    numbers = range(100 * turn, 100 * turn + 100)
    rows = [
        {
            "body": bytes([i % 256]) * (i % 50 + 1),
            "tag": None if i % 4 == 0 else f"tag-{i % 3}",
            "keys": None if i % 5 == 0 else [f"key-{i}", "ключ"][: i % 2 + 1],
            "message_group": None if i % 3 == 0 else f"group {i % 7}",
            "born_at_ms": None if i % 6 == 0 else 1_600_000_000_000 + i,
            "message_id": f"id-{(i * 7919) % 10_007:05d}",
            "properties": [] if i % 7 == 0 else [(f"p{k}", "é" * k) for k in range(i % 4)],
        }
        for i in numbers
    ]
    fields = [schema.SEND.field(name) for name in rows[0]]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a topic that was sealed, partly merged and partly let go, and what it keeps."""
    home, clock = tmp_path_factory.mktemp("layout") / "home", ManualClock()
    rows: list[dict[str, Any]] = []
    with opened(home, clock, compact_min_inputs=2, compact_target_bytes=20_000) as broker:
        topic = broker.create_topic("departures", type="mixed", queues=3)
        assert topic["topic_id"] == 4
        for turn in range(10):
            table = published(turn)
            sent = broker.send("departures", table)
            now_ms = clock.now_ms()
            for row, place in zip(table.to_pylist(), sent.to_pylist(), strict=True):
                # Without a word of its producer it was made when it was stored.
                times = {"born_at_ms": row["born_at_ms"] or now_ms, "stored_at_ms": now_ms}
                where = {name: place[name] for name in ("queue_id", "queue_offset")}
                rows.append({**row, **times, **where, "deliver_at_ms": None})
            clock.advance(HOUR_MS)
            seal_all(broker)
            if turn == 6:
                assert broker.compact()["compactions"] > 0
        broker.alter_topic("departures", retention_bytes=30_000)
        assert broker.expire()["rows"] > 0
        begins = {
            each["queue_id"]: each["min_offset"]
            for each in broker.describe_topic("departures")["offsets"]
        }
    kept = [row for row in rows if row["queue_offset"] >= begins[row["queue_id"]]]
    kept.sort(key=lambda row: (row["queue_id"], row["queue_offset"]))
    assert 200 < len(kept) < 1000
    return home / "topics" / "departures" / "4", kept


def as_published(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as they were sent, whatever a tool makes of nulls, lists and maps."""
    rows = found.to_dict("records")
    return [{name: _plain(name, row[name]) for name in COLUMNS} for row in rows]


def _plain(name: str, value: Any) -> Any:
    if name == "properties":
        pairs = value.items() if isinstance(value, dict) else value
        return [(str(key), item) for key, item in pairs]
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return None
    if name == "keys":
        return [str(key) for key in value]
    if name == "body":
        return bytes(value)
    return int(value) if schema.READ.field(name).type in (pa.int32(), pa.int64()) else str(value)


@pytest.mark.parametrize("how", list(blocks()))
def test_a_topic_read_without_a_broker_is_what_was_published(
    how: str, archived: tuple[Path, list[dict[str, Any]]], request: pytest.FixtureRequest
) -> None:
    folder, kept = archived
    code = blocks()[how]
    assert PLACE in code
    names: dict[str, Any] = {}
    if how.startswith("Spark"):
        spark: SparkSession = request.getfixturevalue("spark")
        names["spark"] = spark

    exec(code.replace(PLACE, str(folder)), names)

    found = names["messages"]
    frame = found if isinstance(found, pd.DataFrame) else found.toPandas()
    assert as_published(frame) == [{name: row[name] for name in COLUMNS} for row in kept]
    assert (frame["message_group_hash"] == 0).tolist() == [r["message_group"] is None for r in kept]


def test_the_statistics_of_a_file_tell_what_is_in_it(
    archived: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, kept = archived
    with duckdb.connect() as connection:
        found = connection.sql(
            "SELECT sum(f.rows), min(f.min_stored_at_ms), max(f.max_stored_at_ms) FROM ("
            f"SELECT unnest(files) AS f FROM read_json('{folder}/_manifest.json'))"
        ).fetchall()
        times = connection.sql(
            "SELECT count(*), min(stored_at_ms), max(stored_at_ms) "
            f"FROM read_parquet('{folder}/*/*.parquet')"
        ).fetchall()

    assert [tuple(map(int, found[0]))] == times
    assert times[0][0] == len(kept)
