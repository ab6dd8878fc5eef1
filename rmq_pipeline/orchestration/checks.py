"""Asset checks: order, no loss, oldest unread, dead letters, and upkeep done by Dagster.

A sensor (``check_sensor``) evaluates them. Dagster skips the checks of a failed run, and a consumer
that is down has no other runs. They can also be executed on demand.

While nothing is done, nothing is lost or out of order, so the checks of a consumer that is down
would pass. Only a working consumer or upkeep may pass: ``look_for_down`` says why nothing gets
done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import dagster as dg

from rmq_pipeline.failure import Failure
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG

#: A consumer counts as failing after this many failed deliveries without a later acknowledgement.
FAILING_DELIVERIES: Final = 2
#: It no longer counts as failing if its last failure is older than this.
FAILING_MS: Final = 3_600_000
#: Metadata key: why the checks are red.
DOWN: Final = "down"
_ENDED: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE)
FALLBACK_HOURS: Final = 1
#: Period that the checks of order and loss examine.
HISTORY_HOURS: Final = 24
#: Interval of these checks: they read all events of that period.
HISTORY_EVERY_S: Final = 600.0
OLDEST_UNREAD_MINUTES: Final = 15
DEAD_LETTERS: Final = 0

Evaluate = Callable[[Client], dg.AssetCheckResult]


@dataclass(frozen=True)
class Down:
    """Why a consumer or a kind of upkeep is down."""

    #: One of a few texts: an unchanged kind is not reported again.
    kind: str
    #: Explanation, and remedy.
    said: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class DeliveryHistory:
    """Recent results of a group's deliveries, from which the next look continues."""

    #: Creation time of the group; a new group of the same name has another history.
    created_at_ms: int | None = None
    #: Log position up to which events were examined.
    position: int = -1
    acked_at_ms: int = 0
    #: Number of failed deliveries since the last acknowledgement.
    failures: int = 0
    failed_at_ms: int = 0
    #: The last failure, as recorded in its event.
    detail: str = ""
    #: The last failed window seen, and the last acknowledgement at that time. A later
    #: acknowledgement shows that a window works again, long before its run ends.
    failed_run: str = ""
    acked_before_ms: int = 0

    def look(self, client: Client, group: str, *, since_ms: int) -> "DeliveryHistory":
        """Return a copy with the events since the last look, at the earliest since ``since_ms``."""
        from rmq_pipeline.orchestration import queries

        ended = queries.endings(client, group, since_ms=since_ms, position=self.position)
        if self.position >= 0 and ended["created_at_ms"] != self.created_at_ms:
            return DeliveryHistory().look(client, group, since_ms=since_ms)
        found = replace(self, created_at_ms=ended["created_at_ms"])
        behind = self.position
        if ended["acked_position"] is not None:
            behind = ended["acked_position"]
            found = replace(found, acked_at_ms=ended["acked_at_ms"], failures=0, detail="")
        if ended["failures"]:
            failed = queries.failures(client, group, since_ms=since_ms, position=behind)
            if failed["n"]:
                found.failures += failed["n"]
                found.failed_at_ms, found.detail = failed["at_ms"], failed["detail"] or ""
        found.position = self.position if ended["position"] is None else ended["position"]
        return found


def look_for_down(
    instance: dg.DagsterInstance,
    client: Client,
    *,
    window: str,
    group: str = "",
    before: DeliveryHistory | None = None,
) -> tuple[Down | None, DeliveryHistory]:
    """Return why nothing gets done, or None if all is well; and the standing for the next look.

    Args:
        instance: has the runs.
        client: client of the broker.
        window: the tag WINDOW_TAG of the runs.
        group: the consumer group; empty for upkeep.
        before: standing that the last look returned.
    """
    now = before or DeliveryHistory()
    if group:
        since_ms = int(client.due()["now_ms"]) - FAILING_MS
        now = now.look(client, group, since_ms=since_ms)
        if now.failures >= FAILING_DELIVERIES and now.failed_at_ms >= since_ms:
            return _no_delivery_succeeds(now), now
    return _failed_window(instance, window, now=now)


def broker_away(error: Exception) -> Down:
    """Return the reason that the broker does not answer."""
    said = f"The broker does not answer: {error} Start it with `rmq up` or `rmq broker`."
    return Down("broker does not answer", said)


def broker_refuses(error: Exception) -> Down:
    """Return the reason that the broker answers with an error."""
    return Down("broker refuses", f"The broker refuses: {error}")


def down_result(down: Down, found: Mapping[str, Any] | None = None) -> dg.AssetCheckResult:
    """Return the result of a check whose asset is down.

    Args:
        down: why it is down.
        found: metadata of the check's own result.
    """
    return dg.AssetCheckResult(
        passed=False,
        severity=dg.AssetCheckSeverity.ERROR,
        description=down.said,
        metadata={**(found or {}), DOWN: down.kind, **down.metadata},
    )


