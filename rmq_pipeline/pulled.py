"""What a pull gives: messages of several queues, and where to go on in each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa

_NEXT: Final = b"next_offsets"


@dataclass(frozen=True, slots=True)
class Pulled:
    """Messages read by offset, without a lease."""

    #: schema.READ, by queue_id and queue_offset.
    messages: pa.Table
    #: By queue_id, for every queue that was asked: the first offset that was not looked at. What
    #: the filter does not want, and what has expired, lies before it.
    next_offsets: Mapping[int, int]

    def to_table(self) -> pa.Table:
        """All of it as a table, which can cross a door."""
        return self.messages.replace_schema_metadata({_NEXT: json.dumps(dict(self.next_offsets))})

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """What ``to_table`` made a table of."""
        offsets = json.loads(table.schema.metadata[_NEXT])
        by_queue = {int(queue_id): offset for queue_id, offset in offsets.items()}
        return cls(table.replace_schema_metadata(None), by_queue)
