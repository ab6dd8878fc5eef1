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
    """Filter that selects the messages of the given tags, or all messages."""

    expression: str
    #: None for all messages.
    tags: tuple[str, ...] | None

    @property
    def columns(self) -> tuple[str, ...]:
        """Message columns that ``matches`` reads."""
        return () if self.tags is None else ("tag",)

    @cached_property
    def hashes(self) -> Int64s | None:
        """Hashes of the tags, unique and ascending; None for all messages."""
        return None if self.tags is None else np.unique(hash64(pa.array(self.tags, pa.string())))

    def matches(self, messages: pa.Table) -> pa.BooleanArray:
        """Return one boolean per row: True where the message is selected."""
        if self.tags is None:
            return pa.repeat(True, messages.num_rows)
        tags = messages.column("tag").combine_chunks()
        return pc.is_in(tags, value_set=pa.array(self.tags, tags.type))


def parse_tags(expression: str) -> TagFilter:
    """Parse a tag expression: ``*``, an empty string, or tags joined by ``||``.

    Raises:
        FilterExpressionError: the expression has only separators, or a tag has characters that
            the broker refuses in tags.
    """
    if expression.strip() in ("", "*"):
        return TagFilter(expression, None)
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterExpressionError(
            f"Filter {expression!r} has no tag.", remedy="Give * or tags joined by ||."
        )
    for tag in tags:
        if "|" in tag or any(ord(c) < 32 for c in tag):
            at = expression.index(tag)
            raise FilterExpressionError(
                f"Filter {expression!r} has a tag with | or a control character: {tag!r}, "
                f"at character {at + 1}.",
                remedy="Remove the character; || separates tags.",
            )
    return TagFilter(expression, None if "*" in tags else tuple(dict.fromkeys(tags)))