def _no_delivery_succeeds(now: DeliveryHistory) -> Down:
    reason = Failure.from_json(now.detail).reason or "no reason was given"
    said = (
        f"No delivery succeeds: {now.failures} failed since the last acknowledgement."
        f" The last failure: {reason}. Correct the handler; the broker redelivers the messages."
    )
    return Down("no delivery succeeds", said, {"failures": now.failures, "last_failure": reason})


def _failed_window(
    instance: dg.DagsterInstance, window: str, *, now: DeliveryHistory
) -> tuple[Down | None, DeliveryHistory]:
    ended = dg.RunsFilter(tags={WINDOW_TAG: window}, statuses=_ENDED)
    record = next(iter(instance.get_run_records(ended, limit=1)), None)
    if record is None or record.dagster_run.status != dg.DagsterRunStatus.FAILURE:
        return None, now
    last = record.dagster_run
    if _works_again(instance, window, failed=record, acked_at_ms=now.acked_at_ms):
        return None, now
    if last.run_id != now.failed_run:
        now = replace(now, failed_run=last.run_id, acked_before_ms=now.acked_at_ms)
    elif now.acked_at_ms > now.acked_before_ms:
        return None, now
    said = (
        f"The last window failed: run {last.run_id}. Its log has the error. After the correction"
        " the next window turns this check green."
    )
    run = {"failed_run": dg.MetadataValue.dagster_run(last.run_id)}
    return Down("last window failed", said, run), now


def _works_again(
    instance: dg.DagsterInstance, window: str, *, failed: dg.RunRecord, acked_at_ms: int
) -> bool:
    """Return True if a window that began after the failed one has acknowledged messages.

    The acknowledgement may precede the first look at the failed run, for example after a restart of
    Dagster.
    """
    under_way = dg.RunsFilter(tags={WINDOW_TAG: window}, statuses=[dg.DagsterRunStatus.STARTED])
    newest = next(iter(instance.get_run_records(under_way, limit=1)), None)
    return (
        newest is not None
        and newest.storage_id > failed.storage_id
        and newest.start_time is not None
        and acked_at_ms > newest.start_time * 1000
    )


@dataclass(frozen=True)
class Thresholds:
    """Limits above which a consumer's checks turn yellow."""

    #: Expected number of dead letters; those with a redrive do not count.
    dead_letters: int = DEAD_LETTERS
    #: Maximum waiting time of a message until it is settled.
    oldest_unread_minutes: float = OLDEST_UNREAD_MINUTES


@dataclass(frozen=True)
class Check:
    """One check of an asset."""

    name: str
    evaluate: Evaluate
    #: Interval of the sensor in seconds; 0: every tick.
    every_s: float = 0.0


@dataclass(frozen=True)
class Watched:
    """An asset whose runs are windows, and its checks."""

    key: dg.AssetKey
    #: Name of its windows: the tag WINDOW_TAG of their runs.
    window: str
    #: The consumer group; empty for upkeep.
    group: str = ""
    checks: Sequence[Check] = field(default=())

    def definitions(self) -> list[dg.AssetChecksDefinition]:
        """Return the checks as Dagster definitions, for display and execution on demand."""
        return [_definition(self, check) for check in self.checks]


def watched_consumer(
    group: str, key: dg.AssetKey, *, window: str, ordered: bool, thresholds: Thresholds
) -> Watched:
    """Return the checks of a consumer's asset."""
    limit = thresholds.oldest_unread_minutes
    checks = [
        Check("no_loss", lambda client: _no_loss(client, group), HISTORY_EVERY_S),
        Check("oldest_unread", lambda client: _oldest_unread(client, group, limit_minutes=limit)),
        Check(
            "dead_letters",
            lambda client: dead_letter_result(client, group, expected=thresholds.dead_letters),
        ),
        Check("one_filter", lambda client: one_filter_result(client, group)),
    ]
    if ordered:
        checks.append(Check("order", lambda client: _order(client, group), HISTORY_EVERY_S))
    return Watched(key, window, group, checks)


def watched_upkeep(job: str, key: dg.AssetKey) -> Watched:
    """Return the checks of an upkeep asset: red if the broker had to do this work itself.

    Seal waits for dispatch, so its asset also has the check of dispatch.
    """
    checks = [Check("no_fallback", lambda client: fallback_result(client, job))]
    if job == "seal":
        checks.append(Check("dispatch", dispatch_result))
    return Watched(key, job, checks=checks)


def fallback_check(job: str, key: dg.AssetKey) -> dg.AssetChecksDefinition:
    """Return the check of ``watched_upkeep`` that every job has."""
    return watched_upkeep(job, key).definitions()[0]


def _definition(watched: Watched, check: Check) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=watched.key, name=check.name, description=_DESCRIPTIONS[check.name])
    def evaluate(
        context: dg.AssetCheckExecutionContext, broker: BrokerResource
    ) -> dg.AssetCheckResult:
        with broker.client() as client:
            found = check.evaluate(client)
            down = _down(context, client, watched=watched)
        return found if down is None else down_result(down, found.metadata)

    return evaluate


