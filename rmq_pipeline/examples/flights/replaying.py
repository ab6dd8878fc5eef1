"""A mistake in ``aircraft_rotations``, and how a replay of two hours mends them.

Day by day the consumer told turnarounds in hours, where minutes were promised. The code that is in
Dagster now is right; what the sink holds is not, until its hours are replayed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.examples.flights import rotations
from rmq_pipeline.examples.flights.dataset import departures
from rmq_pipeline.examples.flights.pipeline import (
    AIRCRAFT_ROTATIONS,
    DEPARTURES,
    LATE_AIRCRAFT,
    LATE_SUMMARY,
)
from rmq_pipeline.examples.flights.publishing import publish
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import NO_ENDPOINT, Listening
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.graphql import GraphQL
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.spark import session
from rmq_pipeline.spark.consumer import WindowReport, run_window

#: The hours of the third of January 2013 that are mended, UTC.
HOURS: Final = ("2013-01-03-14:00", "2013-01-03-15:00")
FROM_MS: Final = 1_357_221_600_000
TO_MS: Final = FROM_MS + 2 * 3_600_000

PIPELINE: Final = Pipeline(
    "flights",
    topics=[DEPARTURES, LATE_AIRCRAFT],
    consumers=[AIRCRAFT_ROTATIONS, LATE_SUMMARY],
)


def mistaken(messages: pa.Table, state: pa.Table) -> Outcome:
    """As the handler of aircraft_rotations, but turnarounds are in hours."""
    made = rotations.handler(messages, state)
    if made.rows is None:
        return made
    column = made.rows.column_names.index("turnaround_minutes")
    hours = pc.divide(made.rows["turnaround_minutes"], 60).cast(pa.int32())
    rows = made.rows.set_column(column, rotations.ROTATION.field(column), hours)
    return replace(made, rows=rows)


def consume(
    consumer: Consumer,
    client: Client,
    *,
    sinks: Path,
    spark: Callable[[], Any],
    handler: Callable[[pa.Table, pa.Table], Outcome] | None = None,
) -> WindowReport:
    """One window of a consumer, outside Dagster, with another handler if one is given."""
    spec = replace(consumer.spec, handler=handler or consumer.spec.handler)
    assert spec.sink is not None
    spec = replace(spec, sink=sinks / spec.sink)
    return run_window(spec, client, spark=spark, owner="example", idle_s=5.0)


@contextmanager
def story(folder: Path, *, days: int = 3) -> Iterator[DevServer]:
    """Days of departures with the mistake in the sink, and Dagster with the code that is right.

    Args:
        folder: for everything; it exists.
        days: of January 2013.
    """
    sinks = folder / "sinks"
    os.environ["RMQ_FLIGHTS"] = str(folder / "airline")
    with ExitStack() as stack:
        endpoints = Listening("127.0.0.1:0", NO_ENDPOINT)
        broker = stack.enter_context(
            Supervisor(folder / "home", endpoints, settings={"seal_after_ms": 0})
        )
        client = stack.enter_context(Client(home=folder / "home"))
        PIPELINE.ensure(client)
        publish(client, DEPARTURES.name, messages=departures(days))
        spark = session.start()
        consume(AIRCRAFT_ROTATIONS, client, sinks=sinks, spark=lambda: spark, handler=mistaken)
        spark.stop()
        while client.seal()["segments"]:
            pass
        environment = {"RMQ_FLIGHT": broker.endpoint.flight, "RMQ_SINKS": str(sinks)}
        code = CodeLocation("rmq_pipeline.examples.flights.replaying_definitions", folder)
        server = DevServer(folder / "dagster_home", env=environment, code=code)
        yield stack.enter_context(server)


def launch(
    graphql: GraphQL, consumer: Consumer, *, hours: Sequence[str] = HOURS, **config: Any
) -> str:
    """Launch the replay of hours as the dialog on the asset's partitions does; the backfill's id.

    Args:
        graphql: of the webserver.
        consumer: that is replayed.
        hours: partitions without a gap.
        config: of its run, rmq_pipeline.orchestration.replay.
    """
    name = f"replay_{consumer.spec.name}"
    return graphql.launch_backfill(
        [name],
        hours,
        config={"ops": {name: {"config": config}}},
        title=f"{config.get('mode', 'dry_run')} of {consumer.spec.name}",
    )
