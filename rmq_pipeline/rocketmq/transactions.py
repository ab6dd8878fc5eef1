"""EndTransaction, and the producer group of a topic."""

import hashlib
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.decide.transaction import TargetsOf
from rmq_pipeline.errors import TransactionError, TransactionNotFoundError
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import EndTransactionResponse, TransactionResolution
from rmq_pipeline.rocketmq.status import OK

#: Python sends UNSPECIFIED when its checker does not know the resolution either.
_RESOLUTIONS: Final = {
    int(TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED): "unknown",
    int(TransactionResolution.COMMIT): "commit",
    int(TransactionResolution.ROLLBACK): "rollback",
}
_HASH_CHARACTERS: Final = 16


def producer_group(topic: str) -> str:
    """Return the producer group of a topic's checks: all its producers, as in RocketMQ's proxy.

    A topic's name may be longer than a group's; a hash replaces the end of a long one.
    """
    if len(topic) <= limits.GROUP_NAME_LENGTH:
        return topic
    digest = hashlib.sha256(topic.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{topic[: limits.GROUP_NAME_LENGTH - _HASH_CHARACTERS - 1]}-{digest}"


class Transactions:
    """Handler of EndTransaction."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def end_transaction(self, request: Any, caller: Caller) -> Any:
        """Commit a transaction, roll it back, or leave it open."""
        topic = caller.named(request.topic)
        self._context.engine.state.topic(topic)
        if not request.transaction_id.strip():
            raise TransactionNotFoundError("The transaction has no id.")
        resolution = _RESOLUTIONS.get(request.resolution, "unknown")
        resolutions = pa.table([[request.transaction_id], [resolution]], schema=schema.RESOLUTION)
        # Flight clients choose any producer group, so the topic decides what the caller may end.
        if await self._context.bridge.submit(TargetsOf(resolutions)) - {topic}:
            raise TransactionError(f"The transaction does not belong to topic {topic}.")
        await self._context.bridge.run(
            self._context.broker.end_transactions,
            resolutions,
            producer_group=producer_group(topic),
        )
        return EndTransactionResponse(status=OK)
