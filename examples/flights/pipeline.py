"""The flights pipeline: departures to aircraft rotations, late aircraft to an hourly summary."""

from typing import Final

from examples.flights import rotations, summary
from rmq_pipeline.orchestration.checks import Thresholds
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.spark_consumer import spark_consumer
from rmq_pipeline.orchestration.topic_assets import topic

DEPARTURES: Final = topic(
    "departures",
    type="fifo",
    queues=8,
    partition_time="born",
    description="Departures of New York's airports in 2013, in scheduled order an aircraft.",
)
LATE_AIRCRAFT: Final = topic(
    rotations.LATE_TOPIC,
    type="delay",
    queues=4,
    partition_time="born",
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

PIPELINE: Final = Pipeline(
    "flights", topics=[DEPARTURES, LATE_AIRCRAFT], consumers=[AIRCRAFT_ROTATIONS, LATE_SUMMARY]
)
