"""What must be true once the flights are through, compared with the CSV row by row."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.examples.flights import verify
from rmq_pipeline.examples.flights.crew_desk import CrewDesk
from rmq_pipeline.examples.flights.pipeline import CREW_CHANGES, DEPARTURES, LATE_AIRCRAFT
from rmq_pipeline.examples.flights.progress import ROTATIONS, SUMMARY, Progress, Tally
from rmq_pipeline.examples.flights.rotations import ROTATION
from rmq_pipeline.examples.flights.summary import INCREMENT
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.topic import DLQ_PREFIX

PAGE_ROWS = 20_000


@dataclass(frozen=True)
class Fact:
    """A fact that was found, and what it must be."""

    name: str
    found: Any
    #: None: it is told, not checked.
    expected: Any = None
    #: It may be more than expected.
    or_more: bool = False

    @property
    def is_right(self) -> bool:
        """Whether it is as it must be."""
        if self.expected is None:
            return True
        is_more: bool = self.or_more and self.found > self.expected
        return is_more or bool(self.found == self.expected)


def facts(expected: verify.Expected, *, progress: Progress, tally: Tally) -> list[Fact]:
    """The numbers, against those of the CSV."""
    return [
        Fact("published", progress.published, expected.published),
        Fact("processed", progress.processed, expected.published - expected.dead_letters),
        Fact("retried", progress.retried, 2 * expected.dead_letters),
        Fact("dead_lettered", progress.dead_lettered, expected.dead_letters),
        Fact("late", progress.late, expected.late),
        Fact("late_dead_lettered", progress.lost_summaries, 0),
        Fact("scheduled_deliveries", tally.lateness_ms.total(), expected.late),
        Fact("scheduled_early", tally.early, 0),
        Fact("scheduled_late_p50_ms", tally.quantile_ms(0.5)),
        Fact("scheduled_late_p99_ms", tally.quantile_ms(0.99)),
        Fact("scheduled_late_max_ms", tally.quantile_ms(1.0)),
        Fact("upkeep_fallbacks", tally.fallbacks, 0),
    ]


def crew_facts(
    expected: verify.Expected, client: Client, *, desk: CrewDesk, check_runs: int
) -> tuple[list[Fact], list[str]]:
    """The changes of crews against ledger and CSV: the numbers, and what is wrong with the rows.

    Args:
        expected: of the CSV.
        client: of the broker.
        desk: that made the changes.
        check_runs: runs of Dagster that asked the checker.
    """
    noted = desk.ledger.changes()
    delivered = bodies(client, CREW_CHANGES.name)
    states = Counter(noted["state"].to_pylist())
    asked = set(noted.filter(pc.greater(noted["asked"], 0))["change_id"].to_pylist())
    left_open = set(desk.left_open)
    still_open = client.sql("SELECT count(*) AS n FROM half")["n"][0].as_py()
    found = [
        Fact("crews_confirmed", states["confirmed"], len(expected.crews_confirmed)),
        Fact("crews_cancelled", states["cancelled"], len(expected.crews_cancelled)),
        Fact("crew_changes", delivered.num_rows, len(expected.crews_confirmed)),
        Fact("halves_left_open", len(left_open), 1, or_more=True),
        Fact("halves_checked", len(left_open & asked), len(left_open)),
        Fact("halves_open", still_open, 0),
        Fact("check_runs", check_runs, 1, or_more=True),
    ]
    wrong = {
        "ledger": verify.compare_crews(expected, noted),
        "crew changes": verify.compare_crew_messages(noted, delivered),
    }
    return found, [f"{what}: {line}" for what, lines in wrong.items() for line in lines]


def rows(
    expected: verify.Expected, client: Client, *, sent: pa.Table, sinks: Path
) -> tuple[int, list[str]]:
    """Every row of topics and sinks against the CSV: order violations, and what is wrong.

    Args:
        expected: of the CSV.
        client: of the broker.
        sent: what was published.
        sinks: the folder of the sinks.
    """
    rotations = read_sink(sinks / ROTATIONS, sink_schema=ROTATION)
    summary = read_sink(sinks / SUMMARY, sink_schema=INCREMENT)
    dead = bodies(client, DLQ_PREFIX + ROTATIONS)
    late = bodies(client, LATE_AIRCRAFT.name)
    violations = verify.order_violations(rotations)
    wrong = {
        "departures": _compare_published(sent, bodies(client, DEPARTURES.name)),
        "rotations": verify.compare(expected, rotations),
        "order": violations,
        "dead letters": verify.compare_dead_letters(expected, dead),
        "late aircraft": verify.compare_late(expected, late),
        "late summary": verify.compare_summary(expected, summary),
    }
    lines = [f"{what}: {line}" for what, found in wrong.items() for line in found]
    return len(violations), lines


def bodies(client: Client, topic: str) -> pa.Table:
    """All messages of a topic, queue by queue in offset order."""
    pages = list(_pages(client, topic))
    return pa.concat_tables(pages) if pages else pa.table({"body": pa.array([], pa.binary())})


def _pages(client: Client, topic: str) -> Iterator[pa.Table]:
    for queue in client.describe_topic(topic)["offsets"]:
        for offset in range(queue["min_offset"], queue["max_offset"], PAGE_ROWS):
            limit = min(PAGE_ROWS, queue["max_offset"] - offset)
            page = client.read(topic, queue["queue_id"], offset=offset, limit=limit)
            yield page.select(["body"])


def _compare_published(sent: pa.Table, found: pa.Table) -> list[str]:
    """Whether every departure is stored exactly once."""
    want, got = _counts(sent), _counts(found)
    differences = {"stored too often": got - want, "not stored": want - got}
    return [
        f"{what}: {bodies.total():,}, such as {min(bodies)!r}"
        for what, bodies in differences.items()
        if bodies
    ]


def _counts(messages: pa.Table) -> Counter[bytes]:
    counted = pc.value_counts(messages["body"].combine_chunks())
    values, counts = counted.field("values"), counted.field("counts")
    return Counter(dict(zip(values.to_pylist(), counts.to_pylist(), strict=True)))
