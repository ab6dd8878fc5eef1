"""The sensor that evaluates asset checks, also of consumers that are down."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self, TypeAlias

import dagster as dg

from rmq_pipeline.errors import BusyError, RocketMQError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.checks import (
    DOWN,
    Check,
    DeliveryHistory,
    Down,
    Watched,
    broker_away,
    broker_refuses,
    down_result,
    look_for_down,
)
from rmq_pipeline.orchestration.resources import BrokerResource

INTERVAL_S: Final = 15
#: Interval while something is down, so that its checks turn green soon after it works again.
DOWN_INTERVAL_S: Final = 5
#: An evaluation with an unchanged result is reported again only after this long, or after a
#: materialization.
REPEAT_S: Final = 3_600.0
#: A restarting broker is away for less than this.
AWAY_S: Final = 30.0

Latest = Callable[[dg.AssetCheckKey], Any]
#: A result of a check, new or as Dagster stores it.
_Found: TypeAlias = dg.AssetCheckResult | dg.AssetCheckEvaluation


@dataclass
class Memory:
    """The sensor's cursor."""

    #: Time since when no broker has answered, in seconds since 1970; 0 while it answers.
    away_since_s: float = 0.0
    #: When all checks were last evaluated, and whether something was down then.
    ticked_at_s: float = 0.0
    is_down: bool = False
    #: By check: time of its last evaluation.
    looked_at_s: dict[str, float] = field(default_factory=dict)
    #: By window.
    standing: dict[str, DeliveryHistory] = field(default_factory=dict)

    @classmethod
    def load(cls, cursor: str | None) -> Self:
        """Parse a cursor written by ``dump``."""
        found = json.loads(cursor or "{}")
        standing = {
            name: DeliveryHistory(**each) for name, each in found.pop("standing", {}).items()
        }
        return cls(**found, standing=standing)

    def is_to_look(self, now_s: float) -> bool:
        """Return True if the next evaluation is due."""
        if self.is_down or self.away_since_s or now_s < self.ticked_at_s:
            return True
        return now_s - self.ticked_at_s >= INTERVAL_S

    def dump(self) -> str:
        """Return this as a cursor."""
        return json.dumps(asdict(self))


def check_sensor(
    watched: Sequence[Watched], *, name: str, now_s: Callable[[], float] = time.time
) -> dg.SensorDefinition:
    """Return the sensor that evaluates the checks of assets and reports changed results.

    Args:
        watched: the assets and their checks.
        name: name of the sensor.
        now_s: clock in seconds since 1970.
    """

    @dg.sensor(
        name=name,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=DOWN_INTERVAL_S,
        description="Evaluates the asset checks, also while windows fail or the broker is away.",
    )
    def checks(context: dg.SensorEvaluationContext, broker: BrokerResource) -> dg.SensorResult:
        memory = Memory.load(context.cursor)
        tick = _Tick(context.instance, memory, now_s())
        if not memory.is_to_look(tick.now_s):
            return dg.SensorResult(skip_reason="No check is due.", cursor=context.cursor)
        memory.ticked_at_s, memory.is_down = tick.now_s, False
        events: list[dg.AssetCheckEvaluation] = []
        try:
            with broker.client(retry_s=0.0) as client:
                for each in watched:
                    for event in tick.at(each, client):
                        events.append(event)  # noqa: PERF402 - keeps those before an error
        except BusyError as error:
            memory.away_since_s = memory.away_since_s or tick.now_s
            if tick.now_s - memory.away_since_s < AWAY_S:
                # Report what was found before the broker went away: the cursor marks it as
                # evaluated.
                return _result(events or str(error), memory)
            events = [event for each in watched for event in tick.down(each, broker_away(error))]
        except RocketMQError as error:
            memory.away_since_s = 0.0
            events = [event for each in watched for event in tick.down(each, broker_refuses(error))]
        else:
            memory.away_since_s = 0.0
        return _result(events or "No check has changed.", memory)

    return checks


def _result(said: list[dg.AssetCheckEvaluation] | str, memory: Memory) -> dg.SensorResult:
    """Report evaluations, or why there are none."""
    if isinstance(said, str):
        return dg.SensorResult(skip_reason=said, cursor=memory.dump())
    return dg.SensorResult(asset_events=said, cursor=memory.dump())


