"""What a window receives: leased messages under its fence, marked with what was seen before."""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.handling.batch import Batch
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.verbs import Fence, Verbs
from rmq_pipeline.idempotency import IDEMPOTENCY_KEY, mark

#: How long a delivery may take; those of a dead window are ended by the next one's epoch.
INVISIBLE_MS: Final = 30 * 60_000


class LostError(Exception):
    """A delivery has ended, or nobody knows of it: all that is in flight must come again."""


def receive(
    spec: ConsumerSpec,
    verbs: Verbs,
    *,
    fence: Fence,
    limit: int,
    wait_ms: int,
    held: Sequence[Batch],
) -> pa.Table:
    """Lease messages.

    Args:
        spec: the consumer.
        verbs: of the broker.
        fence: of the window.
        limit: how many at most.
        wait_ms: how long to wait for the first one.
        held: the batches in flight, whose keys nobody has remembered yet.

    Raises:
        LostError: the answer got lost on the way.
        FencedError: a newer window has taken over.
    """
    try:
        received = verbs.receive(
            spec.topic,
            spec.group,
            limit=limit,
            invisible_duration_ms=INVISIBLE_MS,
            filter=spec.filter,
            filter_type=spec.filter_type,
            wait_ms=wait_ms,
            client_id=spec.name,
            window=fence,
        )
        return _marked(received, spec, verbs=verbs, held=held)
    except BrokerUnavailableError as error:
        # What it leased, if it did, is unknown here and held until a newer epoch ends it.
        raise LostError(str(error)) from error


def _marked(
    received: pa.Table, spec: ConsumerSpec, *, verbs: Verbs, held: Sequence[Batch]
) -> pa.Table:
    """With what was seen before, where the consumer has an idempotency key."""
    key = spec.idempotency_key
    if key is None or not received.num_rows:
        return received
    chunks = [chunk for batch in held for chunk in batch.received[IDEMPOTENCY_KEY.name].chunks]
    known = pa.chunked_array(chunks, pa.string())
    return mark(verbs, received, group=spec.group, key=key, held=known)
