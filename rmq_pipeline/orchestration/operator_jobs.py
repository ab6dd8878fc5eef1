"""Jobs for operators: redrive, unpark, and the nightly deletion of old runs."""

import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pyarrow as pa
from pydantic import Field

from rmq_pipeline.errors import NotFoundError, RequestError
from rmq_pipeline.orchestration import plot
from rmq_pipeline.orchestration.declarations import KIND, dead_letter_key
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import GROUP
from rmq_pipeline.redriving import Plan, Report, manifest, manifest_query, redrive

REDRIVE: Final = "redrive"
#: A run's metadata lists at most this many messages; the view of redrives has all.
_LISTED_MESSAGES: Final = 100
#: Seconds before the first retry after a lost connection; the redrive keeps its id.
REDRIVE_RETRY_S: Final = 5
_REDRIVEN_COLUMNS: Final = ("topic", "message_id", "first_outcome", "outcome")
UNPARK: Final = "unpark"
_PARKED_COLUMNS: Final = ("topic", "message_group", "queue_id", "queue_offset", "waiting", "reason")
KEEP_DAYS: Final = 7
PURGE: Final = "purge_runs"
#: Deleting a run takes about 10 ms; the rest waits for the next purge.
MOST_RUNS: Final = 50_000
_RUNS_PER_PAGE: Final = 500
_FINISHED: Final = (
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)


class RedriveConfig(dg.Config):
    """Selection of dead letters to redrive, the rate, and when to stop."""

    consumer_group: str = Field(description="The consumer group of the dead letters.")
    where: str = Field(
        default="",
        description=(
            "A SQL condition on the columns of the view dead_letters, such as "
            "signature = '3f0c8a1b2d4e' AND properties['region'] = 'east'. Empty: all without "
            "a redrive."
        ),
    )
    filter: str = Field(
        default="",
        description="A SQL92 filter on the messages, such as region = 'east'. Empty: all.",
    )
    rate_per_s: float = Field(default=0.0, ge=0, description="Messages per second; 0 for no limit.")
    max_failed_share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="The run stops when a larger share than this fails again.",
    )
    minimum: int = Field(
        default=20, ge=1, description="Outcomes to wait for before the share is compared."
    )
    limit: int = Field(default=0, ge=0, description="At most this many messages; 0 for all.")
    patience_s: float = Field(
        default=120.0,
        ge=0,
        description="The run ends if no message is settled for this long while it waits.",
    )
    redrive_id: str = Field(
        default="",
        description=(
            "Id of a redrive to continue. Empty: a new one, named after this run; a retry or a "
            "re-execution of the run continues it."
        ),
    )

    def plan(self) -> Plan:
        """Return the plan of the redrive."""
        return Plan(
            group=self.consumer_group,
            where=self.where,
            filter=self.filter,
            rate_per_s=self.rate_per_s,
            max_failed_share=self.max_failed_share,
            minimum=self.minimum,
            limit=self.limit,
            patience_s=self.patience_s,
        )


