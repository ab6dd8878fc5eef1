"""The log of aircraft checks, and what people may change while windows run."""

from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.examples.flights import operations
from rmq_pipeline.examples.flights.aircraft_checks import CHECKED, STATE, GroundedError, handler


@pytest.fixture(autouse=True)
def _airline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMQ_FLIGHTS", str(tmp_path))


def departures(tail: str, count: int) -> pa.Table:
    return pa.table(
        {
            "message_group": [tail] * count,
            "keys": [[f"MQ{i}"] for i in range(count)],
            "queue_id": pa.array([3] * count, pa.int32()),
            "queue_offset": list(range(10, 10 + count)),
            "born_at_ms": [0] * count,
        }
    )


def test_an_aircrafts_departures_are_counted_on_from_batch_to_batch() -> None:
    first = handler(departures("N1", 3), STATE.empty_table())
    assert first.state is not None
    second = handler(departures("N1", 2), first.state)

    assert first.rows is not None
    assert second.rows is not None
    assert first.rows.schema.equals(CHECKED)
    assert first.rows["number"].to_pylist() == [1, 2, 3]
    assert second.rows["number"].to_pylist() == [4, 5]
    assert second.rows["flight"].to_pylist() == ["MQ0", "MQ1"]
    assert second.state is not None
    assert second.state["checks"].to_pylist() == [5]


def test_a_grounded_aircraft_fails_and_no_other() -> None:
    operations.ground(["N1"])

    with pytest.raises(GroundedError, match="N1 is grounded"):
        handler(departures("N1", 1), STATE.empty_table())
    assert handler(departures("N2", 1), STATE.empty_table()).rows is not None


def test_a_window_works_by_the_rules_it_found() -> None:
    operations.ground(["N1"])
    found = (operations.grounded(), operations.accepts_cancellations())

    operations.ground([])
    operations.accept_cancellations()

    assert found == (frozenset({"N1"}), False)
    assert (operations.grounded(), operations.accepts_cancellations()) == found
    operations._read_once.cache_clear()  # another process
    assert (operations.grounded(), operations.accepts_cancellations()) == (frozenset(), True)
