"""EndTransaction, and the producer group of a topic."""

import hashlib
import logging
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits, schema
from rmq_pipeline.errors import RocketMQError, TransactionError, TransactionNotFoundError
from rmq_pipeline.rocketmq.clients import Caller, Client
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.encoding import messages_of
from rmq_pipeline.rocketmq.protocol import (
    OK,
    EndTransactionResponse,
    RecoverOrphanedTransactionCommand,
    Resource,
    TelemetryCommand,
    TransactionResolution,
)
from rmq_pipeline.rocketmq.rights import may_publish

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
        self._context.bridge.engine.state.topic(topic)
        if not request.transaction_id.strip():
            raise TransactionNotFoundError("The transaction has no id.")
        resolution = _RESOLUTIONS.get(request.resolution, "unknown")
        resolutions = pa.table([[request.transaction_id], [resolution]], schema=schema.RESOLUTION)
        # Flight clients choose any producer group, so the topic decides what the caller may end.
        if await self._context.bridge.topics_of_transactions(resolutions) - {topic}:
            raise TransactionError(f"The transaction does not belong to topic {topic}.")
        await self._context.bridge.run(
            self._context.broker.end_transactions,
            resolutions,
            producer_group=producer_group(topic),
        )
        return EndTransactionResponse(status=OK)


log = logging.getLogger(__name__)

#: After a minute without a caller, a producer group's checks may go to any caller. Looking more
#: often keeps the checks of a topic with connected producers.
_LOOK_MS: Final = 10_000
#: Checks that are fetched in one step; their messages are read together.
_STEP: Final = 256


class Checks:
    """Pushes due checks to the producers of their topics. Used by the loop's thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turns = count()
        self._looking = False
        self._again = False
        self._unlisten = context.bridge.on_checks(self.look)
        self._look_later()

    def close(self) -> None:
        """Push no further checks."""
        self._unlisten()

    def _look_later(self) -> None:
        bridge = self._context.bridge

        def look() -> None:
            self.look()
            self._look_later()

        at_ms = self._context.clock.now_ms() + _LOOK_MS
        bridge.timers.at(at_ms, partial(bridge.call_soon, look))

    def look(self) -> None:
        """Push the due checks; if a pass is under way, run another one after it."""
        if self._looking:
            self._again = True
            return
        self._looking = True
        self._context.bridge.start(self._look)

    async def _look(self) -> None:
        try:
            for topic, producers in self._producers().items():
                try:
                    await self._ask(topic, producers)
                except Exception:
                    log.exception(
                        "Pushing the checks of topic %s failed; other topics continue.", topic
                    )
        finally:
            self._looking = False
        if self._again:
            self._again = False
            self.look()

    def _producers(self) -> dict[str, list[Client]]:
        """Return the producers with an open stream, by topic."""
        known = self._context.bridge.engine.state.topic_ids
        found: dict[str, list[Client]] = {}
        for client in self._context.clients.with_stream():
            for topic in client.topics:
                if topic in known:
                    found.setdefault(topic, []).append(client)
        return found

    async def _ask(self, topic: str, producers: list[Client]) -> None:
        context = self._context
        try:
            due = await context.bridge.run(
                context.broker.fetch_checks,
                topics=[topic],
                producer_group=producer_group(topic),
                client_id="grpc",
                limit=_STEP,
            )
        except RocketMQError as error:
            log.warning("checks of topic %s could not be fetched: %s", topic, error)
            return
        if not due.num_rows:
            return
        # A half message says no more about its type, so this holds in a mixed topic, too.
        messages = messages_of(due, topic=Resource(), type="transaction", name=topic)
        ids = due.column("transaction_id").to_pylist()
        for transaction_id, message in zip(ids, messages, strict=True):
            await self._push(topic, producers, check=(transaction_id, message))
        self.look()

    async def _push(self, topic: str, producers: list[Client], *, check: tuple[str, Any]) -> None:
        """Push a check to one producer, and to the next one if it is gone.

        Without any producer the broker offers the check again later.
        """
        transaction_id, message = check
        turn = next(self._turns)
        for client in _from(producers, turn):
            if topic not in client.topics:  # its settings have changed since
                continue
            message.topic.CopyFrom(client.topics[topic])
            command = TelemetryCommand(
                recover_orphaned_transaction_command=RecoverOrphanedTransactionCommand(
                    message=message, transaction_id=transaction_id
                )
            )
            for stream in reversed(client.streams):
                # The stream may be old, and its user's permissions may have changed since.
                may = may_publish(self._context.access, stream.caller, topic=topic)
                if may and await stream.send_if_open(command):
                    return
        log.info("no producer is connected to check a transaction: topic=%s", topic)


def _from(producers: list[Client], turn: int) -> Iterable[Client]:
    first = turn % len(producers)
    return (*producers[first:], *producers[:first])
