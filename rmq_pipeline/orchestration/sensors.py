"""Sensors: which windows to start, and what the topics look like."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import dagster as dg

from rmq_pipeline.errors import BusyError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.due_work import (
    BUSY_FOR_MS,
    Memory,
    Wanted,
    wanted_consumer,
    wanted_upkeep,
)
from rmq_pipeline.orchestration.topic_assets import DeclaredGroup, identifier
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG, WindowConfig, op_name
from rmq_pipeline.orchestration.windows import UpkeepJob

#: Dagster evaluates a sensor every 5 s at most; polling for most of that leaves no gap to speak
#: of, and a shutdown waits for at most this.
POLL_S: Final = 4.0
POLL_INTERVAL_S: Final = 0.25
#: A sensor does not wait for a broker that is away.
CONNECT_RETRY_S: Final = 0.0
#: A run waits in the queue for as long as others have its slot, and is started then,
_QUEUED: Final = (dg.DagsterRunStatus.QUEUED,)
#: but one whose starter has died stays in these states until Dagster gives it up after minutes.
_COMING_UP: Final = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING)
COMES_UP_WITHIN_S: Final = 60.0
#: One that started opens its window within this time.
_STARTED: Final = (dg.DagsterRunStatus.STARTED,)
STARTS_WITHIN_S: Final = 30.0

Target = dg.JobDefinition | Any


def due_work_sensor(
    jobs: Mapping[str, UpkeepJob],
    targets: Sequence[Target],
    *,
    poll_s: float = POLL_S,
    busy_for_ms: int = BUSY_FOR_MS,
) -> dg.SensorDefinition:
    """The one sensor of the broker's background work: at most one run a kind and tick.

    Args:
        jobs: kinds of work by name; the job that runs one has the same name.
        targets: these jobs.
        poll_s: how long a tick without work waits for some.
        busy_for_ms: windows follow each other while work was due within this time.
    """

    def request(wanted: Wanted) -> dg.RunRequest:
        window = WindowConfig(hand_over_from=wanted.hand_over_from)
        config = dg.RunConfig(ops={op_name(wanted.name): window})
        return _run_request(wanted, job=wanted.name, config=config)

    @dg.sensor(
        name="due_work",
        jobs=list(targets),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=1,
        description="Asks the broker what is due and starts windows that do it.",
    )
    def due_work(context: dg.SensorEvaluationContext, broker: BrokerResource) -> dg.SensorResult:
        def look(client: Client, memory: Memory) -> list[Wanted]:
            return wanted_upkeep(
                client.due(),
                jobs,
                memory=memory,
                busy_for_ms=busy_for_ms,
                is_to_come=partial(_is_to_come, context.instance),
            )

        return _poll(context, broker, look=look, request=request, poll_s=poll_s)

    return due_work


def consumer_sensor(
    group: DeclaredGroup, target: Target, *, poll_s: float = POLL_S
) -> dg.SensorDefinition:
    """The sensor of a consumer: starts a window when its topic has messages and none is open.

    It makes topic and group at the broker when they are not there.
    """

    def request(wanted: Wanted) -> dg.RunRequest:
        return _run_request(wanted, job=target.name, config=None)

    @dg.sensor(
        name=f"{identifier(group.name)}_messages",
        job=target,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=1,
        description=f"Starts a window of {group.name} when {group.topic.name} has messages.",
    )
    def messages(context: dg.SensorEvaluationContext, broker: BrokerResource) -> dg.SensorResult:
        def held(client: Client) -> int:
            from rmq_pipeline.orchestration import queries

            return queries.held_by_windows(client, group.name)

        def look(client: Client, memory: Memory) -> list[Wanted]:
            due = client.due()
            if group.topic.name not in due["groups"].get(group.name, {}).get("topics", {}):
                group.ensure(client)
                due = client.due()
            wanted = wanted_consumer(
                due,
                group=group.name,
                topic=group.topic.name,
                memory=memory,
                orphans=lambda: held(client),
                is_to_come=partial(_is_to_come, context.instance),
            )
            return [wanted] if wanted else []

        return _poll(context, broker, look=look, request=request, poll_s=poll_s)

    return messages


def _run_request(wanted: Wanted, *, job: str, config: dg.RunConfig | None) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=wanted.run_key,
        job_name=job,
        run_config=config,
        tags={WINDOW_TAG: wanted.name, "rmq/reason": wanted.reason},
    )


def _poll(
    context: dg.SensorEvaluationContext,
    broker: BrokerResource,
    *,
    look: Callable[[Client, Memory], list[Wanted]],
    request: Callable[[Wanted], dg.RunRequest],
    poll_s: float,
) -> dg.SensorResult:
    """Look until there is something to request or the tick's time is over."""
    end = time.monotonic() + poll_s
    try:
        with broker.client(retry_s=CONNECT_RETRY_S) as client:
            while True:
                memory = Memory.load(context.cursor)
                wanted = look(client, memory)
                if wanted or time.monotonic() >= end:
                    break
                threading.Event().wait(POLL_INTERVAL_S)
    except BusyError as error:
        # The cursor stays: the broker that comes back goes on from the epochs it has stored.
        return dg.SensorResult(skip_reason=str(error))
    if not wanted:
        return dg.SensorResult(skip_reason="Nothing is due.", cursor=memory.dump())
    return dg.SensorResult(run_requests=[request(each) for each in wanted], cursor=memory.dump())


def _is_to_come(instance: dg.DagsterInstance, name: str) -> bool:
    """Whether a run will open a window of this name yet.

    One that is given up here may come up all the same: then one of two yields its window.
    """
    now = datetime.now(UTC)

    def there_are(statuses: Sequence[dg.DagsterRunStatus], within_s: float | None = None) -> bool:
        lately = None if within_s is None else now - timedelta(seconds=within_s)
        runs = dg.RunsFilter(tags={WINDOW_TAG: name}, statuses=statuses, updated_after=lately)
        return instance.get_runs_count(runs) > 0

    return (
        there_are(_QUEUED)
        or there_are(_COMING_UP, COMES_UP_WITHIN_S)
        or there_are(_STARTED, STARTS_WITHIN_S)
    )
