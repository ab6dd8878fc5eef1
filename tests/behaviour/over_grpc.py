"""The verbs of tables, as far as a RocketMQ client has them, over the wire of the gRPC endpoint.

What the protocol has no words for (a window, a delay level, a table that is no table of messages)
goes to the broker itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from rmq_pipeline import errors, schema
from rmq_pipeline.rocketmq import protocol as pb
from tests.conformance import raw
from tests.conformance.raw import Raw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from rmq_pipeline.broker import Broker

#: The most that one receive gives, and the shortest time it leases for.
MOST: Final = 32
SHORTEST_MS: Final = 10_000
#: Real time: how long the test's process waits for an answer, whatever the broker's clock says.
PATIENCE_S: Final = 60.0
ACTIONS: Final = {
    "add": "PARTIAL_ADD",
    "remove": "PARTIAL_REMOVE",
    "replace": "COMPLETE_ADD",
    "clear": "COMPLETE_REMOVE",
}
KINDS: Final = {
    "message_group": "FIFO",
    "lite_topic": "LITE",
    "deliver_at_ms": "DELAY",
    "priority": "PRIORITY",
}
#: The wire has the column by the same name.
PLAIN: Final = ("tag", "message_group", "lite_topic", "priority")


def _error_of(code: int) -> type[errors.RocketMQError]:
    """The class that has this code, the most general one first."""
    found = [errors.RocketMQError]
    for kind in found:
        if kind.code == code:
            return kind
        found.extend(kind.__subclasses__())
    return errors.RequestError if 40000 <= code < 41000 else errors.RocketMQError


def _check(status: Any) -> None:
    if status.code == pb.Code.MULTIPLE_RESULTS:
        raise errors.ReceiptHandleError(status.message)
    if status.code != pb.Code.OK:
        raise _error_of(status.code)(status.message)


class OverGrpc:
    """A broker of which what clients do goes over the wire; one client for each client id."""

    def __init__(self, address: str, inside: Broker) -> None:
        self._address = address
        self._inside = inside
        self._clients: dict[str, Raw] = {}
        #: Topic, group and message id of each receipt handle that came.
        self._deliveries: dict[str, tuple[str, str, str]] = {}
        self._halves: dict[str, tuple[str, str]] = {}
        #: The topic of each producer group that has sent a half message.
        self._producers: dict[str, str] = {}

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inside, verb)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._clients.values():
            client.close()

    def _call(self, rpc: str, request: Any, client_id: str = "") -> Any:
        if client_id not in self._clients:
            self._clients[client_id] = Raw(self._address, client_id=client_id)
        return self._clients[client_id](rpc, request, timeout_s=PATIENCE_S)

    # ------------------------------------------------------------------------------------- sending

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        if not self._speakable(messages):
            return self._inside.send(topic, messages)
        found = list(self._messages(topic, messages))
        answer = self._call("SendMessage", raw.sends(*found))
        _check(answer.status)
        return pa.table(
            {
                "message_id": [entry.message_id for entry in answer.entries],
                "queue_offset": [entry.offset for entry in answer.entries],
                "recall_handle": [entry.recall_handle or None for entry in answer.entries],
            }
        )

    @staticmethod
    def _speakable(messages: Any) -> bool:
        """Whether it is a table of messages that a client could send."""
        if not isinstance(messages, pa.Table) or not messages.num_rows:
            return False
        names = set(messages.column_names)
        if "body" not in names or not names <= set(schema.SEND.names):
            return False
        if names & {"delay_level", "queue_id"}:
            return False
        typed = all(messages.field(name).type == schema.SEND.field(name).type for name in names)
        return typed and not messages["body"].null_count

    def _messages(
        self, topic: str, messages: pa.Table, *, kind: str = "", immunity_ms: int | None = None
    ) -> Iterator[Any]:
        own = self._type(topic)
        for row in messages.to_pylist():
            found = kind or next(
                (KINDS[name] for name in KINDS if row.get(name) is not None), "NORMAL"
            )
            properties = {name: row[name] for name in PLAIN if row.get(name) is not None}
            times = {"delivery_timestamp_ms": row.get("deliver_at_ms")}
            times["born_timestamp_ms"] = row.get("born_at_ms")
            times["orphaned_transaction_recovery_duration_ms"] = immunity_ms
            properties |= {name: value for name, value in times.items() if value is not None}
            yield raw.message(
                topic,
                row["body"],
                kind=own if found == "NORMAL" and own != "MIXED" else found,
                message_id=row.get("message_id"),
                keys=row.get("keys") or (),
                user=dict(row.get("properties") or ()),
                **properties,
            )

    def _type(self, topic: str) -> str:
        """What clients call a message without anything special for this topic."""
        try:
            kind: str = self._inside.describe_topic(topic)["type"]
        except errors.TopicNotFoundError:
            return "NORMAL"
        unsaid = "MESSAGE_TYPE_UNSPECIFIED"
        known = {"delay": unsaid, "priority": unsaid, "transaction": "NORMAL"}
        return known.get(kind, kind.upper())

    def recall(self, topic: str, handles: pa.Table) -> pa.Table:
        if not isinstance(handles, pa.Table) or handles.column_names != ["recall_handle"]:
            return self._inside.recall(topic, handles)
        ids = []
        for handle in handles["recall_handle"].to_pylist():
            answer = self._call("RecallMessage", raw.recalls(topic, handle or ""))
            if answer.status.code == pb.Code.NOT_FOUND:
                raise errors.RecallError(answer.status.message)
            _check(answer.status)
            ids.append(answer.message_id)
        return pa.table([handles["recall_handle"], ids], schema=schema.RECALLED)

    # ----------------------------------------------------------------------------------- receiving

    def receive(
        self,
        group: str,
        topic: str,
        *,
        limit: int = 32,
        invisible_duration_ms: int = 60_000,
        client_id: str = "",
        **more: Any,
    ) -> pa.Table:
        own: dict[str, Any] = {"limit": limit, "invisible_duration_ms": invisible_duration_ms}
        if "window" in more or limit < 1 or not 1 <= invisible_duration_ms <= 12 * 3_600_000:
            return self._inside.receive(group, topic, client_id=client_id, **own, **more)
        rows: list[Any] = []
        while len(rows) < limit:
            n = min(MOST, limit - len(rows))
            request = raw.receives(
                topic,
                group,
                n=n,
                invisible_ms=max(invisible_duration_ms, SHORTEST_MS),
                wait_ms=0 if rows else more.get("wait_ms", 0),
                filter=more.get("filter", "*"),
                sql=more.get("filter_type", "tag") == "sql92",
                attempt_id=more.get("attempt_id", ""),
            )
            frames = self._call("ReceiveMessage", request, client_id)
            found = raw.received(frames)
            if not found and raw.code(frames) != "MESSAGE_NOT_FOUND":
                _check(next(f.status for f in frames if f.WhichOneof("content") == "status"))
            rows += found
            if len(found) < n:
                break
        self._deliveries |= {
            row.system_properties.receipt_handle: (topic, group, row.system_properties.message_id)
            for row in rows
        }
        table = _received(rows)
        if invisible_duration_ms < SHORTEST_MS and rows:
            handles = self.change_invisible_duration(table, invisible_duration_ms)
            table = table.set_column(
                table.schema.get_field_index("receipt_handle"), "receipt_handle", handles.column(0)
            )
        return table

    def _by_delivery(self, receipts: Any) -> dict[tuple[str, str], list[tuple[str, str]]]:
        """Message ids and handles, by topic and group; of a handle nobody gave, any of them."""
        found = defaultdict(list)
        for handle in _handles(receipts):
            topic, group, message_id = self._deliveries.get(handle, ("", "", "x"))
            found[topic, group].append((message_id, handle))
        return found

    def _are_known(self, receipts: Any) -> bool:
        try:
            return all(handle in self._deliveries for handle in _handles(receipts))
        except (KeyError, TypeError):
            return False

    def ack(self, receipts: pa.Table | Sequence[str]) -> None:
        if not self._are_known(receipts):
            self._inside.ack(receipts)
            return
        for (topic, group), entries in self._by_delivery(receipts).items():
            _check(self._call("AckMessage", raw.acks(topic, group, entries)).status)

    def change_invisible_duration(
        self, receipts: pa.Table | Sequence[str], duration_ms: int
    ) -> pa.Table:
        if not self._are_known(receipts) or duration_ms < 1:
            return self._inside.change_invisible_duration(receipts, duration_ms)
        renewed = []
        for handle in _handles(receipts):
            topic, group, known = self._deliveries[handle]
            request = raw.changes(
                topic, group, handle=handle, invisible_ms=duration_ms, message_id=known
            )
            answer = self._call("ChangeInvisibleDuration", request)
            _check(answer.status)
            renewed.append(answer.receipt_handle)
            self._deliveries[answer.receipt_handle] = (topic, group, known)
        return pa.table({"receipt_handle": pa.array(renewed, pa.string())})

    def forward_to_dead_letter_queue(
        self, receipts: pa.Table | Sequence[str], *, reason: str = ""
    ) -> None:
        if reason or not self._are_known(receipts):
            self._inside.forward_to_dead_letter_queue(receipts, reason=reason)
            return
        for handle in _handles(receipts):
            topic, group, known = self._deliveries[handle]
            request = raw.buries(topic, group, handle=handle, message_id=known)
            _check(self._call("ForwardMessageToDeadLetterQueue", request).status)

    # -------------------------------------------------------------------------------- transactions

    def send_half(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> pa.Table:
        # At this endpoint the producers of a topic are one group, which has its name.
        known = self._producers.setdefault(producer_group, topic) == topic
        alone = [group for group, its in self._producers.items() if its == topic]
        if not known or len(alone) > 1 or not self._speakable(messages):
            return self._inside.send_half(
                topic, messages, producer_group=producer_group, immunity_ms=immunity_ms
            )
        found = list(self._messages(topic, messages, kind="TRANSACTION", immunity_ms=immunity_ms))
        answer = self._call("SendMessage", raw.sends(*found))
        _check(answer.status)
        for entry in answer.entries:
            self._halves[entry.transaction_id] = (topic, entry.message_id)
        return pa.table(
            {
                "message_id": [entry.message_id for entry in answer.entries],
                "transaction_id": [entry.transaction_id for entry in answer.entries],
            }
        )

    def fetch_checks(self, *, producer_group: str | None = None, **more: Any) -> pa.Table:
        asking = self._producers.get(producer_group or "", producer_group)
        found = self._inside.fetch_checks(producer_group=asking, **more)
        said = {topic: group for group, topic in self._producers.items()}
        named = [said.get(name, name) for name in found["producer_group"].to_pylist()]
        column = found.schema.get_field_index("producer_group")
        return found.set_column(column, "producer_group", pa.array(named, pa.string()))

    def end_transactions(
        self, resolutions: pa.Table, *, producer_group: str | None = None, **more: Any
    ) -> pa.Table:
        known = isinstance(resolutions, pa.Table) and resolutions.schema == schema.RESOLUTION
        rows = resolutions.to_pylist() if known else []
        wired = all(row["transaction_id"] in self._halves for row in rows)
        asking = self._producers.get(producer_group or "", producer_group)
        if more or not rows or not wired or asking not in (None, self._halves[_first(rows)][0]):
            return self._inside.end_transactions(resolutions, producer_group=asking, **more)
        for row in rows:
            topic, known = self._halves[row["transaction_id"]]
            said = {"commit": "COMMIT", "rollback": "ROLLBACK"}.get(
                row["resolution"], "TRANSACTION_RESOLUTION_UNSPECIFIED"
            )
            request = raw.ends(topic, row["transaction_id"], resolution=said, message_id=known)
            answer = self._call("EndTransaction", request)
            if answer.status.code == pb.Code.INVALID_TRANSACTION_ID:
                raise errors.TransactionEndedError(answer.status.message)
            _check(answer.status)
        return resolutions

    # ---------------------------------------------------------------------------------- lite topics

    def sync_lite_subscription(
        self,
        group: str,
        topic: str,
        *,
        client_id: str,
        action: str,
        lite_topics: Sequence[str] = (),
    ) -> list[str]:
        if action not in ACTIONS or not client_id.strip():
            return self._inside.sync_lite_subscription(
                group, topic, client_id=client_id, action=action, lite_topics=lite_topics
            )
        request = raw.lite(topic, group, action=ACTIONS[action], names=lite_topics)
        _check(self._call("SyncLiteSubscription", request, client_id).status)
        all_of_it = self._inside.lite_subscriptions(group, topic).to_pylist()
        return [row["lite_topic"] for row in all_of_it if row["client_id"] == client_id]


def _first(rows: list[dict[str, Any]]) -> str:
    return str(rows[0]["transaction_id"])


def _handles(receipts: Any) -> list[str]:
    if isinstance(receipts, pa.Table):
        return list(receipts["receipt_handle"].to_pylist())
    return [receipts] if isinstance(receipts, str) else list(receipts)


def _received(messages: list[Any]) -> pa.Table:
    rows = [_row(message, message.system_properties) for message in messages]
    return pa.Table.from_pylist(rows, schema=schema.RECEIVED)


def _row(message: Any, own: Any) -> dict[str, Any]:
    group = own.message_group or own.lite_topic
    user = {k: v for k, v in message.user_properties.items() if k != "__SHARDINGKEY"}
    if own.HasField("priority"):
        user["__PRIORITY"] = str(own.priority)
    return {
        "queue_id": own.queue_id,
        "queue_offset": own.queue_offset,
        "message_id": own.message_id,
        "tag": own.tag or None,
        "keys": list(own.keys) or None,
        "message_group": group or None,
        "properties": list(user.items()) or None,
        "body": message.body,
        "born_at_ms": raw.ms(own.born_timestamp),
        "stored_at_ms": raw.ms(own.store_timestamp),
        "deliver_at_ms": raw.ms(own.delivery_timestamp)
        if own.HasField("delivery_timestamp")
        else None,
        "delivery_attempt": own.delivery_attempt,
        "receipt_handle": own.receipt_handle,
    }