@dataclass(frozen=True)
class _Tick:
    """One tick of the sensor."""

    instance: dg.DagsterInstance
    memory: Memory
    now_s: float

    def at(self, watched: Watched, client: Client) -> Iterator[dg.AssetCheckEvaluation]:
        """Evaluate the checks of one asset; yield the results to report."""
        try:
            down, self.memory.standing[watched.window] = look_for_down(
                self.instance,
                client,
                window=watched.window,
                group=watched.group,
                before=self.memory.standing.get(watched.window),
            )
        except BusyError:
            raise
        except RocketMQError as error:
            yield from self.down(watched, broker_refuses(error))
            return
        if down is not None:
            yield from self.down(watched, down, client=client)
            return
        for check in watched.checks:
            said = self._said(watched, check)
            if self._is_due(watched, check, said=said):
                yield from self._report(watched, check, found=_evaluated(check, client), said=said)
            elif said is not None and self._is_outdated(watched, said):
                yield _event(watched, check, found=said.found)

    def down(
        self, watched: Watched, down: Down, *, client: Client | None = None
    ) -> Iterator[dg.AssetCheckEvaluation]:
        """Turn all checks of an asset red; cheap checks are still evaluated for their metadata."""
        self.memory.is_down = True
        for check in watched.checks:
            found: Mapping[str, Any] = {}
            if client is not None and not check.every_s:
                found = _evaluated(check, client).metadata
            said = self._said(watched, check)
            yield from self._report(watched, check, found=down_result(down, found), said=said)

    def _said(self, watched: Watched, check: Check) -> "_Said | None":
        key = dg.AssetCheckKey(watched.key, check.name)
        record = self.instance.get_latest_asset_check_evaluation_record(key)
        event = record.event.dagster_event if record and record.event else None
        said = event.event_specific_data if event else None
        if record is None or not isinstance(said, dg.AssetCheckEvaluation):
            return None  # no result yet, or only one planned by a run
        return _Said(record.create_timestamp, said)

    def _is_due(self, watched: Watched, check: Check, *, said: "_Said | None") -> bool:
        looked_at_s = self.memory.looked_at_s.get(_name(watched, check), 0.0)
        is_told = said is not None and not said.down
        return not is_told or self.now_s - looked_at_s >= check.every_s

    def _report(
        self,
        watched: Watched,
        check: Check,
        *,
        found: dg.AssetCheckResult,
        said: "_Said | None",
    ) -> Iterator[dg.AssetCheckEvaluation]:
        self.memory.looked_at_s[_name(watched, check)] = self.now_s
        now = _Said(self.now_s, found)
        if said is not None and now.repeats(said) and not self._is_outdated(watched, said):
            return
        yield _event(watched, check, found=found)

    def _is_outdated(self, watched: Watched, said: "_Said") -> bool:
        """Return True if Dagster shows the check as not evaluated: a materialization came since."""
        latest = self.instance.get_latest_materialization_event(watched.key)
        return latest is not None and latest.timestamp >= said.at_s


def _evaluated(check: Check, client: Client) -> dg.AssetCheckResult:
    """Evaluate a check; one that the broker refuses turns red without stopping the others."""
    try:
        return check.evaluate(client)
    except BusyError:
        raise
    except RocketMQError as error:
        said = f"The check could not be evaluated: {error}"
        return down_result(Down("not evaluated", said))


@dataclass(frozen=True)
class _Said:
    """An evaluation and its time."""

    at_s: float
    found: _Found

    @property
    def down(self) -> str:
        """The kind of a result that reports something as down; else empty."""
        kind = self.found.metadata.get(DOWN)
        return "" if kind is None else str(kind.value)

    def repeats(self, other: "_Said") -> bool:
        """Return True if this evaluation adds nothing to the other one."""
        same = (
            self.found.passed == other.found.passed
            and self.found.severity == other.found.severity
            and self.down == other.down
        )
        return same and self.at_s - other.at_s < REPEAT_S


def _event(watched: Watched, check: Check, *, found: _Found) -> dg.AssetCheckEvaluation:
    """Return the report of a new result, or of a stored one again."""
    return dg.AssetCheckEvaluation(
        asset_key=watched.key,
        check_name=check.name,
        passed=found.passed,
        severity=found.severity,
        description=found.description,
        metadata=found.metadata,
    )


def _name(watched: Watched, check: Check) -> str:
    return f"{watched.key.to_user_string()}:{check.name}"