class _OutcomeChart:
    """Outcomes over time, for the chart."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.acked: list[float] = []
        self.failed: list[float] = []

    def note(self, report: Report) -> None:
        """Add a point if the counts have changed."""
        acked = report.decided - report.failed
        known = (self.acked[-1], self.failed[-1]) if self.acked else None
        if known != (acked, report.failed):
            self.seconds.append(report.seconds)
            self.acked.append(acked)
            self.failed.append(report.failed)

    def markdown(self) -> str:
        """Return the chart in Markdown."""
        return plot.markdown(
            [
                plot.Series("acked at once", self.seconds, self.acked),
                plot.Series("failed again", self.seconds, self.failed, color="#d1532c"),
            ]
        )


def redrive_asset() -> dg.AssetsDefinition:
    """Return the asset whose run is a redrive; each materialization reports its outcomes."""

    @dg.asset(
        key=[GROUP, REDRIVE],
        group_name=GROUP,
        kinds={KIND},
        description="Delivers dead letters to their consumer group again, each once, in order.",
        output_required=False,
        retry_policy=dg.RetryPolicy(3, REDRIVE_RETRY_S, backoff=dg.Backoff.EXPONENTIAL),
    )
    def run(
        context: dg.AssetExecutionContext, *, config: RedriveConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        redrive_id = config.redrive_id or f"run-{context.run.root_run_id or context.run.run_id}"
        course = _OutcomeChart()
        with broker.client() as client:
            try:
                report = redrive(
                    client, config.plan(), redrive_id=redrive_id, on_progress=course.note
                )
            except (RequestError, NotFoundError) as error:
                raise dg.Failure(str(error), allow_retries=False) from error
            messages = manifest(client, redrive_id, limit=_LISTED_MESSAGES).to_pylist()
        found = redrive_metadata(report, messages, chart=course.markdown())
        letters = dead_letter_key(config.consumer_group)
        context.log_event(dg.AssetObservation(letters, metadata=found))
        if report.status == "stopped":
            raise dg.Failure(
                f"{report.failed} of {report.decided} messages failed again: redrive stopped after"
                f" {report.redriven} of {report.chosen}.",
                metadata=found,
                allow_retries=False,
            )
        if report.status == "waiting":
            context.log.warning(
                "%s messages have no outcome yet: does %s run?",
                report.outcomes.get("waiting", 0),
                config.consumer_group,
            )
        yield dg.MaterializeResult(metadata=found)

    return run


def redrive_metadata(
    report: Report, messages: list[Mapping[str, Any]], *, chart: str
) -> dict[str, Any]:
    """Return counts, the first messages with their outcomes, and a chart."""
    facts = report.facts()
    outcomes = facts.pop("outcomes")
    counts = [dg.TableRecord({"outcome": name, "messages": n}) for name, n in outcomes.items()]
    listed = [
        dg.TableRecord({name: row[name] or "" for name in _REDRIVEN_COLUMNS}) for row in messages
    ]
    return {
        **facts,
        "outcomes": dg.MetadataValue.table(
            counts, _table_schema({"outcome": "string", "messages": "int"})
        ),
        "first_messages": dg.MetadataValue.table(
            listed, _table_schema(dict.fromkeys(_REDRIVEN_COLUMNS, "string"))
        ),
        "manifest": manifest_query(report.redrive_id),
        "chart": dg.MetadataValue.md(chart),
    }


def _table_schema(columns: Mapping[str, str]) -> dg.TableSchema:
    return dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()])


def redrive_job() -> Any:
    """Return the job ``redrive``, which is started from the Launchpad."""
    return dg.define_asset_job(
        REDRIVE,
        selection=dg.AssetSelection.assets(dg.AssetKey([GROUP, REDRIVE])),
        description=(
            "Redrives dead letters of a consumer group, chosen by SQL, at a rate, in order; stops "
            "by itself when too many fail again. A retry redrives no dead letter twice."
        ),
        executor_def=dg.in_process_executor,
    )


class UnparkConfig(dg.Config):
    """Selection of messages to unpark, and whether the failed ones are retried."""

    consumer_group: str = Field(description="The group that has parked messages.")
    topic: str = Field(default="", description="Topic of the parked messages; empty: all.")
    message_groups: list[str] = Field(
        default=[], description="These message groups; empty: all, and messages without one."
    )
    skip: bool = Field(
        default=False,
        description="Send the failed messages to the dead letters and go on behind them.",
    )


def unpark_asset() -> dg.AssetsDefinition:
    """Return the asset whose run unparks; its materialization shows what was parked, and why."""

    @dg.asset(
        key=[GROUP, UNPARK],
        group_name=GROUP,
        kinds={KIND},
        description="Delivers parked messages again, in order, with the messages behind them.",
    )
    def run(
        context: dg.AssetExecutionContext, *, config: UnparkConfig, broker: BrokerResource
    ) -> dg.MaterializeResult[Any]:
        from rmq_pipeline.orchestration import queries

        names = config.message_groups
        chosen = pa.table({"message_group": pa.array(names, pa.string())}) if names else None
        topic = config.topic or None
        with broker.client() as client:
            before = queries.parked(client, config.consumer_group)
            try:
                done = client.unpark(
                    config.consumer_group, topic=topic, message_groups=chosen, skip=config.skip
                )
            except (RequestError, NotFoundError) as error:
                raise dg.Failure(str(error), allow_retries=False) from error
        meant = [
            row
            for row in before
            if topic in (None, row["topic"]) and (not names or row["message_group"] in names)
        ]
        context.log.info("unparked %s", done)
        return dg.MaterializeResult(
            metadata={
                **done,
                "consumer_group": config.consumer_group,
                "parked": _parked_table(meant),
            }
        )

    return run


def _parked_table(rows: list[dict[str, Any]]) -> dg.MetadataValue[Any]:
    """Return the table of messages that were parked when the run began."""
    numbers = {"queue_id", "queue_offset", "waiting"}
    columns = [
        dg.TableColumn(name, "int" if name in numbers else "string") for name in _PARKED_COLUMNS
    ]
    records = [
        dg.TableRecord({name: "" if row[name] is None else row[name] for name in _PARKED_COLUMNS})
        for row in rows
    ]
    return dg.MetadataValue.table(records, dg.TableSchema(columns=columns))


def unpark_job() -> Any:
    """Return the job ``unpark``, which is started from the Launchpad."""
    return dg.define_asset_job(
        UNPARK,
        selection=dg.AssetSelection.assets(dg.AssetKey([GROUP, UNPARK])),
        description=(
            "Unparks messages of a consumer group: the failed ones first, from their first attempt "
            "on, or skipped; then the messages behind them. It also lifts quarantines."
        ),
        executor_def=dg.in_process_executor,
    )


class PurgeConfig(dg.Config):
    """Age limits of the runs to keep."""

    keep_days: float = KEEP_DAYS
    #: Failed runs are kept this many times longer.
    keep_failed_factor: float = 4


def purge_asset() -> dg.AssetsDefinition:
    """Return the asset whose run deletes old runs with their events and captured output."""

    @dg.asset(
        key=[GROUP, PURGE],
        group_name=GROUP,
        kinds={"dagster"},
        description="Deletes finished runs that are older than a week, failed ones after four.",
    )
    def purge(context: dg.AssetExecutionContext, config: PurgeConfig) -> dg.MaterializeResult[Any]:
        now = datetime.now(UTC)
        keep = timedelta(days=config.keep_days)
        instance = context.instance
        done = purge_runs(instance, statuses=_FINISHED[:1] + _FINISHED[2:], before=now - keep)
        failed = purge_runs(
            instance, statuses=_FINISHED[1:2], before=now - keep * config.keep_failed_factor
        )
        left = instance.get_runs_count()
        return dg.MaterializeResult(
            metadata={"deleted": done, "deleted_failed": failed, "left": left}
        )

    return purge


def purge_runs(
    instance: dg.DagsterInstance,
    *,
    statuses: tuple[dg.DagsterRunStatus, ...],
    before: datetime,
    limit: int = MOST_RUNS,
) -> int:
    """Delete runs with these statuses that were created before a time; return their number."""
    filters = dg.RunsFilter(statuses=list(statuses), created_before=before)
    deleted = 0
    while deleted < limit:
        page = instance.get_runs(filters, limit=min(_RUNS_PER_PAGE, limit - deleted))
        if not page:
            break
        for run in page:
            instance.delete_run(run.run_id)
            _delete_output(instance, run.run_id)
        deleted += len(page)
    return deleted


def _delete_output(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete the output of a run, which Dagster does not delete with the run."""
    folder = Path(instance.storage_directory()) / run_id
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def purge_job() -> Any:
    """Return the job that purges."""
    return dg.define_asset_job(
        PURGE,
        selection=dg.AssetSelection.assets(dg.AssetKey([GROUP, PURGE])),
        executor_def=dg.in_process_executor,
        description="Deletes old runs and their events from Dagster's own storage.",
    )


def purge_schedule() -> dg.ScheduleDefinition:
    """Return the schedule: every night at four, running from the start."""
    return dg.ScheduleDefinition(
        name=f"{PURGE}_nightly",
        job_name=PURGE,
        cron_schedule="0 4 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
