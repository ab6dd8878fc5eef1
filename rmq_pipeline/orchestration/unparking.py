"""Unparking as a run: an asset whose config is the Launchpad's form."""

from typing import Any, Final

import dagster as dg
import pyarrow as pa
from pydantic import Field

from rmq_pipeline.errors import NotFoundError, RequestError
from rmq_pipeline.orchestration import queries
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.topic_assets import KIND
from rmq_pipeline.orchestration.upkeep_assets import GROUP

NAME: Final = "unpark"
_COLUMNS: Final = ("topic", "message_group", "queue_id", "queue_offset", "waiting", "reason")


class UnparkConfig(dg.Config):
    """Selection of messages to unpark, and whether the failed ones are retried."""

    consumer_group: str = Field(description="The group that has parked messages.")
    topic: str = Field(default="", description="What is parked of this topic only; empty: of all.")
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
        key=[GROUP, NAME],
        group_name=GROUP,
        kinds={KIND},
        description="Lets parked messages come again, in order, with what waits behind them.",
    )
    def run(
        context: dg.AssetExecutionContext, *, config: UnparkConfig, broker: BrokerResource
    ) -> dg.MaterializeResult[Any]:
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
            metadata={**done, "consumer_group": config.consumer_group, "parked": _listed(meant)}
        )

    return run


def _listed(rows: list[dict[str, Any]]) -> dg.MetadataValue[Any]:
    """Return the table of messages that were parked when the run began."""
    numbers = {"queue_id", "queue_offset", "waiting"}
    columns = [dg.TableColumn(name, "int" if name in numbers else "string") for name in _COLUMNS]
    records = [
        dg.TableRecord({name: "" if row[name] is None else row[name] for name in _COLUMNS})
        for row in rows
    ]
    return dg.MetadataValue.table(records, dg.TableSchema(columns=columns))


def unpark_job() -> Any:
    """Return the job ``unpark``, which is started from the Launchpad."""
    return dg.define_asset_job(
        NAME,
        selection=dg.AssetSelection.assets(dg.AssetKey([GROUP, NAME])),
        description=(
            "Unparks messages of a consumer group: the failed ones first, from their first attempt "
            "on, or skipped; then what waits behind them. Message groups given up are pardoned."
        ),
        executor_def=dg.in_process_executor,
    )
