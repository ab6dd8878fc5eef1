"""One sink, four engines that read it, while windows, replays and compactions change it.

deltalake and polars read the Delta table; DuckDB and Spark read the files that it lists. Whatever
an engine reads has to be one version of the table, and each version has each settled row once.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import deltalake
import duckdb
import polars as pl
import pytest

from rmq_pipeline.lake import compaction, manifest, readers
from tests.broker.sealed_home import seal_all
from tests.spark.handlers import SINK, numbered, shouted
from tests.spark.replayed import GROUP, Consumer, replayed_broker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

#: Of each at least so many while the engines read.
WINDOWS, REPLAYS, MERGES, READS = 8, 3, 3, 8
#: Messages of a window, of three message groups in turn.
MESSAGES: Final = 9
REPLAYED: Final = "1970-01-01T01"

#: Message group, step within it, body.
Row = tuple[str, int, str]
Rows = list[Row]


@pytest.fixture
def consumer(tmp_path: Path, spark: SparkSession) -> Iterator[Consumer]:
    """A consumer that has read three hours, nine messages each."""
    with replayed_broker(tmp_path / "home") as broker:
        made = Consumer(broker, tmp_path, spark)
        for hour in range(3):
            made.send(*(f"h{hour}-{i}" for i in range(MESSAGES)), hour=hour)
            made.consume()
            seal_all(broker)
        yield made


def rows_of(table: pa.Table) -> Rows:
    """Return the rows of a table, sorted."""
    found = table.select(["message_group", "step", "body"]).to_pylist()
    return sorted((row["message_group"], row["step"], row["body"].decode()) for row in found)


@dataclass
class Changes:
    """What changes the sink: windows, replays and compactions, a thread each, until told to end."""

    consumer: Consumer
    sink: Path
    done: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    #: One entry for each window that has ended; None ends the compactions.
    _ended: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def windows(self) -> None:
        """Send, and consume in a window, again and again."""
        try:
            while not self.done.is_set():
                bodies = [f"w{self.counts['windows']}-{i}" for i in range(MESSAGES)]
                self.consumer.send(*bodies, hour=3)
                self.consumer.consume()
                self.counts["windows"] += 1
                self._ended.put("window")
        finally:
            self._ended.put(None)

    def replays(self) -> None:
        """Replace the second hour by itself in capitals and back."""
        while not self.done.is_set():
            number = self.counts["replays"]
            handler = numbered if number % 2 else shouted
            report = self.consumer.again(1, 2, handler=handler, replay_id=f"replay-{number}")
            assert report.rows == MESSAGES
            self.counts["replays"] += 1

    def compactions(self) -> None:
        """Merge after each window."""
        rules = compaction.Rules(least_files=2)
        broker, name = self.consumer.broker, "upkeep/compact_sinks"
        while self._ended.get() is not None:
            opened = broker.open_window(name, owner="test", duration_ms=60_000, takeover=True)
            held = name, opened["epoch"]
            merged = compaction.compact(broker, GROUP, sink=self.sink, window=held, rules=rules)
            self.counts["merges"] += merged.made_files

    def are_enough(self) -> bool:
        return all(
            self.counts[what] >= least
            for what, least in (("windows", WINDOWS), ("replays", REPLAYS), ("merges", MERGES))
        )


@dataclass
class Engines:
    """Four engines that read one sink; what each has read is one version of the table."""

    sink: Path
    spark: SparkSession
    #: Of each engine the versions that it has read.
    seen: dict[str, set[int]] = field(default_factory=dict)

    def readers(self) -> dict[str, Callable[[], pa.Table]]:
        return {
            "deltalake": lambda: deltalake.DeltaTable(self.sink).to_pyarrow_table(),
            "polars": lambda: pl.read_delta(str(self.sink)).to_arrow(),
            "DuckDB": self._duckdb,
            "Spark": lambda: readers.spark_frame(self.spark, self.sink).toArrow(),
        }

    def _duckdb(self) -> pa.Table:
        with duckdb.connect() as connection:
            return readers.duckdb_relation(connection, self.sink).to_arrow_table()

    def read(self) -> None:
        """Read once by each engine, and compare with the versions that there were meanwhile."""
        for name, engine in self.readers().items():
            first = manifest.read(self.sink).number
            rows = rows_of(engine())
            last = manifest.read(self.sink).number
            found = [each for each in range(first, last + 1) if self.version(each) == rows]
            assert found, f"{name} has read no version from {first} to {last}: {rows}"
            self.seen.setdefault(name, set()).add(found[0])

    def version(self, number: int) -> Rows:
        """Return the rows of a version, each of which it has once."""
        rows = _version(self.sink, number)
        assert_settled_once(rows)
        return rows


@cache
def _version(sink: Path, number: int) -> Rows:
    return rows_of(deltalake.DeltaTable(sink, version=number).to_pyarrow_table())


def assert_settled_once(rows: Rows) -> None:
    """Check that steps have no gap and no repetition, and that the replayed hour is of one replay.

    The handler numbers the messages of a message group, so a row that is missing or there twice
    shows in the numbers.
    """
    steps: dict[str, list[int]] = {}
    for group, step, _ in rows:
        steps.setdefault(group, []).append(step)
    assert {group: list(range(1, len(its) + 1)) for group, its in steps.items()} == steps
    replayed = [body for _, _, body in rows if body.lower().startswith("h1-")]
    assert len(replayed) == MESSAGES
    assert len({body[0] for body in replayed}) == 1


def test_four_engines_read_the_same_rows_while_they_change(
    consumer: Consumer, spark: SparkSession, tmp_path: Path
) -> None:
    sink = tmp_path / "sink"
    changes, engines = Changes(consumer, sink), Engines(sink, spark)
    reads = 0

    with ThreadPoolExecutor(3) as pool:
        running: list[Future[None]] = [
            pool.submit(each) for each in (changes.windows, changes.replays, changes.compactions)
        ]
        try:
            while not (reads >= READS and changes.are_enough()):
                assert not [each for each in running if each.done() and each.exception()]
                engines.read()
                reads += 1
        finally:
            changes.done.set()
        for each in running:
            each.result()

    engines.read()
    sent = 3 * MESSAGES + changes.counts["windows"] * MESSAGES
    last = {name: rows_of(engine()) for name, engine in engines.readers().items()}
    assert {name: len(rows) for name, rows in last.items()} == dict.fromkeys(last, sent)
    assert all(rows == last["deltalake"] for rows in last.values())
    assert rows_of(readers.sink_table(sink, sink_schema=SINK)) == last["deltalake"]
    # Each engine has read while the sink changed, not one version again and again.
    assert all(len(versions) > READS // 2 for versions in engines.seen.values()), engines.seen
