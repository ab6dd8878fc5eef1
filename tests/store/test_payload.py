"""What is written in pieces is, byte for byte, what Arrow serializes in one."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame_builder import bytes_of, payload_of

ROWS = 300


def messages(sizes: list[int], *, bare: bool) -> pa.RecordBatch:
    """Messages with bodies of these sizes, and all of a message's columns, or only those needed."""
    dice, n = np.random.default_rng(sum(sizes)), len(sizes)
    given: dict[str, list[Any]] = {
        "body": [dice.bytes(size) for size in sizes],
        "message_id": [f"id-{i}" for i in range(n)],
        "keys": [[] for _ in range(n)],
        "properties": [[] for _ in range(n)],
    }
    if not bare:
        given |= {
            "tag": [None if i % 3 else f"tag-{i}" for i in range(n)],
            "keys": [[f"key-{i}"] * (i % 3) for i in range(n)],
            "message_group": [f"group-{i % 7}" for i in range(n)],
            "properties": [[("name", str(i))] * (i % 2) for i in range(n)],
            "deliver_at_ms": [None if i % 2 else i for i in range(n)],
        }
    numbers = list(range(n))
    return pa.RecordBatch.from_arrays(
        [
            pa.array(given.get(f.name, [None] * n if f.nullable else numbers), f.type)
            for f in schema.MESSAGE
        ],
        schema=schema.MESSAGE,
    )


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "full"])
@pytest.mark.parametrize("last", range(9))
def test_pieces_are_what_arrow_serializes(last: int, bare: bool) -> None:
    batch = messages([*range(ROWS), 200_000 + last], bare=bare)

    payload = payload_of(batch)

    whole = b"".join(bytes(memoryview(piece)) for piece in payload)
    assert whole == batch.serialize().to_pybytes()
    assert bytes_of(payload) == len(whole)
    assert frame.decode(pa.py_buffer(whole), schema.MESSAGE).equals(batch)


def test_many_bodies_stay_where_they_are() -> None:
    batch = messages([1024] * ROWS, bare=False)
    place = batch.column("body").buffers()[2].address

    pieces = payload_of(batch)

    assert [place] == [
        piece.address for piece in pieces if isinstance(piece, pa.Buffer) and len(piece) > 300_000
    ]


@pytest.mark.parametrize(
    "batch",
    [
        messages([1024] * 5, bare=True),
        messages([1024] * ROWS, bare=True).slice(100, 150),
        messages([0] * ROWS, bare=True),
        messages([1], bare=True).slice(0, 0),
    ],
    ids=["few", "a part", "empty", "none"],
)
def test_others_are_serialized_as_a_whole(batch: pa.RecordBatch) -> None:
    payload = payload_of(batch)

    assert [bytes(memoryview(piece)) for piece in payload] == [batch.serialize().to_pybytes()]


def test_the_beginning_of_more_is_written_without_the_rest() -> None:
    batch = messages([1024] * ROWS, bare=False).slice(0, 200)

    whole = b"".join(bytes(memoryview(piece)) for piece in payload_of(batch))

    assert whole == batch.serialize().to_pybytes()
