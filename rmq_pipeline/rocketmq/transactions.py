"""Ends of transactions, and the checks of those that stay open."""

import hashlib
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.transactions.targets import TargetsOf
from rmq_pipeline.errors import TransactionError, TransactionNotFoundError
from rmq_pipeline.rocketmq.caller import Caller
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.protocol import EndTransactionResponse, TransactionResolution
from rmq_pipeline.rocketmq.status import OK

#: UNSPECIFIED is what Python sends when its checker does not know either.
_RESOLUTIONS: Final = {
    int(TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED): "unknown",
    int(TransactionResolution.COMMIT): "commit",
    int(TransactionResolution.ROLLBACK): "rollback",
}
_HASH_CHARACTERS: Final = 16


def producer_group(topic: str) -> str:
    """Who is asked about the half messages of a topic: all its producers, as in RocketMQ's proxy.

    A topic's name may be longer than a group's; the end of a long one gives way to its hash.
    """
    if len(topic) <= limits.GROUP_NAME_LENGTH:
        return topic
    digest = hashlib.sha256(topic.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{topic[: limits.GROUP_NAME_LENGTH - _HASH_CHARACTERS - 1]}-{digest}"


class Transactions:
    """EndTransaction."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def end_transaction(self, request: Any, caller: Caller) -> Any:
        """Commit, roll back, or say that it is not known yet."""
        topic = caller.named(request.topic)
        self._context.engine.state.topic(topic)
        if not request.transaction_id.strip():
            raise TransactionNotFoundError("The transaction has no id.")
        resolution = _RESOLUTIONS.get(request.resolution, "unknown")
        resolutions = pa.table([[request.transaction_id], [resolution]], schema=schema.RESOLUTION)
        # Other doors' producer groups have any name: it is the topic that the caller has rights to.
        if await self._context.bridge.submit(TargetsOf(resolutions)) - {topic}:
            raise TransactionError(f"The transaction is of another topic than {topic}.")
        await self._context.bridge.run(
            self._context.broker.end_transactions,
            resolutions,
            producer_group=producer_group(topic),
        )
        return EndTransactionResponse(status=OK)
