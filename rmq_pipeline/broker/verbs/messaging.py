"""What producers and consumers do with messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.receiving.receiving import receive
from rmq_pipeline.broker.scheduling import recalling
from rmq_pipeline.broker.sending.publish import prepare
from rmq_pipeline.broker.sending.repeating import name_first
from rmq_pipeline.broker.settling import settling
from rmq_pipeline.broker.verbs.opened import Opened, Window


class Messaging(Opened):
    """Sending, receiving, settling."""

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store a table of schema.SEND, whole or not at all; answers schema.SENT row for row."""
        engine = self._engine
        engine.admit()
        with engine.bulk_gate.of(messages):
            prepared = prepare(
                engine.state.topic(topic).topic,
                messages,
                ids=engine.ids,
                delay_max_ms=engine.settings.delay_max_ms,
                now_ms=engine.clock.now_ms(),
                delay_levels_ms=engine.settings.delay_levels_ms,
            )
        return name_first(engine, engine.submit(prepared)).table()

    def recall(self, topic: str, handles: pa.Table) -> pa.Table:
        """Call back scheduled messages: all of schema.RECALL, or RecallError and none.

        Returns:
            schema.RECALLED, row for row.
        """
        return recalling.recall(self._engine, topic, handles=handles)

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int = 32,
        invisible_duration_ms: int = 60_000,
        filter: str = "*",
        filter_type: str = "tag",
        wait_ms: int = 0,
        client_id: str = "",
        window: Window | None = None,
        queue_ids: Sequence[int] | None = None,
        attempt_id: str = "",
    ) -> pa.Table:
        """Lease up to ``limit`` messages for a while, as schema.RECEIVED in (queue, offset) order.

        Args:
            filter: ``*`` or tags joined by ||; or a condition on properties.
            filter_type: tag or sql92.
            wait_ms: how long to wait for the first message.
            window: name and epoch of the consumer's window these leases belong to.
            queue_ids: look in these queues only; without it, in all that no other client of the
                group has locked.
            attempt_id: in a group of order queue a receive that is repeated under the id of one
                whose answer got lost is given the same batch again, with new receipts.

        Raises:
            QueueLockedError: another client has locked one of ``queue_ids``.
        """
        request = arguments.receive(
            self._engine,
            topic,
            group=group,
            limit=limit,
            invisible_duration_ms=invisible_duration_ms,
            filter=filter,
            filter_type=filter_type,
            client_id=client_id,
            window=window,
            queue_ids=queue_ids,
            attempt_id=attempt_id,
        )
        return receive(self._engine, request, wait_ms=arguments.poll_ms(wait_ms))

    def ack(self, receipts: pa.Table | Sequence[str]) -> None:
        """Settle deliveries as done: all of them, or ReceiptHandleError and none."""
        settling.ack(self._engine, receipts)

    def change_invisible_duration(
        self, receipts: pa.Table | Sequence[str], duration_ms: int
    ) -> pa.Table:
        """Let leases end ``duration_ms`` from now; answers the receipts that hold from now on."""
        return settling.change_invisible_duration(self._engine, receipts, duration_ms=duration_ms)

    def forward_to_dead_letter_queue(
        self, receipts: pa.Table | Sequence[str], *, reason: str = ""
    ) -> None:
        """Settle deliveries as hopeless: they are in %DLQ%group when this returns.

        Raises:
            ReceiptHandleError: a receipt does not hold; nothing was done.
            OperatorError, LookupError: they are settled, and one cannot be read or copied yet: it
                comes to %DLQ%group when it can.
        """
        settling.forward(self._engine, receipts, reason=reason)

    def settle(
        self,
        group: str,
        outcomes: pa.Table,
        *,
        settle_id: str = "",
        window: Window | None = None,
        publish: Mapping[str, pa.Table] | None = None,
        sink_files: pa.Table | None = None,
        state: pa.Table | None = None,
        topic: str = "",
    ) -> dict[str, Any]:
        """Outcomes, onward messages, sink files and keyed state in one step, or none of it.

        Args:
            outcomes: schema.OUTCOME.
            settle_id: the window's last one again is answered the same and does nothing.
            publish: topic -> schema.SEND.
            sink_files: schema.SINK_FILE.
            state: message_group, an optional ``removed``, and the consumer's own columns.
            topic: the consumed topic, which the keyed state belongs to.

        Returns:
            acked, retried, dead_lettered, published.

        Raises:
            FencedError: the window has been taken over.
            ReceiptHandleError: a receipt has ended.
        """
        return settling.settle(
            self._engine,
            group,
            outcomes=outcomes,
            settle_id=settle_id,
            window=window,
            publish=publish or {},
            sink_files=sink_files,
            state=state,
            topic=topic,
        )
