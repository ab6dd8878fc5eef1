"""Which messages of a topic a receive wants: tag expressions (semantics §10)."""

import numpy as np
import pyarrow as pa

from rmq_pipeline.errors import FilterExpressionError
from rmq_pipeline.message import Int64s, hash64


def tag_hashes(expression: str) -> Int64s | None:
    """The tags that ``a || b`` names; None for all messages.

    Raises:
        FilterExpressionError: nothing but separators, or no text.
    """
    if not isinstance(expression, str):
        raise FilterExpressionError(f"A filter is text, not {expression!r}.")
    if expression.strip() in ("", "*"):
        return None
    tags = [tag.strip() for tag in expression.split("||")]
    tags = [tag for tag in tags if tag]
    if not tags:
        raise FilterExpressionError(f"Filter {expression!r} names no tag.")
    for tag in tags:
        if "|" in tag or any(ord(c) < 32 for c in tag):
            at = expression.index(tag)
            raise FilterExpressionError(f"Filter {expression!r}: bad tag {tag!r} at {at}.")
    if "*" in tags:
        return None
    return np.unique(hash64(pa.array(tags, pa.string())))
