"""Rows that the database has lost: a receive says so, and does not ask for them for ever."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import StorageError
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20)


@pytest.mark.parametrize("lost", ["queue_offset < 50", "true"], ids=["some", "all"])
def test_a_receive_of_rows_that_the_database_lacks_is_refused(home: Path, lost: str) -> None:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        broker.send("t", pa.table({"body": [b"x"] * 100}))
    with duckdb.connect(home / "state.duckdb") as database:
        database.execute(f"DELETE FROM store.consume_queue WHERE {lost}")

    with ThreadPoolExecutor(1) as pool, Broker.open(home, upkeep="none", settings=SMALL) as broker:
        receive = pool.submit(broker.receive, "g", "t")

        with pytest.raises(StorageError, match=r"lacks offsets 0 to \d+ of queue 0"):
            receive.result(60)