def _was_made_by(context: dg.AssetCheckExecutionContext, key: dg.AssetKey) -> bool:
    """Return True if this run held a window: then earlier runs do not matter."""
    made = context.instance.get_latest_materialization_event(key)
    return made is not None and made.run_id == context.run.run_id


def _down(
    context: dg.AssetCheckExecutionContext, client: Client, *, watched: Watched
) -> Down | None:
    if _was_made_by(context, watched.key):
        return None
    return look_for_down(context.instance, client, window=watched.window, group=watched.group)[0]


_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "order": "No message was settled before an earlier one of its message group.",
    "no_loss": "Every delivered message is settled or will be redelivered.",
    "oldest_unread": "No message has waited too long.",
    "dead_letters": "No more dead letters than expected, except those that had a redrive.",
    "one_filter": "All consumers of the group receive with the same filter.",
    "no_fallback": "Dagster did this upkeep; the broker did none of it.",
    "dispatch": "Dispatch moves the frames of the commit log into the database.",
}


def _order(client: Client, group: str) -> dg.AssetCheckResult:
    from rmq_pipeline.orchestration import queries

    violations = queries.order_violations(client, group, since_ms=_since_ms(client))
    return dg.AssetCheckResult(passed=violations == 0, metadata={"violations": violations})


def _no_loss(client: Client, group: str) -> dg.AssetCheckResult:
    from rmq_pipeline.orchestration import queries

    lost = queries.lost(client, group, since_ms=_since_ms(client))
    return dg.AssetCheckResult(passed=lost == 0, metadata={"lost": lost})


def _since_ms(client: Client) -> int:
    return int(client.due()["now_ms"]) - HISTORY_HOURS * 3_600_000


def _oldest_unread(client: Client, group: str, *, limit_minutes: float) -> dg.AssetCheckResult:
    found = waiting(client, group)
    return dg.AssetCheckResult(
        passed=found["oldest_waited_seconds"] <= 60 * limit_minutes,
        severity=dg.AssetCheckSeverity.WARN,
        metadata=found,
    )


def waiting(client: Client, group: str) -> dict[str, Any]:
    """Return the lag of a group, and how long its oldest unread message has waited."""
    rows = client.lag(group).to_pylist()
    oldest_ms = min((at for row in rows if (at := row["oldest_unread_at_ms"])), default=None)
    waited_s = 0.0
    if oldest_ms is not None:
        waited_s = max(0.0, (int(client.due()["now_ms"]) - oldest_ms) / 1000)
    return {**_lag(rows), "oldest_waited_seconds": round(waited_s, 1)}


def _lag(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lag, and the part of it that matches the consumer's filter, if known."""
    said: dict[str, Any] = {"lag": sum(row["lag"] for row in rows)}
    matching = [row["matching_lag"] for row in rows]
    if None not in matching:
        said["matching_lag"] = sum(matching)
        said["matching_lag_estimated"] = any(row["estimated"] for row in rows)
    return said


def dead_letter_result(client: Client, group: str, *, expected: int) -> dg.AssetCheckResult:
    """Compare a group's dead letters without a redrive with the expected number."""
    from rmq_pipeline.orchestration import queries

    count = queries.dead_letters_left(client, group)
    reasons = queries.dead_letter_reasons(client, group) if count else []
    rows = [
        dg.TableRecord({"reason": each["reason"] or "", "messages": each["n"]}) for each in reasons
    ]
    return dg.AssetCheckResult(
        passed=count <= expected,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"dead_letters": count, "expected": expected}
        | ({"reasons": dg.MetadataValue.table(rows)} if rows else {}),
    )


def one_filter_result(client: Client, group: str) -> dg.AssetCheckResult:
    """Find topics that consumers of a group receive with different filters."""
    mixed = client.describe_group(group).get("mixed_filters", {})
    rows = [
        dg.TableRecord({"topic": topic, "filter": each})
        for topic, filters in mixed.items()
        for each in filters
    ]
    return dg.AssetCheckResult(
        passed=not mixed,
        metadata={"topics": len(mixed)}
        | ({"filters": dg.MetadataValue.table(rows)} if rows else {}),
    )


def fallback_result(client: Client, job: str) -> dg.AssetCheckResult:
    """Check that the broker did none of this overdue work itself within the last hour."""
    from rmq_pipeline.orchestration import queries

    since_ms = int(client.due()["now_ms"]) - FALLBACK_HOURS * 3_600_000
    found = queries.fallbacks(client, job, since_ms=since_ms)
    metadata: dict[str, Any] = {"fallbacks": len(found), "hours": FALLBACK_HOURS}
    if found:
        metadata["last_at"] = dg.MetadataValue.timestamp(found[0]["at_ms"] / 1000)
    return dg.AssetCheckResult(passed=not found, metadata=metadata)


def dispatch_result(client: Client) -> dg.AssetCheckResult:
    """Check that dispatch has not stopped at a frame that the database refuses."""
    stuck = client.status().get("store", {}).get("stuck")
    return dg.AssetCheckResult(passed=not stuck, metadata={"stuck": stuck} if stuck else {})
