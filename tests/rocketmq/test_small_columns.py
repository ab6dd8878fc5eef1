"""Columns of few values are those that pyarrow makes of them."""

from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.rocketmq.decoding import FEW_ROWS, column_of

VALUES: dict[str, list[Any]] = {
    "body": [b"a", b"", b"\x00\xff" * 1000],
    "message_id": ["A1", "é", "x" * 100],
    "tag": ["red", None, "grün"],
    "message_group": [None, "g", ""],
    "lite_topic": ["l", None, None],
    "keys": [["a", "bc"], None, ["é"]],
    "properties": [[("name", "value"), ("b", "")], None, [("ü", "😀")]],
    "deliver_at_ms": [None, 2**52, -(2**52)],
    "born_at_ms": [0, None, 1_700_000_000_000],
    "priority": [3, None, -(2**31)],
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("n", [1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_it_is_what_pyarrow_makes(name: str, n: int, first: int) -> None:
    values = [VALUES[name][(first + at) % 3] for at in range(n)]
    column = column_of(name, values)
    column.validate(full=True)
    assert column.equals(pa.array(values, schema.SEND.field(name).type))
    assert column.to_pylist() == values
    assert column.null_count == values.count(None)


def test_its_batches_survive_the_log() -> None:
    columns = [column_of(name, values) for name, values in VALUES.items()]
    batch = pa.RecordBatch.from_arrays(columns, names=list(VALUES))
    again = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    assert again.equals(batch)
    assert again.slice(1).to_pylist() == batch.to_pylist()[1:]
