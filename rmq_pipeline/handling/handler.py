"""The interface of a handler: a function from a table of messages to an Outcome. Needs no Spark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rmq_pipeline import schema

#: Columns of a handler's messages: a received message without its receipt handle.
MESSAGES: Final = pa.schema([f for f in schema.RECEIVED if f.name != "receipt_handle"])

#: Columns of ``Outcome.results``; ``retry_after_ms`` and ``reason`` are optional.
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
    """A handler's outcome is invalid; the message counts as failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one handler call; all of it is settled in one frame."""

    #: Rows for the sink, with the consumer's sink schema; None for no rows.
    rows: pa.Table | None = None
    #: The message group's state after these messages, 1 row of the consumer's state schema; 0 rows
    #: remove the state, None leaves it unchanged.
    state: pa.Table | None = None
    #: RESULT rows for messages of this call; a message without a row is acked.
    results: pa.Table | None = None
    #: Messages to publish: topic -> table with columns of schema.SEND (at least ``body``).
    publish: Mapping[str, pa.Table] | None = None


#: ``handler(messages, state) -> Outcome``. ``messages`` has the columns of MESSAGES. With
#: ``order_by="message_group"`` these are messages of ONE group in offset order; their number
#: depends on the batch. Otherwise they are any messages. ``state`` is the group's state, 0 or 1
#: rows of the state schema.
#:
#: A handler must have no side effects, because calls are repeated. If a call raises, or retries one
#: of several messages, it is repeated with one message at a time, in order. The first message that
#: fails is retried, and its other results are discarded. The results of earlier messages stand;
#: later messages are delivered again. Without order, the later messages are tried too, and each
#: that fails is retried. A call without order that returned only results is not repeated. The
#: output of a consumer therefore does not depend on the bounds of batches or on killed processes.
#:
#: With an idempotency key a handler may have side effects. A call then has one message and is not
#: repeated. Without order, sink and topics to publish to, a call may have several messages and is
#: repeated if it raises. Such a handler must return ``retry`` for a message that fails
#: (docs/idempotency.md).
Handler = Callable[[pa.Table, pa.Table], Outcome]
