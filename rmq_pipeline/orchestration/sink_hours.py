"""``sink_hours/<group>``: the hours of a consumer's sink, as partitions of an external asset.

A window's run has no partition, because it handles messages of any hour. At its end it reports the
hours whose files have changed since the last report, with their present row counts.
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.topic_assets import KIND, DeclaredTopic, identifier
from rmq_pipeline.orchestration.topic_log import log_partitions

if TYPE_CHECKING:
    from rmq_pipeline.orchestration.consumer import Consumer

#: One window reports about this many hours; each is an event in Dagster's storage.
HOURS_PER_WINDOW: Final = 500
#: Metadata key: the version of the sink that was reported.
VERSION: Final = "sink_version"
#: Format of a partition in sinks.
_HOUR: Final = "%Y-%m-%dT%H"


def hours_key(group: str) -> dg.AssetKey:
    """Return the key of the asset of a sink's hours."""
    return dg.AssetKey(["sink_hours", identifier(group)])


def hours_spec(consumer: "Consumer") -> dg.AssetSpec:
    """Return the external asset of a sink's hours, on the grid of its topic's log."""
    spec = consumer.spec
    return dg.AssetSpec(
        hours_key(spec.group),
        deps=[consumer.key],
        partitions_def=log_partitions(consumer.group.topic),
        description=f"Hours of the sink of {spec.group}, by {spec.partition_time}.",
        kinds={KIND, "parquet"},
        metadata={"consumer_group": spec.group, "partition_time": spec.partition_time},
    )


def report(
    context: dg.AssetExecutionContext, client: Client, *, group: str, topic: DeclaredTopic
) -> int:
    """Report the hours of a sink that have changed since the last report; return their number.

    Args:
        context: context of a window's run.
        client: client of the broker.
        group: the sink's consumer group.
        topic: defines the grid; hours outside it are omitted.
    """
    from rmq_pipeline.orchestration import queries

    key = hours_key(group)
    grid = log_partitions(topic)
    after = _reported(context.instance, key)
    found = queries.changed_sink_hours(client, group, after=after)
    placed = [(hour, _on_grid(hour["partition"], grid)) for hour in found]
    hours = [(hour, partition) for hour, partition in placed if partition is not None]
    for number, (hour, partition) in enumerate(hours):
        following = hours[number + 1][0]["newest"] if number + 1 < len(hours) else None
        is_last = following != hour["newest"]
        # A version counts as reported only after its last hour: the run may be killed between two
        # hours.
        metadata = _metadata(hour, version=hour["newest"] if is_last else after)
        context.log_event(dg.AssetMaterialization(key, partition=partition, metadata=metadata))
        if is_last:
            after = hour["newest"]
            if number + 1 >= HOURS_PER_WINDOW:
                return number + 1
    return len(hours)


def _reported(instance: dg.DagsterInstance, key: dg.AssetKey) -> int:
    """Return the version of the sink up to which its hours were reported."""
    last = instance.get_latest_materialization_event(key)
    found = None if last is None else last.asset_materialization
    if found is None or VERSION not in found.metadata:
        return 0
    return int(str(found.metadata[VERSION].value))


def _on_grid(hour: str, grid: dg.HourlyPartitionsDefinition) -> str | None:
    try:
        at = datetime.strptime(hour, _HOUR).replace(tzinfo=UTC)
    except ValueError:  # beyond the year 9999, such as µs read as ms
        return None
    first, last = grid.get_first_partition_window(), grid.get_last_partition_window()
    if first is None or last is None or not first.start <= at < last.end:
        return None
    return at.strftime(grid.fmt)


def _metadata(hour: dict[str, Any], *, version: int) -> dict[str, Any]:
    return {
        "rows": hour["rows"],
        "dagster/partition_row_count": hour["rows"],
        "files": hour["files"],
        "bytes": hour["bytes"],
        VERSION: version,
    }
