"""Consumer ``aircraft_checks``: a line of the maintenance log for each departure of an aircraft.

An aircraft that is grounded is not checked off: its first departure fails, is parked, and holds
all that follow it, while the other aircraft go on. Once the aircraft is released and the message
unparked, the log of the aircraft goes on where it stopped.
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.examples.flights import operations
from rmq_pipeline.handling.handler import Outcome

#: How many departures of the aircraft were checked off; kept by its message group.
STATE: Final = pa.schema([("checks", pa.int32())])

#: A row of the sink.
CHECKED: Final = pa.schema(
    [
        ("tail", pa.string()),
        ("number", pa.int32()),
        ("flight", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("born_at_ms", pa.int64()),
    ]
)


class GroundedError(Exception):
    """The aircraft may not fly."""


def handler(messages: pa.Table, state: pa.Table) -> Outcome:
    """One aircraft's next departures, in offset order.

    Args:
        messages: departures of one message group, cancelled ones too.
        state: STATE, 0 rows (an aircraft's first departures) or 1.

    Returns:
        CHECKED rows, one a message; STATE, 1 row.

    Raises:
        GroundedError: the aircraft is grounded.
    """
    tail = messages["message_group"][0].as_py()
    if tail in operations.grounded():
        raise GroundedError(f"{tail} is grounded")
    done = state["checks"][0].as_py() if state.num_rows else 0
    n = messages.num_rows
    columns = {
        "tail": messages["message_group"],
        "number": pa.array(np.arange(done + 1, done + n + 1, dtype=np.int32)),
        "flight": pc.list_element(messages["keys"], 0),
        **{name: messages[name] for name in ("queue_id", "queue_offset", "born_at_ms")},
    }
    after = pa.table([pa.array([done + n], pa.int32())], schema=STATE)
    return Outcome(rows=pa.table(columns, schema=CHECKED), state=after)
