"""``replay_<consumer>``: an asset on the grid of the topic's log; its backfills are replays.

Work done under a replay's id is not repeated. The runs of a backfill share its id. Dagster drops
the backfill's tags when a run of an ended backfill is re-executed. A re-executed backfill gets a
new id. A run therefore stores its id in a tag of its own, which re-executions inherit. It also
looks for the id in its ancestors.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace as changed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pyarrow as pa
from pydantic import Field

from rmq_pipeline import checked_parquet
from rmq_pipeline.errors import NotFoundError, RequestError
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.declarations import KIND, identifier
from rmq_pipeline.orchestration.resources import BrokerResource, LazyPySparkResource, SinkResource
from rmq_pipeline.orchestration.topic_log import log_key, log_partitions
from rmq_pipeline.spark.consumer import ConsumerSpec
from rmq_pipeline.spark.replay.effects import CHANGE, COPIES
from rmq_pipeline.spark.replay.plan import ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.publishing import TopicPlan, publish_again
from rmq_pipeline.spark.replay.run import replay
from rmq_pipeline.spark.session import prepare_environment
from rmq_pipeline.storage.root import Address, shown

#: Tag ``rmq/replay_mode`` sets ``mode``, and so on: the dialog of a backfill offers only tags.
TAG_PREFIX: Final = "rmq/replay_"
#: Written by the run itself, and inherited by its re-executions.
REPLAY_ID_TAG: Final = "rmq/replay_id"
#: The first backfill of a chain of re-executions, and the run's own backfill.
_BACKFILL_TAGS: Final = ("dagster/root_backfill_id", "dagster/backfill")
#: Maximum number of ancestors examined.
_GENERATIONS: Final = 100
#: Seconds before the first retry: after a lost connection, or a race with a sink's compaction.
RETRY_S: Final = 5
#: Maximum rows of a table in metadata; the reports contain all rows.
_LISTED: Final = 50
_MODES: Final = ("dry_run", "replace", "side_sink", "side_topic")


class ReplayConfig(dg.Config):
    """Mode and settings of a replay."""

    mode: str = Field(
        default="dry_run",
        description=(
            "dry_run: report the changes and make none. replace: replace the rows of the same hours"
            " in the consumer's sink. side_sink: write the rows into another folder."
            " side_topic: send the messages into another topic, without a handler."
        ),
    )
    side_sink: str = Field(
        default="", description="Mode side_sink: the folder; a relative one lies among the sinks."
    )
    partitions_match: bool = Field(
        default=False,
        description=(
            "The hours of the sink hold rows of messages of the same hours alone, though the names"
            " of their times differ."
        ),
    )
    tries: int = Field(
        default=1, ge=1, description="Calls of a message before its failure is final."
    )
    publish: bool = Field(
        default=False,
        description=(
            "Modes replace and side_sink: send the messages that the handler publishes, to topics"
            " that drop repeated message ids."
        ),
    )
    parallelism: int = Field(default=2, ge=1, description="Spark tasks, at least.")
    side_topic: str = Field(
        default="", description="Mode side_topic: the topic; created if missing."
    )
    filter: str = Field(
        default="*", description="Mode side_topic: which messages, as for receive; * for all."
    )
    filter_type: str = Field(default="tag", description="Of the filter: tag or sql92.")
    rate_per_s: float = Field(
        default=0.0, ge=0, description="Mode side_topic: messages per second; 0 for no limit."
    )
    ttl_ms: int = Field(
        default=86_400_000,
        ge=0,
        description="Mode side_topic: retention of its sealed messages; 0: no limit.",
    )
    replay_id: str = Field(
        default="",
        description=(
            "A replay with the same id is done once. Empty: the id of the backfill, else of the"
            " run, which a retry or a re-execution shares."
        ),
    )

    def tagged(self, tags: Mapping[str, str]) -> "ReplayConfig":
        """Return this config with the values given in tags of the run.

        Raises:
            ValueError: a tag has an invalid value.
        """
        said: dict[str, Any] = {
            name: tags[f"{TAG_PREFIX}{name}"]
            for name in type(self).model_fields
            if f"{TAG_PREFIX}{name}" in tags
        }
        return type(self)(**{**self.model_dump(), **said}) if said else self


def keep_replay_id(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Return the id of a run's replay, and store it in the run's tags.

    Raises:
        LookupError: the run re-executes a deleted run, and no ancestor has the id.
    """
    found = replay_id_of(instance, run)
    instance.add_run_tags(run.run_id, {REPLAY_ID_TAG: found})
    return found


