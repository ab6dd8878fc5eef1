"""The flights pipeline: departures to aircraft rotations, late aircraft to an hourly summary.

Beside it, a log of aircraft checks, and changes of crews that are messages only if they happened.
"""

from typing import Final

from rmq_pipeline.examples.flights import aircraft_checks, crews, rotations, summary
from rmq_pipeline.orchestration.checks import Thresholds
from rmq_pipeline.orchestration.consumer import python_consumer, spark_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.transaction_checker import transaction_checker

#: The hours of the data, UTC: New York's year ends five hours into the next.
FIRST_HOUR: Final = "2013-01-01-00:00"
LAST_HOUR: Final = "2014-01-02-00:00"

DEPARTURES: Final = topic(
    "departures",
    type="fifo",
    queues=8,
    partition_time="born",
    log_from=FIRST_HOUR,
    log_until=LAST_HOUR,
    description="Departures of New York's airports in 2013, in scheduled order an aircraft.",
)
LATE_AIRCRAFT: Final = topic(
    rotations.LATE_TOPIC,
    type="delay",
    queues=4,
    partition_time="born",
    log_from=FIRST_HOUR,
    log_until=LAST_HOUR,
    description="Legs that left more than an hour late, told a few seconds afterwards.",
)

AIRCRAFT_ROTATIONS: Final = spark_consumer(
    topic=DEPARTURES,
    group="aircraft_rotations",
    order_by="message_group",
    state=rotations.STATE,
    sink="aircraft_rotations",
    sink_schema=rotations.ROTATION,
    publishes=[LATE_AIRCRAFT],
    max_attempts=3,
    backoff_ms=(500, 1000),
    # Cancelled departures fail for good: 8,255 in the year.
    thresholds=Thresholds(dead_letters=8_255),
    description="Each aircraft's legs in order: turnaround, and the delay it brought with it.",
)(rotations.handler)

LATE_SUMMARY: Final = spark_consumer(
    topic=LATE_AIRCRAFT,
    group="late_summary",
    sink="late_summary",
    sink_schema=summary.INCREMENT,
    partition_time="flight_hour_ms",
    description="Late departures by hour and carrier, as increments to sum up.",
)(summary.handler)

# A line a departure: nothing that Spark would be quicker at than a few threads.
AIRCRAFT_CHECKS: Final = python_consumer(
    topic=DEPARTURES,
    group="aircraft_checks",
    order_by="message_group",
    state=aircraft_checks.STATE,
    sink="aircraft_checks",
    sink_schema=aircraft_checks.CHECKED,
    max_attempts=3,
    backoff_ms=(500, 1000),
    # A grounded aircraft waits with all its departures; that is no reason to stop the others.
    on_failure="park",
    description="The maintenance log of each aircraft; a grounded one waits until it is released.",
)(aircraft_checks.handler)

CREW_CHANGES: Final = topic(
    crews.TOPIC,
    type="transaction",
    queues=2,
    partition_time="born",
    log_from=FIRST_HOUR,
    log_until=LAST_HOUR,
    description="Changes of crews, each a message only if the crew desk's ledger confirms it.",
)

CREW_CHECKER: Final = transaction_checker(topic=CREW_CHANGES)(crews.check)

PIPELINE: Final = Pipeline(
    "flights",
    topics=[DEPARTURES, LATE_AIRCRAFT, CREW_CHANGES],
    consumers=[AIRCRAFT_ROTATIONS, LATE_SUMMARY, AIRCRAFT_CHECKS],
    checkers=[CREW_CHECKER],
)
