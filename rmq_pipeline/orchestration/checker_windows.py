"""Windows of the transaction checkers in a code location without the background work.

The location with the background work has one window for all of its checkers. Elsewhere each checker
has a window of its own, named by its topic, when a check of the topic is due.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import dagster as dg

from rmq_pipeline import logs
from rmq_pipeline.errors import BusyError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.backoff import Backoff, skip_reason
from rmq_pipeline.orchestration.declarations import identifier
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.transaction_checker import (
    JOB,
    TransactionChecker,
    answer_counts,
    checking_job,
)
from rmq_pipeline.orchestration.upkeep_assets import (
    WindowConfig,
    op_name,
    say_yielded,
    window_tags,
)
from rmq_pipeline.orchestration.windows import AHEAD_MS, run_upkeep_window

INTERVAL_S: Final = 5
#: Most transactions end within this time. A younger half message starts no run ahead of its check.
SETTLED_MS: Final = 1_000
_UNDER_WAY: Final = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


def window_name(checker: TransactionChecker) -> str:
    """Return the name of a checker's windows, at the broker and in the tags of its runs.

    It contains the topic itself: ``identifier`` maps different topics to one name, and the topics
    of other locations are unknown here.
    """
    return f"{JOB}/{checker.topic.name}"


def job_name(checker: TransactionChecker) -> str:
    """Return the name of the job whose runs are a checker's windows."""
    return f"{JOB}_{identifier(checker.topic.name)}"


def checker_windows(checkers: Sequence[TransactionChecker]) -> dg.Definitions:
    """Return an asset and a job of each checker, and the sensor that starts their windows."""
    if not checkers:
        return dg.Definitions()
    jobs = {each.topic.name: _job(each) for each in checkers}
    return dg.Definitions(
        assets=[_asset(each) for each in checkers],
        jobs=list(jobs.values()),
        sensors=[checkers_sensor(checkers, jobs)],
    )


def _asset(checker: TransactionChecker) -> dg.AssetsDefinition:
    # Each such window also counts the due checks of all topics, as RocketMQ does without a producer
    # (docs/decisions/0107). The broker counts a check once.
    job = replace(checking_job([checker]), name=window_name(checker))

    @dg.multi_asset(name=op_name(job_name(checker)), specs=[checker.spec()])
    def window(
        context: dg.AssetExecutionContext, *, config: WindowConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        logs.set_up_library()
        with broker.client() as client:
            checker.topic.ensure(client)
            result = run_upkeep_window(
                client, job, owner=context.run.run_id, seconds=config.seconds, overtime=0.0
            )
        if result.yielded_to:
            say_yielded(context, checker.key, to=result.yielded_to)
            return
        counts = answer_counts(result, checker.topic.name)
        yield dg.MaterializeResult(
            asset_key=checker.key,
            metadata={
                "asked": sum(counts.values()),
                "epoch": result.epoch,
                "seconds": round(result.seconds, 1),
                **counts,
            },
        )

    return window


def _job(checker: TransactionChecker) -> Any:
    return dg.define_asset_job(
        job_name(checker),
        selection=dg.AssetSelection.assets(checker.key).without_checks(),
        description=f"One window of the checker of topic {checker.topic.name}.",
        tags=window_tags(window_name(checker)),
        executor_def=dg.in_process_executor,
    )


def checkers_sensor(
    checkers: Sequence[TransactionChecker], jobs: Mapping[str, Any]
) -> dg.SensorDefinition:
    """Return the sensor that starts a checker's window when a check of its topic is due.

    Any other window may count and offer the check as soon as it is due, so the sensor also starts a
    run for checks that are due by the time the run is up.

    Args:
        checkers: the checkers.
        jobs: by topic, the job whose runs are the windows of its checker.
    """

    @dg.sensor(
        name="transaction_checkers",
        jobs=list(jobs.values()),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=INTERVAL_S,
        description="Starts windows of the checkers whose topics have checks that are due.",
    )
    def transaction_checkers(
        context: dg.SensorEvaluationContext, broker: BrokerResource
    ) -> dg.SensorResult:
        try:
            with broker.client(retry_s=0.0) as client:
                counts = _due_checks(client)
        except BusyError as error:
            return dg.SensorResult(skip_reason=str(error))
        backoff = Backoff(context.instance)
        requests = [
            dg.RunRequest(
                job_name=job_name(each), tags={"rmq/reason": f"{counts[each.topic.name]} due"}
            )
            for each in checkers
            if counts.get(each.topic.name)
            and not _is_under_way(context.instance, window_name(each))
            and not backoff.holds(window_name(each))
        ]
        if not requests:
            return dg.SensorResult(skip_reason=skip_reason(backoff.reasons()))
        return dg.SensorResult(run_requests=requests)

    return transaction_checkers


def _due_checks(client: Client) -> dict[str, int]:
    """Return the number of due checks by topic; ask SQL only if a check of any topic is due."""
    from rmq_pipeline.orchestration import queries

    due = client.due()
    now_ms, next_ms = int(due["now_ms"]), due["jobs"][JOB]["next_due_ms"]
    if next_ms is None or next_ms > now_ms + AHEAD_MS:
        return {}
    return queries.due_checks(client, now_ms=now_ms, ahead_ms=AHEAD_MS, settled_ms=SETTLED_MS)


def _is_under_way(instance: dg.DagsterInstance, name: str) -> bool:
    """Return True if a run has the window or will open it; a lost run ends with its time limit."""
    runs = dg.RunsFilter(tags=window_tags(name), statuses=_UNDER_WAY)
    return instance.get_runs_count(runs) > 0
