"""Subscription of a consumer to a topic."""

from dataclasses import dataclass

from rmq_pipeline.filter.expression import compile_filter


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topic with a filter; an invalid filter raises here, before any call to the broker."""

    topic: str
    #: ``*``, tags joined by ||, or a SQL92 condition.
    filter: str = "*"
    #: "tag" or "sql92".
    filter_type: str = "tag"

    def __post_init__(self) -> None:
        compile_filter(self.filter, self.filter_type)
