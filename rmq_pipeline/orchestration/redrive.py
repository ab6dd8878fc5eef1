"""Redrive of dead letters as a run: an asset whose config is the Launchpad's form."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import dagster as dg
from pydantic import Field

from rmq_pipeline.errors import NotFoundError, RequestError
from rmq_pipeline.orchestration import plot
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.dead_letters import dead_letter_key
from rmq_pipeline.orchestration.topic_assets import KIND
from rmq_pipeline.orchestration.upkeep_assets import GROUP
from rmq_pipeline.redriving import Plan, Report, manifest, manifest_query, redrive

NAME: Final = "redrive"
#: A run's metadata lists at most this many messages; the view of redrives has all.
_LISTED: Final = 100
#: Seconds before the first retry after a lost connection; the redrive keeps its id.
RETRY_S: Final = 5
_COLUMNS: Final = ("topic", "message_id", "first_outcome", "outcome")


class RedriveConfig(dg.Config):
    """Selection of dead letters to redrive, the rate, and when to stop."""

    consumer_group: str = Field(description="The group whose dead letters are redriven.")
    where: str = Field(
        default="",
        description=(
            "A SQL condition on the columns of the view dead_letters, such as "
            "signature = '3f0c8a1b2d4e' AND properties['region'] = 'east'. Empty: all that were "
            "not redriven yet."
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
        default=20, ge=1, description="Outcomes that are awaited before that share counts."
    )
    limit: int = Field(default=0, ge=0, description="At most this many messages; 0 for all.")
    patience_s: float = Field(
        default=120.0,
        ge=0,
        description="The run ends when it waits and no message was settled for this long.",
    )
    redrive_id: str = Field(
        default="",
        description=(
            "Of a redrive to go on with. Empty: a new one, named after this run; a retry or a "
            "re-execution of the run goes on with it."
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


class _Course:
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
        key=[GROUP, NAME],
        group_name=GROUP,
        kinds={KIND},
        description="Gives dead letters to their consumer group again, each once, in order.",
        output_required=False,
        retry_policy=dg.RetryPolicy(3, RETRY_S, backoff=dg.Backoff.EXPONENTIAL),
    )
    def run(
        context: dg.AssetExecutionContext, *, config: RedriveConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        redrive_id = config.redrive_id or f"run-{context.run.root_run_id or context.run.run_id}"
        course = _Course()
        with broker.client() as client:
            try:
                report = redrive(
                    client, config.plan(), redrive_id=redrive_id, on_progress=course.note
                )
            except (RequestError, NotFoundError) as error:
                raise dg.Failure(str(error), allow_retries=False) from error
            messages = manifest(client, redrive_id, limit=_LISTED).to_pylist()
        found = metadata(report, messages, chart=course.markdown())
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


def metadata(report: Report, messages: list[Mapping[str, Any]], *, chart: str) -> dict[str, Any]:
    """Return counts, the first messages with their outcomes, and a chart."""
    facts = report.facts()
    outcomes = facts.pop("outcomes")
    counts = [dg.TableRecord({"outcome": name, "messages": n}) for name, n in outcomes.items()]
    listed = [dg.TableRecord({name: row[name] or "" for name in _COLUMNS}) for row in messages]
    return {
        **facts,
        "outcomes": dg.MetadataValue.table(
            counts, _schema({"outcome": "string", "messages": "int"})
        ),
        "first_messages": dg.MetadataValue.table(
            listed, _schema(dict.fromkeys(_COLUMNS, "string"))
        ),
        "manifest": manifest_query(report.redrive_id),
        "chart": dg.MetadataValue.md(chart),
    }


def _schema(columns: Mapping[str, str]) -> dg.TableSchema:
    return dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns.items()])


def redrive_job() -> Any:
    """Return the job ``redrive``, which is started from the Launchpad."""
    return dg.define_asset_job(
        NAME,
        selection=dg.AssetSelection.assets(dg.AssetKey([GROUP, NAME])),
        description=(
            "Redrives dead letters of a consumer group, chosen by SQL, at a rate, in order; stops "
            "by itself when too many fail again. Retried or run again, it redrives nothing twice."
        ),
        executor_def=dg.in_process_executor,
    )
