"""What does not fit together is refused when a consumer is declared."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec


def consumer(**settings: Any) -> ConsumerSpec:
    return ConsumerSpec(name="c", topic="t", group="g", handler=lambda *_: Outcome(), **settings)


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        (pa.schema([("at", pa.duration("ms"))]), "at of the state is duration"),
        (pa.schema([("n", pa.list_(pa.float16()))]), "with halffloat in it, which DuckDB changes"),
        (pa.schema([("n", pa.int64()), ("N", pa.int64())]), "column n"),
        (pa.schema([("Removed", pa.int64())]), "column removed"),
        (pa.schema([("staged_order", pa.int64())]), "may be called staged_order"),
        (pa.schema([("removed", pa.int64())]), "the broker's own"),
        (pa.schema([("n", pa.string_view())]), "and Arrow cannot select rows of this type"),
        (
            pa.schema([("n", pa.list_(pa.binary_view()))]),
            "and Arrow cannot select rows of this type",
        ),
    ],
)
def test_state_that_could_never_be_settled_is_refused(state: pa.Schema, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        consumer(order_by="message_group", state=state)


def test_state_of_many_types_is_not() -> None:
    state = pa.schema(
        [
            pa.field("n", pa.int64(), nullable=False),
            ("names", pa.map_(pa.string(), pa.list_(pa.string()))),
            ("of", pa.dictionary(pa.int8(), pa.string())),
            ("place", pa.struct([("x", pa.decimal128(38, 3)), ("at", pa.timestamp("ns", "UTC"))])),
        ]
    )

    assert consumer(order_by="message_group", state=state).state == state
