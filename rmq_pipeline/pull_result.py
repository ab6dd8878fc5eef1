"""The result of a pull: messages of several queues, and the next offset of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa

_NEXT: Final = b"next_offsets"


@dataclass(frozen=True, slots=True)
class PullResult:
    """Messages that were read by offset, without a lease."""

    #: schema.READ, by queue_id and queue_offset.
    messages: pa.Table
    #: By queue_id, for every queue that was read: the first offset that the pull did not look at.
    #: Filtered and expired messages lie before it.
    next_offsets: Mapping[int, int]

    def to_table(self) -> pa.Table:
        """Return the result as one table, for the Flight endpoint."""
        return self.messages.replace_schema_metadata({_NEXT: json.dumps(dict(self.next_offsets))})

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """Return the result from the output of ``to_table``."""
        offsets = json.loads(table.schema.metadata[_NEXT])
        by_queue = {int(queue_id): offset for queue_id, offset in offsets.items()}
        return cls(table.replace_schema_metadata(None), by_queue)
