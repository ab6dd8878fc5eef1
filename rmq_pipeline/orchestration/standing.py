"""Detection of consumers and upkeep that are down: none of their checks may be green.

While nothing is done, nothing is lost or out of order, so the checks would pass. Only a working
consumer or upkeep may pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import dagster as dg

from rmq_pipeline.failure import Failure
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG

#: A consumer counts as failing after this many failed deliveries without a later acknowledgement.
FAILURES: Final = 2
#: It no longer counts as failing if its last failure is older than this.
FAILING_MS: Final = 3_600_000
#: Metadata key: why the checks are red.
DOWN: Final = "down"
_ENDED: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE)


@dataclass(frozen=True)
class Down:
    """Why a consumer or a kind of upkeep is down."""

    #: One of a few texts: an unchanged kind is not reported again.
    kind: str
    #: Explanation, and remedy.
    said: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Standing:
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

    def look(self, client: Client, group: str, *, since_ms: int) -> "Standing":
        """Return a copy with the events since the last look, at the earliest since ``since_ms``."""
        from rmq_pipeline.orchestration import queries

        ended = queries.endings(client, group, since_ms=since_ms, position=self.position)
        if self.position >= 0 and ended["created_at_ms"] != self.created_at_ms:
            return Standing().look(client, group, since_ms=since_ms)
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


def look(
    instance: dg.DagsterInstance,
    client: Client,
    *,
    window: str,
    group: str = "",
    before: Standing | None = None,
) -> tuple[Down | None, Standing]:
    """Return why nothing gets done, or None if all is well; and the standing for the next look.

    Args:
        instance: has the runs.
        client: client of the broker.
        window: the tag WINDOW_TAG of the runs.
        group: the consumer group; empty for upkeep.
        before: standing that the last look returned.
    """
    now = before or Standing()
    if group:
        since_ms = int(client.due()["now_ms"]) - FAILING_MS
        now = now.look(client, group, since_ms=since_ms)
        if now.failures >= FAILURES and now.failed_at_ms >= since_ms:
            return _failing(now), now
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


def _failing(now: Standing) -> Down:
    reason = Failure.from_json(now.detail).reason or "no reason was given"
    said = (
        f"No delivery succeeds: {now.failures} failed since the last acknowledgement."
        f" The last failure: {reason}. Mend the handler; the messages come again by themselves."
    )
    return Down("no delivery succeeds", said, {"failures": now.failures, "last_failure": reason})


def _failed_window(
    instance: dg.DagsterInstance, window: str, *, now: Standing
) -> tuple[Down | None, Standing]:
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
        f"The last window failed: run {last.run_id}. Its log has the error; once that is mended,"
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
