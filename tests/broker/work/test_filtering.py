"""A condition on messages wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from tests.broker.sealed_home import open_broker, seal_all

SQL: dict[str, Any] = {"filter": "a > 5 AND region IN ('e','w')", "filter_type": "sql92"}


def rows(start: int, n: int) -> pa.Table:
    """Large bodies, so that log files roll; numbered properties."""
    numbers = range(start, start + n)
    properties = [[("a", str(i % 10)), ("region", "nesw"[i % 4])] for i in numbers]
    fields = [schema.SEND.field(name) for name in ("body", "properties")]
    bodies = [b"%d " % i + b"x" * 8000 for i in numbers]
    return pa.table([bodies, properties], schema=pa.schema(fields))


@pytest.mark.parametrize("reopened", [False, True])
def test_a_condition_goes_over_segments_and_the_log_alike(tmp_path: Path, reopened: bool) -> None:
    with open_broker(tmp_path) as broker:
        broker.create_topic("sealed", queues=2)
        broker.create_group("readers")
        for start in range(0, 600, 60):
            broker.send("sealed", rows(start, 60))
        assert seal_all(broker)["dropped_files"] > 0
        broker.send("sealed", rows(600, 40))
        got = [] if reopened else bodies(broker.receive("readers", "sealed", limit=999, **SQL))
    if reopened:
        with open_broker(tmp_path) as broker:
            got = bodies(broker.receive("readers", "sealed", limit=999, **SQL))

    assert sorted(got) == [i for i in range(640) if i % 10 > 5 and i % 4 in (1, 3)]


def bodies(received: pa.Table) -> list[int]:
    return [int(body.split()[0]) for body in received["body"].to_pylist()]
