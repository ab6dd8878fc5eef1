"""What a consumer wants of a topic."""

from dataclasses import dataclass

from rmq_pipeline.filter.expression import compile_filter


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic and a filter; a filter that does not parse is refused here, not at the broker."""

    topic: str
    #: ``*`` or tags joined by ||; or a condition on properties.
    filter: str = "*"
    #: tag or sql92.
    filter_type: str = "tag"

    def __post_init__(self) -> None:
        compile_filter(self.filter, self.filter_type)
