"""Sensors that start windows: of the broker's background work, and of consumers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import dagster as dg

from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import BusyError, RocketMQError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.backoff import Backoff, code_since_s, skip_reason
from rmq_pipeline.orchestration.declarations import DeclaredGroup, identifier
from rmq_pipeline.orchestration.due_work import (
    BUSY_FOR_MS,
    Memory,
    Wanted,
    wanted_consumer,
    wanted_upkeep,
)
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG, WindowConfig, op_name
from rmq_pipeline.orchestration.windows import UpkeepJob

#: Dagster evaluates a sensor at most every 5 s. Polling for most of that time leaves almost no gap,
#: and a shutdown waits at most this long.
POLL_S: Final = 4.0
POLL_INTERVAL_S: Final = 0.25
#: With fewer sensor threads, a daemon has none to spare for polling.
POLL_WORKERS: Final = 4
#: A sensor does not wait for an absent broker.
CONNECT_RETRY_S: Final = 0.0
#: A queued run waits for a slot as long as needed, and then starts.
_QUEUED: Final = (dg.DagsterRunStatus.QUEUED,)
#: A run whose starter has died keeps these statuses until Dagster fails it after minutes, so the
#: sensor waits only this long.
_COMING_UP: Final = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING)
COMES_UP_WITHIN_S: Final = 60.0
#: A started run opens its window within this time.
_STARTED: Final = (dg.DagsterRunStatus.STARTED,)
STARTS_WITHIN_S: Final = 30.0

Target = dg.JobDefinition | Any


def due_work_sensor(
    jobs: Mapping[str, UpkeepJob],
    targets: Sequence[Target],
    *,
    poll_s: float | None = None,
    busy_for_ms: int = BUSY_FOR_MS,
) -> dg.SensorDefinition:
    """Return the sensor of the broker's background work; requests one run per kind and tick.

    Args:
        jobs: kinds of work by name; the Dagster job of a kind has the same name.
        targets: these Dagster jobs.
        poll_s: how long a tick waits for work; None: as long as the instance allows.
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
        look = _Upkeep(jobs, context.instance, busy_for_ms)
        return _poll(context, broker, look=look, request=request, poll_s=poll_s)

    return due_work


@dataclass
class _Upkeep:
    """Looks for background work of the broker, in one tick."""

    jobs: Mapping[str, UpkeepJob]
    instance: dg.DagsterInstance
    busy_for_ms: int

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.instance)

    def __call__(self, client: Client, memory: Memory) -> list[Wanted]:
        """Return the windows to request."""
        return wanted_upkeep(
            client.due(),
            self.jobs,
            memory=memory,
            busy_for_ms=self.busy_for_ms,
            is_to_come=self._is_not_now,
        )

    def reasons(self) -> list[str]:
        """Return why due work is not started."""
        return self._backoff.reasons()

    def _is_not_now(self, name: str) -> bool:
        return _is_to_come(self.instance, name) or self._backoff.holds(name)


class Reader(Protocol):
    """A consumer, as the sensor needs it."""

    @property
    def group(self) -> DeclaredGroup:
        """The consumer group, created if the broker does not have it."""
        ...

    @property
    def job(self) -> Target:
        """The job whose runs are its windows."""
        ...

    @property
    def resources(self) -> frozenset[str]:
        """Resources that ``lacks`` examines."""
        ...

    @property
    def lacks(self) -> Callable[[Any], str]:
        """Return why a window cannot start; empty if it can."""
        ...


def consumers_sensor(
    readers: Sequence[Reader], *, name: str, poll_s: float | None = None
) -> dg.SensorDefinition:
    """Return the sensor of all consumers: starts windows when their topics have messages.

    The sensor creates topics and groups as declared: once per process, so after each change of the
    code, and when the broker does not have them. It requests no window of a consumer whose
    declaration the broker refuses, because every run would fail.

    Args:
        readers: the consumers.
        name: name of the sensor.
        poll_s: how long a tick waits for messages; None: as long as the instance allows.
    """
    by_name = {identifier(reader.group.name): reader for reader in readers}
    declared: set[str] = set()
    needed = frozenset[str]().union(*(reader.resources for reader in readers))

    def request(wanted: Wanted) -> dg.RunRequest:
        return _run_request(wanted, job=by_name[wanted.name].job.name, config=None)

    @dg.sensor(
        name=name,
        jobs=[reader.job for reader in readers],
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=1,
        required_resource_keys={"broker", *needed},
        description="Starts windows of the consumers whose topics have messages.",
    )
    def messages(context: dg.SensorEvaluationContext, **_resources: object) -> dg.SensorResult:
        # A missing requirement does not appear within a tick.
        lacking = {each: reader.lacks(context.resources) for each, reader in by_name.items()}
        look = _Readers(readers, context.instance, lacking, declared)
        return _poll(context, context.resources.broker, look=look, request=request, poll_s=poll_s)

    return messages


