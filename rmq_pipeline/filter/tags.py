"""Tag expressions: ``*``, or tags joined by ``||``."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import FilterExpressionError
from rmq_pipeline.message import Int64s, hash64


@dataclass(frozen=True)
class TagFilter:
    """Messages of some tags, or all messages."""

    expression: str
    #: None for all messages.
    tags: tuple[str, ...] | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a message that ``matches`` looks at."""
        return () if self.tags is None else ("tag",)

    @cached_property
    def hashes(self) -> Int64s | None:
        """The hashes of the tags, ascending; None for all messages."""
        return None if self.tags is None else np.unique(hash64(pa.array(self.tags, pa.string())))

    def matches(self, messages: pa.Table) -> pa.BooleanArray:
        """Which rows are wanted."""
        if self.tags is None:
            return pa.repeat(True, messages.num_rows)
        tags = messages.column("tag").combine_chunks()
        return pc.is_in(tags, value_set=pa.array(self.tags, tags.type))


def parse_tags(expression: str) -> TagFilter:
    """The filter that ``*`` or ``a || b`` is.

    Raises:
        FilterExpressionError: nothing but separators, or a tag that no message can have.
    """
    if expression.strip() in ("", "*"):
        return TagFilter(expression, None)
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterExpressionError(f"Filter {expression!r} names no tag.")
    for tag in tags:
        if "|" in tag or any(ord(c) < 32 for c in tag):
            at = expression.index(tag)
            raise FilterExpressionError(f"Filter {expression!r}: bad tag {tag!r} at {at}.")
    return TagFilter(expression, None if "*" in tags else tuple(dict.fromkeys(tags)))
