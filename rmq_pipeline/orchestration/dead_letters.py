"""The dead letters of a consumer as an external asset, downstream of the consumer."""

import dagster as dg

from rmq_pipeline.orchestration.topic_assets import KIND, identifier
from rmq_pipeline.topic import DLQ_PREFIX


def dead_letter_key(group: str) -> dg.AssetKey:
    """Return the key of the asset of a group's dead letters."""
    return dg.AssetKey(f"{identifier(group)}_dead_letters")


def dead_letter_spec(group: str, consumer: dg.AssetKey) -> dg.AssetSpec:
    """Return the external asset of a group's dead letter topic."""
    return dg.AssetSpec(
        dead_letter_key(group),
        deps=[consumer],
        description=f"Messages that {group} gave up on, with the reason of each.",
        kinds={KIND, "topic"},
        metadata={"topic": f"{DLQ_PREFIX}{group}", "consumer_group": group},
    )
