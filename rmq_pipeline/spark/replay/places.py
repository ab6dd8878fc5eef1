"""First and last messages of the message groups in a range."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

#: Columns: the first and the last message of a message group.
PLACES: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("first_stored", pa.int64()),
        ("first_queue", pa.int32()),
        ("first", pa.int64()),
        ("last_stored", pa.int64()),
        ("last_queue", pa.int32()),
        ("last", pa.int64()),
    ]
)
_ORDER: Final = ["stored_at_ms", "queue_id", "queue_offset"]


def firsts_and_lasts(messages: pa.Table) -> pa.Table:
    """Return PLACES of messages in stored order; messages without a message group are ignored."""
    messages = messages.filter(pc.is_valid(messages["message_group"]))
    wanted = [(name, end) for end in ("first", "last") for name in _ORDER]
    found = messages.group_by("message_group", use_threads=False).aggregate(wanted)
    names = [f"{name}_{end}" for name, end in wanted]
    return found.select(["message_group", *names]).rename_columns(PLACES.names).cast(PLACES)


def together(tables: list[pa.Table]) -> pa.Table:
    """Merge PLACES of several parts, which may have groups in common."""
    found = pa.concat_tables([PLACES.empty_table(), *tables])
    ends = [
        found.select(["message_group", *names]).rename_columns(["message_group", *_ORDER])
        for names in (PLACES.names[1:4], PLACES.names[4:])
    ]
    return firsts_and_lasts(pa.concat_tables(ends).sort_by([(n, "ascending") for n in _ORDER]))
