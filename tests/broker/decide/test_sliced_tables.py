"""A slice of a table is checked by its own rows: not by those of the table it was cut from."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import (
    IllegalMessagePropertyError,
    MessagePropertiesTooLargeError,
    RequestError,
)

ROWS = 40
#: More rows than are looked at one by one, on both sides of it.
AT = 20
Endpoint = Callable[[Broker, pa.Table], object]


def send(broker: Broker, table: pa.Table) -> object:
    return broker.send("t", table)


def publish(broker: Broker, table: pa.Table) -> object:
    columns = {name: pa.array([], pa.string()) for name in ("receipt_handle", "outcome")}
    return broker.settle("g", pa.table(columns), publish={"t": table})


@pytest.fixture(autouse=True)
def _topic(broker: Broker) -> None:
    broker.create_topic("t", queues=1)
    broker.create_group("g")


def table(name: bytes = b"name", value: bytes = b"sound") -> pa.Table:
    """Messages with one property each, of which that of row AT is given."""
    names, values = [b"name"] * ROWS, [b"sound"] * ROWS
    names[AT], values[AT] = name, value
    rows = pa.array(range(ROWS + 1), pa.int32())
    properties = pa.MapArray.from_arrays(rows, texts(names), texts(values))
    bodies = [b"%d" % i for i in range(ROWS)]
    return pa.table({"body": bodies, "properties": properties.cast(schema.PROPERTIES)})


def texts(given: list[bytes]) -> pa.Array:
    """Texts that Arrow does not look at."""
    ends = np.cumsum([0, *map(len, given)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(given))]
    return pa.Array.from_buffers(pa.string(), len(given), buffers)


LARGE = b"x" * (limits.PROPERTY_BYTES + 1)
WRONG = [
    pytest.param(b"name", b"a\xff", IllegalMessagePropertyError, id="value-no-text"),
    pytest.param(b"name", b"a\nb", IllegalMessagePropertyError, id="value-control"),
    pytest.param(b"n\xff", b"a", IllegalMessagePropertyError, id="name-no-text"),
    pytest.param(b"KEYS", b"a", IllegalMessagePropertyError, id="name-reserved"),
    pytest.param(b"name", LARGE, MessagePropertiesTooLargeError, id="large"),
]


@pytest.mark.parametrize("endpoint", [send, publish])
@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_what_is_wrong_in_a_slice_is_refused_by_its_row(
    broker: Broker, name: bytes, value: bytes, error: type[RequestError], endpoint: Endpoint
) -> None:
    for start in (0, 1, AT - 8, AT):
        with pytest.raises(error, match=rf"^Row {AT - start}: "):
            endpoint(broker, table(name, value).slice(start, ROWS - start))


@pytest.mark.parametrize("endpoint", [send, publish])
@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_what_is_wrong_outside_a_slice_is_not_its_affair(
    broker: Broker, name: bytes, value: bytes, error: type[RequestError], endpoint: Endpoint
) -> None:
    del error

    endpoint(broker, table(name, value).slice(0, AT))
    endpoint(broker, table(name, value).slice(AT + 1))

    stored = broker.read("t", 0, offset=0, limit=ROWS)
    assert stored["body"].to_pylist() == [b"%d" % i for i in range(ROWS) if i != AT]
    assert stored["properties"].to_pylist() == [[("name", "sound")]] * (ROWS - 1)
