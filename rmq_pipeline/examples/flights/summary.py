"""Consumer ``late_summary``: late departures by hour and carrier, as increments.

A batch says what it adds. Summing the sink by hour and carrier gives the summary, whatever the
batches were; messages of one hour may come hours apart, and in any order.
"""

import json
from collections import defaultdict
from typing import Final

import pyarrow as pa

from rmq_pipeline.handling.handler import Outcome

HOUR_MS: Final = 3_600_000

#: What a batch adds to an hour of scheduled departures (UTC) of a carrier.
INCREMENT: Final = pa.schema(
    [
        ("flight_hour_ms", pa.int64()),
        ("carrier", pa.string()),
        ("late_departures", pa.int64()),
        ("total_delay_minutes", pa.int64()),
    ]
)


def handler(
    messages: pa.Table,
    state: pa.Table | None = None,  # noqa: ARG001 - every handler is given one
) -> Outcome:
    """What any batch of late aircraft adds to the hourly summary.

    Args:
        messages: of topic ``late_aircraft``, any number, any order.
        state: not used; increments need none.

    Returns:
        INCREMENT rows, one for each hour and carrier of the batch.

    Raises:
        ValueError: a body is no JSON.
        KeyError: a body lacks a field.
    """
    delays: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for body in messages["body"].to_pylist():
        late = json.loads(body)
        hour_ms = late["scheduled_departure_ms"] // HOUR_MS * HOUR_MS
        delays[hour_ms, late["carrier"]].append(late["dep_delay_minutes"])
    return Outcome(rows=_increments(delays), state=None, results=None, publish=None)


def _increments(delays: dict[tuple[int, str], list[int]]) -> pa.Table:
    found = sorted(delays.items())
    columns = [
        [hour_ms for (hour_ms, _), _ in found],
        [carrier for (_, carrier), _ in found],
        [len(minutes) for _, minutes in found],
        [sum(minutes) for _, minutes in found],
    ]
    return pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, INCREMENT, strict=True)],
        schema=INCREMENT,
    )
