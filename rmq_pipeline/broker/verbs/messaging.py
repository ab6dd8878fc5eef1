"""Verbs: sending, receiving and settling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.access.rights import CONSUMES, SETTLES, Rights, on_topic
from rmq_pipeline.broker.decide.publish import prepare
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work import arguments, schedule, settle
from rmq_pipeline.broker.work.reading import name_first
from rmq_pipeline.broker.work.receive import receive
from rmq_pipeline.tables import columns_of
from rmq_pipeline.verb import Receipts, Window


class Messaging(Opened):
    """Verbs for sending, receiving and settling."""

    @verb(rights=on_topic("pub"), quick=True)
    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store messages, all or none.

        Args:
            topic: topic to send to.
            messages: schema.SEND; nullable columns may be left out.

        Returns:
            schema.SENT, row for row.
        """
        engine = self._engine
        engine.admit()
        gate = engine.bulk_gate
        with gate.sending(messages):
            with gate.preparing(messages):
                prepared = prepare(
                    engine.state.topic(topic).topic,
                    columns_of(messages, schema.SEND),
                    ids=engine.ids,
                    delay_max_ms=engine.settings.delay_max_ms,
                    now_ms=engine.clock.now_ms(),
                    delay_levels_ms=engine.settings.delay_levels_ms,
                )
            sent = engine.submit(prepared)
            del prepared  # Frees the copy of the messages that it may hold.
        return name_first(engine, sent).table()

    @verb(rights=on_topic("pub"), quick=True)
    def recall(self, topic: str, handles: pa.Table) -> pa.Table:
        """Recall scheduled messages before they are delivered, all or none.

        Args:
            topic: topic that the messages were sent to.
            handles: schema.RECALL, as ``send`` returned them.

        Returns:
            schema.RECALLED, row for row.

        Raises:
            RecallError: a message was delivered or recalled before, is of another topic, or
                unknown.
        """
        return schedule.recall(self._engine, topic, handles=handles)

    @verb(rights=replace(CONSUMES, settles="ack"))
    def receive(
        self,
        group: str,
        topic: str,
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
        ack: Receipts | None = None,
    ) -> pa.Table:
        """Lease messages of a topic to the caller.

        Args:
            group: consumer group that receives.
            topic: topic to receive from.
            limit: number of messages at most.
            invisible_duration_ms: length of the leases.
            filter: ``*``, tags joined by ||, or an SQL92 condition on properties.
            filter_type: tag or sql92.
            wait_ms: how long to wait for the first message.
            client_id: client that the messages are leased to.
            window: name and epoch of the consumer's window that the leases belong to.
            queue_ids: receive from these queues only; None: from all queues that no other client of
                the group has locked.
            attempt_id: in a group of order queue, repeating a receive under the id of one whose
                answer was lost returns the same batch, with new receipts.
            ack: receipts of deliveries to ack before, all or none, also if no message comes.
                After any error but ReceiptHandleError, receive again without them.

        Returns:
            schema.RECEIVED, sorted by queue_id, and by queue_offset within a message group.

        Raises:
            QueueLockedError: another client has locked one of ``queue_ids``.
            ReceiptHandleError: a receipt of ``ack`` has ended; nothing was leased.
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
        acks = None if ack is None else settle.ack_request(ack)
        return receive(self._engine, request, wait_ms=arguments.poll_ms(wait_ms), first=acks)

    @verb(rights=SETTLES, quick=True)
    def ack(self, receipts: Receipts) -> None:
        """Settle deliveries as consumed, all or none.

        Args:
            receipts: a table with the column receipt_handle, or the handles.

        Raises:
            ReceiptHandleError: a receipt has ended.
        """
        settle.ack(self._engine, receipts)

    @verb(rights=SETTLES, quick=True)
    def change_invisible_duration(self, receipts: Receipts, duration_ms: int) -> pa.Table:
        """Let leases end ``duration_ms`` from now, all or none.

        Returns:
            The receipts that are valid from now on, row for row.

        Raises:
            ReceiptHandleError: a receipt has ended; no lease was changed.
        """
        return settle.change_invisible_duration(self._engine, receipts, duration_ms=duration_ms)

    @verb(rights=SETTLES, quick=True)
    def forward_to_dead_letter_queue(self, receipts: Receipts, *, reason: str = "") -> None:
        """Settle deliveries by moving their messages to %DLQ%group, all or none.

        Args:
            receipts: a table with the column receipt_handle, or the handles.
            reason: text that the dead letters carry.

        Raises:
            ReceiptHandleError: a receipt has ended; no message was moved.
            OperatorError, LookupError: the deliveries are settled, but a message cannot be read
                or copied now. The broker moves it to %DLQ%group when it can.
        """
        settle.forward(self._engine, receipts, reason=reason)

    @verb(
        rights=Rights(group=("group", "sub"), settles="outcomes", publishes="publish"),
        # The window remembers its last settle.
        repeatable_with=("settle_id", "window"),
        quick=True,
    )
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
        """Settle deliveries and commit what came of them in one step, all or none.

        Args:
            group: consumer group of the deliveries.
            outcomes: schema.OUTCOME.
            settle_id: repeating the window's last settle returns the same answer and does nothing.
            window: name and epoch of the window that settles.
            publish: schema.SEND for each topic.
            sink_files: schema.SINK_FILE, files that belong to the sink from now on.
            state: message_group, an optional column ``removed``, and the consumer's own columns;
                one row per changed key.
            topic: consumed topic that ``state`` belongs to.

        Returns:
            {"acked", "retried", "dead_lettered", "published"}.

        Raises:
            FencedError: a newer window has taken over.
            ReceiptHandleError: a receipt has ended.
        """
        return settle.settle(
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
