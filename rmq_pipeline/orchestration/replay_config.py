"""Config of a replay's run, and the tags that set the same values for a backfill."""

from collections.abc import Mapping
from typing import Any, Final

import dagster as dg
from pydantic import Field

#: Tag ``rmq/replay_mode`` sets ``mode``, and so on: the dialog of a backfill offers only tags.
TAG_PREFIX: Final = "rmq/replay_"


class ReplayConfig(dg.Config):
    """Mode and settings of a replay."""

    mode: str = Field(
        default="dry_run",
        description=(
            "dry_run: what would change, and nothing is. replace: the consumer's sink gets the new"
            " rows in place of those of the same hours. side_sink: another folder gets them."
            " side_topic: the messages go into another topic, and no handler is called."
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
            "Modes replace and side_sink: what the handler publishes is sent, to topics that drop"
            " repetitions of message ids."
        ),
    )
    parallelism: int = Field(default=2, ge=1, description="Spark tasks, at least.")
    side_topic: str = Field(default="", description="Mode side_topic: the topic; made if need be.")
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
        description="Mode side_topic: how long its messages are kept once sealed; 0: for good.",
    )
    replay_id: str = Field(
        default="",
        description=(
            "What was done under an id is not done twice. Empty: that of the backfill, else of the"
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
