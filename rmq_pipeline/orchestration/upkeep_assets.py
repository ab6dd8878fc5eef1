"""Assets of the broker's background work: each materialization reports one window."""

from collections.abc import Iterator
from typing import Any, Final

import dagster as dg

from rmq_pipeline import logs
from rmq_pipeline.orchestration import plot
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.topic_assets import KIND
from rmq_pipeline.orchestration.windows import (
    OVERTIME_S,
    WINDOW_S,
    Slice,
    UpkeepJob,
    WindowResult,
    run_upkeep_window,
)

GROUP: Final = "upkeep"
WINDOW_TAG: Final = "rmq/window"
#: Maximum runtime of a window: 10 minutes, plus the time to start and end. A run that exceeds it is
#: lost, and Dagster has no other sign of that. Other jobs have no limit.
WINDOW_MAX_S: Final = 1200
YIELDED_TAG: Final = "rmq/yielded_to"
#: Tag of a consumer's run that succeeded without an acked message.
NOTHING_ACKED_TAG: Final = "rmq/nothing_acked"


class WindowConfig(dg.Config):
    """Settings of one run of a window."""

    seconds: float = WINDOW_S
    #: A busy window waits this much longer for its successor.
    overtime_seconds: float = OVERTIME_S
    #: Epoch of the open window to take over from; the run yields to any other open window.
    hand_over_from: int = 0


def asset_key(job: str) -> dg.AssetKey:
    """Return the key of the asset of a kind of work."""
    return dg.AssetKey([GROUP, job])


def op_name(job: str) -> str:
    """Return the name of its op, for run config."""
    return asset_key(job).to_python_identifier()


def upkeep_asset(job: UpkeepJob) -> dg.AssetsDefinition:
    """Return the asset whose run is a window of this kind of work."""

    @dg.asset(
        key=asset_key(job.name),
        group_name=GROUP,
        kinds={KIND},
        description=job.description,
        output_required=False,
    )
    def window(
        context: dg.AssetExecutionContext, *, config: WindowConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        result = run_window(context, job, config=config, broker=broker)
        if not result.yielded_to:
            yield dg.MaterializeResult(metadata=metadata(job, result))

    return window


def run_window(
    context: dg.AssetExecutionContext,
    job: UpkeepJob,
    *,
    config: WindowConfig,
    broker: BrokerResource,
) -> WindowResult:
    """Do a window's work in a run, with observations; yield if another window is open."""
    logs.set_up_library()

    def observe(done: Slice) -> None:
        if done.work:
            observation = {"at_s": round(done.at_s, 1), **shown(done.report)}
            context.log_event(dg.AssetObservation(asset_key(job.name), metadata=observation))

    with broker.client() as client:
        result = run_upkeep_window(
            client,
            job,
            owner=context.run.run_id,
            seconds=config.seconds,
            overtime=config.overtime_seconds,
            hand_over_from=config.hand_over_from,
            observe=observe,
        )
    if result.yielded_to:
        say_yielded(context, asset_key(job.name), to=result.yielded_to)
    return result


def say_yielded(context: dg.AssetExecutionContext, key: dg.AssetKey, *, to: str) -> None:
    """End a run as a success that explains why it did nothing: no materialization, no checks."""
    context.log.info("The window belongs to %s.", to)
    context.log_event(dg.AssetObservation(key, metadata={"yielded_to": to}))
    context.instance.add_run_tags(context.run.run_id, {YIELDED_TAG: to})


def window_tags(name: str) -> dict[str, str]:
    """Return the tags of a job whose runs are windows: they limit the number and time of runs."""
    return {WINDOW_TAG: name, dg.MAX_RUNTIME_SECONDS_TAG: str(WINDOW_MAX_S)}


def upkeep_job(job: UpkeepJob, *others: dg.AssetKey) -> Any:
    """Return the job of the same name, with the tag that limits its runs.

    Args:
        job: the kind of work.
        others: further assets that its window materializes.
    """
    return dg.define_asset_job(
        job.name,
        selection=dg.AssetSelection.assets(asset_key(job.name), *others).without_checks(),
        description=job.description,
        tags=window_tags(job.name),
        executor_def=dg.in_process_executor,
    )


def shown(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report's facts as metadata; facts without a value are omitted."""
    return {key: value for key, value in report.items() if value is not None}


def metadata(job: UpkeepJob, result: WindowResult) -> dict[str, Any]:
    """Return the metadata of a window's materialization: totals, rate, and a chart."""
    found: dict[str, Any] = {
        "epoch": result.epoch,
        "seconds": round(result.seconds, 1),
        "slices": len(result.slices),
        "handed_over": result.handed_over,
        **{key: result.total(key) for key in job.counts},
    }
    if result.seconds:
        found["per_second"] = round(result.work / result.seconds, 1)
    if levels := result.per_level():
        found["per_level"] = levels
    if lateness := result.lateness_ms():
        found |= {f"lateness_{name}_ms": value for name, value in lateness.items()}
    if result.slices:
        found["chart"] = dg.MetadataValue.md(plot.markdown(_panels(result)))
    return found


def _panels(result: WindowResult) -> list[plot.Series]:
    ends = [one.at_s for one in result.slices]
    lengths = [end - begin for begin, end in zip([0.0, *ends[:-1]], ends, strict=True)]
    rates = [s.work / max(length, 1e-3) for s, length in zip(result.slices, lengths, strict=True)]
    panels = [plot.Series("done per second", ends, rates)]
    late = [
        (s.at_s, float((s.report.get("lateness_ms") or {}).get("max") or 0))
        for s in result.slices
        if s.work
    ]
    if any("lateness_ms" in s.report for s in result.slices) and late:
        seconds, values = zip(*late, strict=True)
        panels.append(plot.Series("latest delivery, ms late", seconds, values, color="#d1532c"))
    return panels