def replay_id_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str:
    """Return the id of a run's replay: the id of its first run or backfill.

    Raises:
        LookupError: the run re-executes a deleted run, and no ancestor has the id.
    """
    last = run
    for each in _descent(instance, run):
        last = each
        for tag in (REPLAY_ID_TAG, *_BACKFILL_TAGS):
            if said := each.tags.get(tag):
                return said
    if last.parent_run_id or last.root_run_id:
        raise LookupError(
            f"This run re-executes run {last.parent_run_id or last.root_run_id}, which was deleted,"
            " so the id of its replay is unknown and the replay could be made twice. Set replay_id:"
            " the id of the first run or backfill to have it made once, or a new one to have it"
            " made again."
        )
    return last.run_id


def _descent(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Iterator[dg.DagsterRun]:
    """Yield the run, its parent, and so on; the root replaces a deleted parent."""
    at: dg.DagsterRun | None = run
    for _ in range(_GENERATIONS):
        if at is None:
            return
        yield at
        parent = _run_of(instance, at.parent_run_id)
        root = at.root_run_id if at.root_run_id != at.parent_run_id else None
        at = parent or _run_of(instance, root)


def _run_of(instance: dg.DagsterInstance, run_id: str | None) -> dg.DagsterRun | None:
    return None if run_id is None else instance.get_run_by_id(run_id)


def replay_key(group: str) -> dg.AssetKey:
    """Return the key of the asset that replays a consumer."""
    return dg.AssetKey(f"replay_{identifier(group)}")


def replay_asset(consumer: Consumer) -> dg.AssetsDefinition:
    """Return the asset whose backfill replays hours of the consumer's topic in one run."""
    with warnings.catch_warnings():
        # A single-run backfill policy is the only way, and warns on each use.
        warnings.simplefilter("ignore", dg.BetaWarning)
        return _asset(consumer)


def _asset(consumer: Consumer) -> dg.AssetsDefinition:
    spec, topic = consumer.spec, consumer.group.topic

    @dg.asset(
        key=replay_key(spec.group),
        deps=[log_key(topic)],
        partitions_def=log_partitions(topic),
        backfill_policy=dg.BackfillPolicy.single_run(),
        kinds={KIND, "pyspark"},
        description=(
            f"Processes hours of {topic.name} with the handler of {spec.group} again: a dry run, or"
            " rows for its sink, another sink or a topic. The group is not affected."
        ),
        metadata={"topic": spec.topic, "consumer_group": spec.group},
        output_required=False,
        # Safe to retry: work that was done under its id is not repeated.
        retry_policy=dg.RetryPolicy(2, RETRY_S, backoff=dg.Backoff.EXPONENTIAL),
    )
    def run(
        context: dg.AssetExecutionContext,
        *,
        config: ReplayConfig,
        broker: BrokerResource,
        sinks: SinkResource,
        spark: LazyPySparkResource,
    ) -> Iterator[dg.MaterializeResult[Any]]:
        prepare_environment(spark.spark_config)
        task = _ReplayRun(context, config.tagged(context.run.tags), spec=spec, sinks=sinks)
        try:
            with broker.client() as client:
                found = task.metadata(client, lambda: spark.spark_session)
        except (RequestError, NotFoundError) as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        if task.config.mode == "dry_run":
            # No materialization: a dry run replays nothing, and the grid must not show the hours as
            # replayed.
            context.log_event(dg.AssetObservation(replay_key(spec.group), metadata=found))
            return
        if task.config.mode == "replace":
            context.log_event(dg.AssetObservation(consumer.key, metadata=found))
        yield dg.MaterializeResult(metadata=found)

    return run


class _ReplayRun:
    """One run of the asset."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        config: ReplayConfig,
        *,
        spec: ConsumerSpec,
        sinks: SinkResource,
    ) -> None:
        self._context, self.config, self._sinks = context, config, sinks
        if config.mode not in _MODES:
            said = f"mode must be one of {', '.join(_MODES)}, not {config.mode!r}."
            raise dg.Failure(said, allow_retries=False)
        sink = None if spec.sink is None else sinks.folder(spec.sink)
        self._spec = changed(spec, sink=sink)
        window = context.partition_time_window
        self._from_ms, self._to_ms = _ms(window.start), _ms(window.end)
        try:
            self._replay_id = config.replay_id or keep_replay_id(context.instance, context.run)
        except LookupError as error:
            raise dg.Failure(str(error), allow_retries=False) from error

    def metadata(self, client: Any, spark: Any) -> dict[str, Any]:
        """Carry out the replay, and return the metadata of the materialization."""
        if self.config.mode == "side_topic":
            done = publish_again(
                self._topic_plan(), client, spark=spark, on_progress=self._progress
            )
            return {"mode": "side_topic", "replay_id": self._replay_id, **done.facts()}
        report = replay(self._plan(), client, spark=spark, on_progress=self._progress)
        return metadata(report)

    def _folder(self) -> Address:
        return self._sinks.folder(f"_replays/{identifier(self._spec.group)}")

    def _local_folder(self) -> Path:
        folder = self._folder()
        if isinstance(folder, str):
            raise dg.Failure(
                "Spark sorts the messages of mode side_topic in files that it writes itself, so"
                f" {shown(folder)} is no place for them. Set RMQ_SINKS of this run to a folder.",
                allow_retries=False,
            )
        return folder

    def _plan(self) -> ReplayPlan:
        config = self.config
        # A dry run accepts the config of the real replay, but needs less of it.
        dry = config.mode == "dry_run"
        side = self._sinks.folder(config.side_sink) if config.side_sink and not dry else None
        return ReplayPlan(
            spec=self._spec,
            from_ms=self._from_ms,
            to_ms=self._to_ms,
            mode=config.mode,  # type: ignore[arg-type]  # checked against _MODES
            replay_id=self._replay_id,
            folder=self._folder(),
            side_sink=side,
            tries=config.tries,
            partitions_match=config.partitions_match,
            publish=config.publish and not dry,
            parallelism=config.parallelism,
        )

    def _topic_plan(self) -> TopicPlan:
        config = self.config
        return TopicPlan(
            topic=self._spec.topic,
            from_ms=self._from_ms,
            to_ms=self._to_ms,
            side_topic=config.side_topic,
            filter=config.filter,
            filter_type=config.filter_type,
            rate_per_s=config.rate_per_s,
            ttl_ms=config.ttl_ms,
            replay_id=self._replay_id,
            folder=self._local_folder(),
        )

    def _progress(self, what: str, facts: Mapping[str, Any]) -> None:
        said = ", ".join(f"{name} {value:,}" for name, value in facts.items())
        self._context.log.info("%s: %s", what, said)


def metadata(report: ReplayReport) -> dict[str, Any]:
    """Return the metadata of a replay: the most important facts first, then the other counts."""
    facts = report.facts()
    facts |= {name: round(facts[name], 1) for name in ("spark_s", "seconds")}
    found: dict[str, Any] = {
        "range": f"{_text(report.from_ms)} to {_text(report.to_ms)}",
        "mode": facts.pop("mode"),
        "messages": facts.pop("messages"),
        "failed": facts.pop("failed"),
    }
    if report.mode == "dry_run":
        found |= _differences(report)
    found["later_partitions"] = ", ".join(report.later) or "none"
    if report.behind_rows:
        found["rows_behind"] = _partitions(report.behind_rows)
    if report.not_published:
        found["not_published"] = dict(report.not_published)
    if report.published:
        found["published"] = dict(report.published)
    walked = report.messages + report.warm_up + report.behind
    found["messages_per_second"] = round(walked / max(report.spark_s, 1e-3), 1)
    facts |= {name: shown(facts[name]) for name in ("rows_report", "outcomes_report")}
    return {**found, **{name: value for name, value in facts.items() if value != ""}}


def _differences(report: ReplayReport) -> dict[str, Any]:
    """Return the differences found by a dry run."""
    found: dict[str, Any] = {
        "rows_added": report.rows_added,
        "rows_removed": report.rows_removed,
        "outcomes_changed": report.outcomes.num_rows,
    }
    if report.changed:
        found["changed_partitions"] = _partitions(report.changed)
        found["rows_changed"] = _table(_in_a_line(_first_rows(report.rows_report)))
    if report.outcomes.num_rows:
        found["outcomes"] = _table(report.outcomes)
    return found


def _partitions(rows: Mapping[str, int]) -> dg.TableMetadataValue:
    listed = {"partition": list(rows), "rows": list(rows.values())}
    return _table(pa.table(listed))


def _first_rows(path: str) -> pa.Table:
    with checked_parquet.open_file(path) as file:
        for batch in file.iter_batches(_LISTED):
            return pa.Table.from_batches([batch])
        return file.schema_arrow.empty_table()


def _in_a_line(rows: pa.Table) -> pa.Table:
    """Return each row as one text, because the UI has no space for the columns of a sink."""
    columns = rows.drop_columns([CHANGE, COPIES])
    texts = [
        ", ".join(f"{name} {_cell(value)}" for name, value in row.items() if value is not None)
        for row in columns.to_pylist()
    ]
    return rows.select([CHANGE, COPIES]).append_column("row", pa.array(texts, pa.string()))


def _table(rows: pa.Table) -> dg.TableMetadataValue:
    schema = dg.TableSchema(
        columns=[dg.TableColumn(each.name, str(each.type)) for each in rows.schema]
    )
    records = [
        dg.TableRecord({name: _cell(value) for name, value in row.items()})
        for row in rows.slice(0, _LISTED).to_pylist()
    ]
    return dg.MetadataValue.table(records, schema)


def _cell(value: Any) -> str | int | float | bool:
    if isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None else str(value)


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _text(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
