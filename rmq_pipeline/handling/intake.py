"""The receive of a window: leased messages under its fence, with marks of repetitions."""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.handling.batch import Batch
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.idempotency import IDEMPOTENCY_KEY, mark
from rmq_pipeline.verb import Window
from rmq_pipeline.verbs import Verbs

#: Invisible duration of a delivery; the next window's epoch ends those of a dead window.
INVISIBLE_MS: Final = 30 * 60_000


class LostError(Exception):
    """A delivery has ended or is unknown, so all messages in flight must be redelivered."""


def receive(
    spec: ConsumerSpec,
    verbs: Verbs,
    *,
    fence: Window,
    limit: int,
    wait_ms: int,
    held: Sequence[Batch],
) -> pa.Table:
    """Lease messages.

    Args:
        spec: the consumer.
        verbs: the broker's verbs.
        fence: the window's fence.
        limit: maximum number of messages.
        wait_ms: how long to wait for the first message.
        held: the batches in flight, whose keys are not yet remembered by the broker.

    Raises:
        LostError: the answer was lost.
        FencedError: a newer window has taken over.
    """
    try:
        received = verbs.receive(
            spec.group,
            spec.topic,
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
        # Messages leased by the lost call are unknown here, and stay leased until a newer epoch.
        raise LostError(str(error)) from error


def _marked(
    received: pa.Table, spec: ConsumerSpec, *, verbs: Verbs, held: Sequence[Batch]
) -> pa.Table:
    """Return the messages, marked as repetitions or not if the consumer has an idempotency key."""
    key = spec.idempotency_key
    if key is None or not received.num_rows:
        return received
    chunks = [chunk for batch in held for chunk in batch.received[IDEMPOTENCY_KEY.name].chunks]
    known = pa.chunked_array(chunks, pa.string())
    return mark(verbs, received, group=spec.group, key=key, held=known)
