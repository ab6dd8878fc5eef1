"""Handlers of the tests; Spark's workers import this module."""

import os

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.handling.handler import Outcome

SINK = pa.schema(
    [
        ("message_group", pa.string()),
        ("body", pa.binary()),
        ("step", pa.int64()),
        ("born_at_ms", pa.int64()),
    ]
)
STATE = pa.schema([("steps", pa.int64())])


def numbered(messages: pa.Table, state: pa.Table) -> Outcome:
    """Numbers the steps of a group; a body beginning with ``bad`` raises; ``on…`` is published."""
    steps = state["steps"][0].as_py() if state.num_rows else 0
    bodies = messages["body"].to_pylist()
    for body in bodies:
        if body.startswith(b"bad"):
            raise ValueError(body.decode())
    onward = [body for body in bodies if body.startswith(b"on")]
    rows = messages.select(["message_group", "body", "born_at_ms"]).add_column(
        2, "step", pa.array(range(steps + 1, steps + 1 + len(bodies)), pa.int64())
    )
    return Outcome(
        rows=rows,
        state=pa.table({"steps": [steps + len(bodies)]}, schema=STATE),
        publish={"later": pa.table({"body": onward, "delay_level": [1] * len(onward)})},
    )


def deadly(messages: pa.Table, state: pa.Table) -> Outcome:
    """Ends its process on a body that begins with ``kill``."""
    if any(body.startswith(b"kill") for body in messages["body"].to_pylist()):
        os._exit(9)
    return numbered(messages, state)


def kept(messages: pa.Table, _: pa.Table) -> Outcome:
    """Any messages into the sink; a body of ``bad`` fails them all."""
    if b"bad" in messages["body"].to_pylist():
        raise ValueError("bad")
    step = pa.nulls(messages.num_rows, pa.int64())
    return Outcome(
        rows=messages.select(["message_group", "body", "born_at_ms"]).add_column(2, "step", step)
    )


def once(messages: pa.Table, _: pa.Table) -> Outcome:
    """Into the sink what was not seen before; a body that begins with ``bad`` raises."""
    bodies = messages["body"].to_pylist()
    if any(body.startswith(b"bad") for body in bodies):
        raise ValueError("bad")
    fresh = messages.filter(pc.invert(messages["seen_before"]))
    step = pa.nulls(fresh.num_rows, pa.int64())
    return Outcome(
        rows=fresh.select(["message_group", "body", "born_at_ms"]).add_column(2, "step", step)
    )


def shouted(messages: pa.Table, state: pa.Table) -> Outcome:
    """As ``numbered``, with the bodies in capitals."""
    made = numbered(messages, state)
    assert made.rows is not None
    capitals = pc.utf8_upper(made.rows["body"].cast(pa.string())).cast(pa.binary())
    return Outcome(rows=made.rows.set_column(1, "body", capitals), state=made.state)


def renumbered(messages: pa.Table, state: pa.Table) -> Outcome:
    """As ``numbered``, but the steps of a group begin with 11."""
    steps = state["steps"][0].as_py() if state.num_rows else 10
    return numbered(messages, pa.table({"steps": [steps]}, schema=STATE))


def shouted_alone(messages: pa.Table, state: pa.Table) -> Outcome:
    """As ``kept``, with the bodies in capitals."""
    made = kept(messages, state)
    assert made.rows is not None
    capitals = pc.utf8_upper(made.rows["body"].cast(pa.string())).cast(pa.binary())
    return Outcome(rows=made.rows.set_column(1, "body", capitals))


def placed(messages: pa.Table, _: pa.Table) -> Outcome:
    """Any messages into the sink, each row with the place of its message."""
    step = pa.nulls(messages.num_rows, pa.int64())
    rows = messages.select(["message_group", "body", "born_at_ms", "queue_id", "queue_offset"])
    return Outcome(rows=rows.add_column(2, "step", step))


def echoed(messages: pa.Table, _: pa.Table) -> Outcome:
    """Published again: each message."""
    return Outcome(publish={"later": messages.select(["body"])})
