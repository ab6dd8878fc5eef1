"""What a consumer writes: a function from a table of messages to an Outcome. Needs no Spark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline import schema

#: What a handler is given: a received message, without the receipt that only the window holds.
MESSAGES: Final = pa.schema([f for f in schema.RECEIVED if f.name != "receipt_handle"])

#: What ``Outcome.results`` may hold; ``retry_after_ms`` and ``reason`` may be left out.
RESULT: Final = pa.schema(
    [
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("queue_offset", pa.int64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        ("retry_after_ms", pa.int64()),
        ("reason", pa.string()),
    ]
)

OUTCOMES: Final = frozenset({"ack", "retry", "dead_letter"})


class OutcomeError(Exception):
    """What a handler returned cannot be used; it counts as the failure of its message."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the messages of one call; everything in it is settled in one frame."""

    #: Rows for the sink, of the consumer's sink schema; None: none.
    rows: pa.Table | None = None
    #: The message group's state after these messages, 1 row of the consumer's state schema;
    #: 0 rows remove it, None leaves it as it was.
    state: pa.Table | None = None
    #: RESULT rows for messages of this call; a message without a row, or None, is acked.
    results: pa.Table | None = None
    #: Messages to send onward: topic -> table of schema.SEND's columns (at least ``body``).
    publish: Mapping[str, pa.Table] | None = None


#: ``handler(messages, state) -> Outcome``. ``messages`` has MESSAGES' columns: with
#: ``order_by="message_group"`` messages of ONE group in offset order (how many depends on where a
#: batch was cut), else any messages. ``state`` is the group's row, 0 or 1 rows of the state schema.
#:
#: A handler has no side effects: a call that raises, or that retries one of several messages, is
#: made again with one message at a time, in order. Of the first one that fails nothing counts but
#: the retry; those before it stand; those after it are given again later. Without order those after
#: it are tried as well, and of each that fails nothing counts but the retry; and a call that gave
#: nothing but results stands as it is. So what a consumer produces does not depend on where batches
#: are cut or processes are killed.
#:
#: With an idempotency key a handler has side effects. A call then has one message, and is not made
#: again; several where there is no order, sink or topic to publish to: such a call is made again
#: when it raises, so a handler returns ``retry`` for a message that fails (docs/idempotency.md).
Handler = Callable[[pa.Table, pa.Table], Outcome]
