"""How far the flights have come, asked of the broker with SQL."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from rmq_pipeline.examples.flights.pipeline import (
    AIRCRAFT_CHECKS,
    AIRCRAFT_ROTATIONS,
    CREW_CHANGES,
    DEPARTURES,
    LATE_AIRCRAFT,
    LATE_SUMMARY,
)
from rmq_pipeline.examples.flights.publishing import stored
from rmq_pipeline.flight.client import Client

ROTATIONS: Final = AIRCRAFT_ROTATIONS.group.name
SUMMARY: Final = LATE_SUMMARY.group.name
CHECKS: Final = AIRCRAFT_CHECKS.group.name

#: One statement, so all numbers are of one moment.
_SNAPSHOT: Final = f"""
SELECT
    (SELECT sum(lag) FROM lag WHERE consumer_group = '{ROTATIONS}')::BIGINT AS unprocessed,
    (SELECT sum("rows") FROM sink_files WHERE consumer_group = '{ROTATIONS}')::BIGINT AS processed,
    (SELECT sum("rows") FROM sink_files WHERE consumer_group = '{SUMMARY}')::BIGINT AS increments,
    (SELECT count(*) FROM dead_letters WHERE consumer_group = '{ROTATIONS}') AS dead_lettered,
    (SELECT sum(attempts - 1) FROM dead_letters
     WHERE consumer_group = '{ROTATIONS}')::BIGINT AS retries_of_dead,
    (SELECT sum(delivery_attempts) FROM retrying
     WHERE consumer_group = '{ROTATIONS}')::BIGINT AS retries_of_others,
    (SELECT count(*) FROM dead_letters WHERE consumer_group = '{SUMMARY}') AS lost_summaries,
    (SELECT count(*) FROM scheduled) AS scheduled,
    (SELECT sum(lag) FROM lag WHERE consumer_group = '{SUMMARY}')::BIGINT AS unsummarized,
    (SELECT sum(lag) FROM lag WHERE consumer_group = '{CHECKS}')::BIGINT AS unchecked,
    (SELECT sum(1 + waiting) FROM parked WHERE consumer_group = '{CHECKS}')::BIGINT AS held,
    (SELECT sum("rows") FROM sink_files WHERE consumer_group = '{CHECKS}')::BIGINT AS checked,
    (SELECT count(*) FROM half WHERE topic = '{CREW_CHANGES.name}') AS open_halves
"""
_NEWS: Final = """
SELECT position, kind, at_ms - visible_at_ms AS late_ms
FROM events
WHERE position > {position} AND kind IN ('schedule_delivered', 'upkeep_fallback')
"""


@dataclass(frozen=True)
class Progress:
    """Numbers of messages at one moment."""

    published: int = 0
    #: Not settled by aircraft_rotations.
    unprocessed: int = 0
    #: Rows that count in the sink of aircraft_rotations, and in that of late_summary.
    processed: int = 0
    increments: int = 0
    retried: int = 0
    dead_lettered: int = 0
    #: Waiting for their time, and stored in late_aircraft.
    scheduled: int = 0
    late: int = 0
    #: Not settled by late_summary, and given up by it.
    unsummarized: int = 0
    lost_summaries: int = 0
    #: Not settled by aircraft_checks, those included that are parked or wait behind such; and rows
    #: that count in its sink.
    unchecked: int = 0
    held: int = 0
    checked: int = 0
    #: Stored in crew_changes, and half messages that nobody has ended.
    crew_changes: int = 0
    open_halves: int = 0

    def missing(self, published: int, *, held: int) -> list[str]:
        """What has not happened yet, each in a line; nothing when all is drained.

        Args:
            published: departures there are.
            held: those that are to be parked, or to wait behind such.
        """
        left = {
            "departures to publish": published - self.published,
            f"departures that {ROTATIONS} has not settled": self.unprocessed,
            "late aircraft that wait for their time": self.scheduled,
            f"late aircraft that {SUMMARY} has not settled": self.unsummarized,
            f"departures that {CHECKS} has neither settled nor parked": self.unchecked - self.held,
            "departures to hold": held - self.held,
            "changes of crews that are neither committed nor rolled back": self.open_halves,
        }
        return [f"{count:,} {what}" for what, count in left.items() if count]


def look(client: Client) -> Progress:
    """The numbers of this moment."""
    row: dict[str, Any] = client.sql(_SNAPSHOT).to_pylist()[0]
    found = {name: int(value or 0) for name, value in row.items()}
    retried = found.pop("retries_of_dead") + found.pop("retries_of_others")
    # Asked after the snapshot, so they never say less than it.
    return Progress(
        published=stored(client, DEPARTURES.name),
        late=stored(client, LATE_AIRCRAFT.name),
        crew_changes=stored(client, CREW_CHANGES.name),
        retried=retried,
        **found,
    )


@dataclass
class Tally:
    """Events counted as they come: later they are sealed, and no view has them any more."""

    #: Scheduled deliveries by how late they were, ms.
    lateness_ms: Counter[int] = field(default_factory=Counter)
    #: What the broker had to do because no window of Dagster did.
    fallbacks: int = 0
    _position: int = -1

    def update(self, client: Client) -> None:
        """Count what is new."""
        for row in client.sql(_NEWS.format(position=self._position)).to_pylist():
            self._position = max(self._position, row["position"])
            if row["kind"] == "schedule_delivered":
                self.lateness_ms[row["late_ms"]] += 1
            else:
                self.fallbacks += 1

    @property
    def early(self) -> int:
        """Scheduled messages delivered before their time."""
        return sum(count for late_ms, count in self.lateness_ms.items() if late_ms < 0)

    def quantile_ms(self, share: float) -> int | None:
        """Lateness that this share of scheduled deliveries does not exceed."""
        rank = share * self.lateness_ms.total()
        seen = 0
        for late_ms in sorted(self.lateness_ms):
            seen += self.lateness_ms[late_ms]
            if seen >= rank:
                return late_ms
        return None
