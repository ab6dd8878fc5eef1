"""Transactions that stay open: a producer of their topic is asked, whichever is connected."""

import logging
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any, Final

from rmq_pipeline.broker.arrivals import Rung
from rmq_pipeline.broker.transactions.offers import NEW_OFFERS
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.rocketmq.authorising import may_publish
from rmq_pipeline.rocketmq.clients import Client
from rmq_pipeline.rocketmq.context import Context
from rmq_pipeline.rocketmq.encoding import messages_of
from rmq_pipeline.rocketmq.protocol import (
    RecoverOrphanedTransactionCommand,
    Resource,
    TelemetryCommand,
)
from rmq_pipeline.rocketmq.transactions import producer_group

log = logging.getLogger(__name__)

#: Checks of a producer group that nobody has asked for in a minute are anybody's: this is often
#: enough to keep those of a topic whose producers are here.
_LOOK_MS: Final = 10_000
#: Asked about in one step; their messages are read at once.
_STEP: Final = 256


class Checks:
    """Pushes checks that are due to the producers of their topics. For the loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turns = count()
        self._looking = False
        self._again = False
        self._unlisten = context.engine.arrivals.listen(self._rung)
        self._look_later()

    def close(self) -> None:
        """Ask nobody any more."""
        self._unlisten()

    def _rung(self, topic_ids: Rung) -> None:
        # In the thread that found them to be due.
        if NEW_OFFERS in topic_ids:
            self._context.bridge.call_soon(self.look)

    def _look_later(self) -> None:
        bridge = self._context.bridge

        def look() -> None:
            self.look()
            self._look_later()

        at_ms = self._context.clock.now_ms() + _LOOK_MS
        self._context.alarm.at(at_ms, partial(bridge.call_soon, look))

    def look(self) -> None:
        """See what is due, now or once the look that is under way is over."""
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
                    log.exception("Checks of topic %s have failed; others go on.", topic)
        finally:
            self._looking = False
        if self._again:
            self._again = False
            self.look()

    def _producers(self) -> dict[str, list[Client]]:
        """Who can be asked, by topic."""
        known = self._context.engine.state.topic_ids
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
        # In a topic of mixed type, too: a half message says no more of what it is.
        messages = messages_of(due, topic=Resource(), type="transaction", name=topic)
        ids = due.column("transaction_id").to_pylist()
        for transaction_id, message in zip(ids, messages, strict=True):
            await self._push(topic, producers, check=(transaction_id, message))
        self.look()

    async def _push(self, topic: str, producers: list[Client], *, check: tuple[str, Any]) -> None:
        """Ask one producer; the next one when it has gone. All gone: it is asked again later."""
        transaction_id, message = check
        turn = next(self._turns)
        for client in _from(producers, turn):
            if topic not in client.topics:  # it has other settings by now
                continue
            message.topic.CopyFrom(client.topics[topic])
            command = TelemetryCommand(
                recover_orphaned_transaction_command=RecoverOrphanedTransactionCommand(
                    message=message, transaction_id=transaction_id
                )
            )
            for stream in reversed(client.streams):
                # A stream is open for long: its user's rights may be others by now.
                may = may_publish(self._context.access, stream.caller, topic=topic)
                if may and await stream.send_if_open(command):
                    return
        log.info("nobody was there to be asked about a transaction: topic=%s", topic)


def _from(producers: list[Client], turn: int) -> Iterable[Client]:
    first = turn % len(producers)
    return (*producers[first:], *producers[:first])