@dataclass
class _Readers:
    """Looks for messages of consumers, in one tick."""

    readers: Sequence[Reader]
    instance: dg.DagsterInstance
    #: By name: why its windows cannot start; empty if they can.
    lacking: Mapping[str, str]
    #: Groups that this process has created as declared.
    declared: set[str]
    _refused: dict[str, str] = field(default_factory=dict)
    _held_back: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.instance)

    def __call__(self, client: Client, memory: Memory) -> list[Wanted]:
        """Return the windows to request."""
        due = client.due()
        if wanting := [reader for reader in self.readers if self._is_to_make(reader, due)]:
            for reader in wanting:
                self._ensure(reader, client)
            due = client.due()
        wanted = (self._wanted(r, due, client=client, memory=memory) for r in self.readers)
        return [each for each in wanted if each is not None]

    def reasons(self) -> list[str]:
        """Return why consumers with messages are not started."""
        lacking = [f"{name}: {self.lacking[name]}" for name in sorted(self._held_back)]
        return [*self._refused.values(), *lacking, *self._backoff.reasons()]

    def _is_to_make(self, reader: Reader, due: Mapping[str, Any]) -> bool:
        name = reader.group.name
        is_made = name in self.declared and _is_known(reader, due)
        return not is_made and name not in self._refused

    def _ensure(self, reader: Reader, client: Client) -> None:
        try:
            reader.group.ensure(client)
            self.declared.add(reader.group.name)
        except BusyError:
            raise
        except RocketMQError as error:
            # A refused declaration does not stop the other consumers.
            self._refused[reader.group.name] = f"{reader.group.name}: {error}"

    def _wanted(
        self, reader: Reader, due: Mapping[str, Any], *, client: Client, memory: Memory
    ) -> Wanted | None:
        if not _is_known(reader, due) or reader.group.name in self._refused:
            return None

        def held() -> int:
            from rmq_pipeline.orchestration import queries

            return queries.held_by_windows(client, reader.group.name)

        return wanted_consumer(
            due,
            group=reader.group.name,
            topic=reader.group.topic.name,
            memory=memory,
            orphans=held,
            is_to_come=self._is_not_now,
        )

    def _is_not_now(self, name: str) -> bool:
        if self.lacking[name]:
            self._held_back.add(name)
            return True
        return _is_to_come(self.instance, name) or self._backoff.holds(name)


def _is_known(reader: Reader, due: Mapping[str, Any]) -> bool:
    known = due["groups"].get(reader.group.name, {}).get("topics", {})
    return reader.group.topic.name in known


def _run_request(wanted: Wanted, *, job: str, config: dg.RunConfig | None) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=wanted.run_key,
        job_name=job,
        run_config=config,
        tags={WINDOW_TAG: wanted.name, "rmq/reason": wanted.reason},
    )


class _Look(Protocol):
    """Finds the windows to request in a tick."""

    def __call__(self, client: Client, memory: Memory) -> list[Wanted]:
        """Return the windows to request."""
        ...

    def reasons(self) -> list[str]:
        """Return why wanted windows are not requested, one sentence each."""
        ...


def _poll(
    context: dg.SensorEvaluationContext,
    broker: BrokerResource,
    *,
    look: _Look,
    request: Callable[[Wanted], dg.RunRequest],
    poll_s: float | None,
) -> dg.SensorResult:
    """Poll until there is a window to request or the tick's time is over."""
    deadline = Deadline(tick_wait_s(context.instance) if poll_s is None else poll_s)
    try:
        with broker.client(retry_s=CONNECT_RETRY_S) as client:
            while True:
                memory = Memory.load(context.cursor)
                wanted = look(client, memory)
                if wanted or deadline.is_over:
                    break
                threading.Event().wait(POLL_INTERVAL_S)
    except BusyError as error:
        # The cursor is unchanged: a broker that comes back continues with its stored epochs.
        return dg.SensorResult(skip_reason=str(error))
    if not wanted:
        return dg.SensorResult(skip_reason=skip_reason(look.reasons()), cursor=memory.dump())
    return dg.SensorResult(run_requests=[request(each) for each in wanted], cursor=memory.dump())


def tick_wait_s(instance: dg.DagsterInstance) -> float:
    """Return how long a tick may wait: 0 if it would keep other sensors from ticking.

    Without threads, the default of an instance, the daemon evaluates one sensor after the other.
    """
    settings = instance.get_settings("sensors")
    workers = settings.get("num_workers")
    is_alone = bool(settings.get("use_threads")) and (workers is None or workers >= POLL_WORKERS)
    return POLL_S if is_alone else 0.0


def _is_to_come(instance: dg.DagsterInstance, name: str) -> bool:
    """Return True if a run will still open a window of this name.

    A run may start after this function has stopped expecting it: then one of two runs yields its
    window.
    """
    now = datetime.now(UTC)
    # Runs are child processes of the code server, and end with it. If one survives, as after a
    # reload, it holds its window or yields it.
    since = datetime.fromtimestamp(code_since_s(), UTC)

    def there_are(statuses: Sequence[dg.DagsterRunStatus], within_s: float | None = None) -> bool:
        lately = None if within_s is None else max(now - timedelta(seconds=within_s), since)
        runs = dg.RunsFilter(tags={WINDOW_TAG: name}, statuses=statuses, updated_after=lately)
        return instance.get_runs_count(runs) > 0

    return (
        there_are(_QUEUED)
        or there_are(_COMING_UP, COMES_UP_WITHIN_S)
        or there_are(_STARTED, STARTS_WITHIN_S)
    )
