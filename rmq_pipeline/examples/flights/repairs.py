"""The second act of the demo: what people do when the first one has left something undone.

An aircraft was grounded, so its departures are parked; cancelled departures are dead letters. The
aircraft is released and the rules now accept cancellations. That alone changes nothing: somebody
launches the jobs ``unpark`` and ``redrive``, as from Dagster's Launchpad.
"""

from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.examples.flights import operations, verify
from rmq_pipeline.examples.flights.aircraft_checks import CHECKED
from rmq_pipeline.examples.flights.facts import Fact
from rmq_pipeline.examples.flights.progress import CHECKS, ROTATIONS, Progress
from rmq_pipeline.examples.flights.rotations import ROTATION
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.orchestration.graphql import UNFINISHED, GraphQL

#: Flies four times on the first day of 2013, and seventeen times in its first week.
GROUNDED: Final = "N730MQ"
#: The condition on the dead letters that are redriven.
CANCELLED: Final = "reason LIKE '%has no departure time'"

_PARKED: Final = f"""
SELECT message_group, waiting, error_type FROM parked WHERE consumer_group = '{CHECKS}'
ORDER BY ALL
"""
_REDRIVES: Final = f"""
SELECT outcome, count(*) AS n FROM redrives WHERE consumer_group = '{ROTATIONS}' GROUP BY ALL
"""


class Repairs:
    """Unparking, and a redrive that is asked for twice."""

    def __init__(self, client: Client, graphql: GraphQL, *, sinks: Path) -> None:
        """Take down what is there before."""
        self._client, self._graphql, self._sinks = client, graphql, sinks
        self._runs: dict[str, str] = {}
        self._parked: list[dict[str, Any]] = client.sql(_PARKED).to_pylist()
        self._rotations = self._sink(ROTATIONS, ROTATION)
        self._checks = self._sink(CHECKS, CHECKED)
        self._redriven_once = 0

    def begin(self) -> None:
        """Release the aircraft, change the rules, and launch both jobs."""
        operations.ground([])
        operations.accept_cancellations()
        self._launch("unpark", consumer_group=CHECKS, message_groups=[GROUNDED])
        self._redrive("redrive")

    def redrive_again(self) -> None:
        """Ask for the same redrive once more."""
        self._redriven_once = sum(self._redrives().values())
        self._redrive("redrive_again")

    def missing(self, progress: Progress) -> list[str]:
        """What has not happened yet of what was launched, each in a line."""
        lines = [
            f"run {name} is {status}"
            for name, status in self._statuses().items()
            if status in UNFINISHED
        ]
        left = {
            f"departures that {CHECKS} has not settled": progress.unchecked,
            f"redriven departures that {ROTATIONS} has not settled": progress.unprocessed,
        }
        return lines + [f"{count:,} {what}" for what, count in left.items() if count]

    def facts(self, expected: verify.Expected) -> list[Fact]:
        """What was parked, and what became of it and of the dead letters."""
        legs = int((expected.checks["tail"] == GROUNDED).sum())
        redriven = self._redrives()
        after = self._sink(ROTATIONS, ROTATION)
        return [
            Fact("parked", [row["message_group"] for row in self._parked], [GROUNDED]),
            Fact("parked_by", [row["error_type"] for row in self._parked], ["GroundedError"]),
            Fact("waiting_behind", sum(row["waiting"] for row in self._parked), legs - 1),
            Fact("checked_while_parked", self._checks.num_rows, expected.published - legs),
            Fact("redriven", self._redriven_once, expected.dead_letters),
            Fact("redriven_acked", redriven.get("acked", 0), expected.dead_letters),
            Fact("redriven_twice", sum(redriven.values()) - self._redriven_once, 0),
            Fact("rotations_changed", verify.rows_changed(self._rotations, after), 0),
            Fact("repairs", self._statuses(), dict.fromkeys(self._runs, "SUCCESS")),
        ]

    def wrong(self, expected: verify.Expected) -> list[str]:
        """What is wrong with the rows, before and after."""
        before = verify.compare_checks(expected, self._checks, grounded=GROUNDED)
        now = self._sink(CHECKS, CHECKED)
        found = {
            "checks while parked": before,
            "checks": verify.compare_checks(expected, now),
            "order of checks": verify.order_violations(now, number="number"),
        }
        return [f"{what}: {line}" for what, lines in found.items() for line in lines]

    def _launch(self, job: str, *, name: str = "", **config: Any) -> None:
        ops = {f"upkeep__{job}": {"config": config}}
        self._runs[name or job] = self._graphql.launch(
            job, location="rmq_pipeline.examples.flights", config={"ops": ops}
        )

    def _redrive(self, name: str) -> None:
        self._launch("redrive", name=name, consumer_group=ROTATIONS, where=CANCELLED)

    def _statuses(self) -> dict[str, str]:
        return {name: self._graphql.status(run_id) for name, run_id in self._runs.items()}

    def _redrives(self) -> dict[str, int]:
        """Redriven messages by what became of them."""
        return {row["outcome"]: row["n"] for row in self._client.sql(_REDRIVES).to_pylist()}

    def _sink(self, name: str, schema: pa.Schema) -> pa.Table:
        return read_sink(self._sinks / name, sink_schema=schema)
