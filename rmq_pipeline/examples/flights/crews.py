"""Changes of crews: which there are, and how half messages of them are decided.

The crew changes on the first departure of each aircraft on each day.
"""

import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.examples.flights import operations
from rmq_pipeline.examples.flights.ledger import CANCELLED, CONFIRMED, NOTE, Ledger
from rmq_pipeline.schema import SEND
from rmq_pipeline.transaction import COMMIT, ROLLBACK

TOPIC: Final = "crew_changes"
#: What the topic is sent.
CREW_CHANGE: Final = pa.schema([SEND.field(name) for name in ("body", "tag", "keys", "born_at_ms")])
#: The fields of the JSON object that is its body.
FIELDS: Final = tuple(name for name in NOTE.names if name != "state")


def ledger() -> Ledger:
    """The crew desk's books."""
    return Ledger(operations.folder() / operations.LEDGER)


def changes(departures: pa.Table) -> pa.Table:
    """The changes that these departures make, without ids yet.

    Args:
        departures: dataset.DEPARTURE, in scheduled order.

    Returns:
        NOTE; a change is cancelled when the departure was.
    """
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    groups, bodies, born = (
        departures[name].to_pylist() for name in ("message_group", "body", "born_at_ms")
    )
    for tail, body, scheduled_ms in zip(groups, bodies, born, strict=True):
        departure = json.loads(body)
        key = (tail, departure["month"], departure["day"])
        if key not in rows:
            rows[key] = {
                "tail": tail,
                "flight": f"{departure['carrier']}{departure['flight']}",
                "crew": f"{departure['carrier']}-{len(rows) + 1:06}",
                "scheduled_departure_ms": scheduled_ms,
                "state": CANCELLED if departure["dep_time"] is None else CONFIRMED,
            }
    return pa.Table.from_pylist(list(rows.values()), schema=NOTE)


def halves(noted: pa.Table) -> pa.Table:
    """The half messages of changes that have ids, CREW_CHANGE."""
    rows = noted.select(FIELDS).to_pylist()
    columns = {
        "body": [json.dumps(row).encode() for row in rows],
        "tag": pc.utf8_slice_codeunits(noted["crew"], 0, 2),
        "keys": [[row["tail"], row["flight"]] for row in rows],
        "born_at_ms": noted["scheduled_departure_ms"],
    }
    return pa.table(columns, schema=CREW_CHANGE)


def check(checks: pa.Table) -> pa.Array:
    """Looks up in the desk's books what became of each change: confirmed ones are committed."""
    ids = [json.loads(body)["change_id"] for body in checks["body"].to_pylist()]
    states = ledger().ask(pa.chunked_array([pa.array(ids, pa.string())]))
    return resolutions(states)


def resolutions(states: pa.ChunkedArray) -> pa.Array:
    """How transactions end, by the states of the changes."""
    return pc.if_else(pc.equal(states, CONFIRMED), COMMIT, ROLLBACK).combine_chunks()
