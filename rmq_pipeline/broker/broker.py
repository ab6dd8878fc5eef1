"""The façade: all verbs of an open broker. Doors call it; so may tests, notebooks and scripts."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker import admin, arguments, queries, ripe, seal, settling
from rmq_pipeline.broker.deliver import Subscribe
from rmq_pipeline.broker.delivering import deliver_scheduled
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.progress import Due, ResetOffset
from rmq_pipeline.broker.publish import prepare
from rmq_pipeline.broker.receiving import receive
from rmq_pipeline.broker.reviving import revive
from rmq_pipeline.broker.upkeep import Mode, Upkeep
from rmq_pipeline.broker.windows import CloseWindow, OpenWindow, RenewWindow
from rmq_pipeline.broker.writer import Request, Writer
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.settings import Settings

Window = tuple[str, int]

#: The broker's own seal goes on until nothing is due; it ends early when the broker closes.
_SEAL_ALL_BYTES = 1 << 50


class Broker:
    """An open broker. Every method may be called from any thread.

    Errors are those of rmq_pipeline.errors; one that is raised has changed nothing, unless it is
    a StorageError.
    """

    def __init__(self, engine: Engine, mode: Mode) -> None:
        self._engine = engine
        self._mode = mode
        self._started = time.monotonic()
        self._upkeep = Upkeep(engine, mode, seal=lambda: self.seal(limit_bytes=_SEAL_ALL_BYTES))

    @classmethod
    def open(
        cls,
        home: Path | str,
        *,
        clock: Clock | None = None,
        upkeep: Mode = "self",
        flush: Literal["sync", "async"] = "sync",
        settings: Settings | None = None,
    ) -> Self:
        """Open a home, or begin one; what was answered before is there again.

        Args:
            upkeep: who does background work: this process, Dagster's runs, or nobody.
            flush: sync answers after the disk has it; async syncs every 500 ms.

        Raises:
            HomeLockedError: another process has it open.
            HomeFormatError: a newer version wrote it.
            CorruptLogError: the log is damaged; names the place.
        """
        chosen = settings or Settings()
        engine = Engine.open(Path(home), clock=clock or SystemClock(), settings=chosen, flush=flush)
        return cls(engine, upkeep)

    def close(self) -> None:
        """Answer what is asked, end the background work, let the home go."""
        self._engine.arrivals.close()
        self._upkeep.stop()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def writer(self) -> Writer:
        """The writer, for tests that put several requests into one frame."""
        return self._engine.writer

    @property
    def engine(self) -> Engine:
        """The parts of the open broker."""
        return self._engine

    def _described(self, request: Request) -> dict[str, Any]:
        described: dict[str, Any] = self._engine.submit(request).describe()
        return described

    def create_topic(
        self, name: str, *, type: str = "normal", queues: int = 8, partition_time: str = "stored"
    ) -> dict[str, Any]:
        """Create a topic; AlreadyExistsError when there is one."""
        return self._described(admin.CreateTopic(name, type, queues, partition_time, False))

    def ensure_topic(
        self, name: str, *, type: str = "normal", queues: int = 8, partition_time: str = "stored"
    ) -> dict[str, Any]:
        """The topic, created if need be; AlreadyExistsError when it has other settings."""
        return self._described(admin.CreateTopic(name, type, queues, partition_time, True))

    def alter_topic(
        self, name: str, *, queues: int | None = None, partition_time: str | None = None
    ) -> dict[str, Any]:
        """Give a topic more queues, or another partition time."""
        return self._described(admin.AlterTopic(name, queues, partition_time))

    def delete_topic(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a topic; InUseError while messages are in flight or scheduled, unless forced."""
        dropped: dict[str, Any] = self._engine.submit(admin.DeleteTopic(name, force))
        return dropped

    def list_topics(self) -> pa.Table:
        """All topics: name, type, queues, partition_time, created_at_ms."""
        return admin.topics_table(self._engine.state)

    def describe_topic(self, name: str) -> dict[str, Any]:
        """A topic's fields, and min_offset and max_offset of each queue."""
        topic, bounds = self._engine.submit(queries.Offsets(name))
        offsets = [
            {"queue_id": i, "min_offset": low, "max_offset": high}
            for i, (low, high) in enumerate(bounds)
        ]
        return {**topic.describe(), "offsets": offsets}

    def create_group(
        self,
        name: str,
        *,
        order: str = "none",
        max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS,
        backoff_ms: Sequence[int] = limits.BACKOFF_MS,
        on_failure: str = "dead_letter",
    ) -> dict[str, Any]:
        """Create a consumer group and its dead letter topic; AlreadyExistsError when it exists."""
        request = admin.CreateGroup(name, order, max_attempts, backoff_ms, on_failure, False)
        return self._described(request)

    def ensure_group(
        self,
        name: str,
        *,
        order: str = "none",
        max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS,
        backoff_ms: Sequence[int] = limits.BACKOFF_MS,
        on_failure: str = "dead_letter",
    ) -> dict[str, Any]:
        """The group, created if need be; AlreadyExistsError when it has other settings."""
        request = admin.CreateGroup(name, order, max_attempts, backoff_ms, on_failure, True)
        return self._described(request)

    def alter_group(
        self,
        name: str,
        *,
        order: str | None = None,
        max_attempts: int | None = None,
        backoff_ms: Sequence[int] | None = None,
        on_failure: str | None = None,
    ) -> dict[str, Any]:
        """Other retries for a group; another order is refused."""
        changes = {
            "order": order,
            "max_attempts": max_attempts,
            "backoff_ms": backoff_ms,
            "on_failure": on_failure,
        }
        return self._described(admin.AlterGroup(name, changes))

    def delete_group(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a group and its progress; InUseError with messages in flight, unless forced."""
        dropped: dict[str, Any] = self._engine.submit(admin.DeleteGroup(name, force))
        return dropped

    def list_groups(self) -> pa.Table:
        """All groups: name, order, max_attempts, backoff_ms, on_failure, created_at_ms."""
        return admin.groups_table(self._engine.state)

    def describe_group(self, name: str) -> dict[str, Any]:
        """A group's fields."""
        return self._engine.state.group(name).describe()

    def subscribe(self, group: str, topic: str) -> None:
        """From now on the whole topic counts as the group's lag."""
        self._engine.submit(Subscribe(topic, group))

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store a table of schema.SEND, whole or not at all; answers schema.SENT row for row."""
        engine = self._engine
        engine.admit()
        prepared = prepare(
            engine.state.topic(topic).topic,
            messages,
            ids=engine.ids,
            delay_max_ms=engine.settings.delay_max_ms,
            now_ms=engine.clock.now_ms(),
        )
        return engine.submit(prepared).table()

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int = 32,
        invisible_duration_ms: int = 60_000,
        filter: str = "*",
        wait_ms: int = 0,
        client_id: str = "",
        window: Window | None = None,
    ) -> pa.Table:
        """Lease up to ``limit`` messages for a while, as schema.RECEIVED in (queue, offset) order.

        Args:
            filter: ``*`` or tags joined by ||.
            wait_ms: how long to wait for the first message.
            window: name and epoch of the consumer's window these leases belong to.
        """
        request = arguments.receive(
            self._engine,
            topic,
            group=group,
            limit=limit,
            invisible_duration_ms=invisible_duration_ms,
            filter=filter,
            client_id=client_id,
            window=window,
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
        """Settle deliveries as hopeless: they are in %DLQ%group when this returns."""
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

    def read(self, topic: str, queue_id: int, *, offset: int, limit: int) -> pa.Table:
        """Messages [offset, offset + limit) of a queue as schema.READ, without a group."""
        return queries.read(self._engine, topic, queue_id=queue_id, offset=offset, limit=limit)

    def offset_at(self, topic: str, queue_id: int, *, at_ms: int) -> int:
        """The first offset stored at or after a moment; the end when there is none."""
        return queries.offset_at(self._engine, topic, queue_id=queue_id, at_ms=at_ms)

    def reset_offset(
        self,
        group: str,
        topic: str,
        *,
        to_offset: int | None = None,
        to_time_ms: int | None = None,
        to_latest: bool = False,
        to_earliest: bool = False,
        queue_id: int | None = None,
    ) -> pa.Table:
        """Put a group elsewhere: its leases and waiting message groups there are gone.

        Returns:
            queue_id, queue_offset of each queue that was reset.
        """
        offsets, clip = arguments.reset(
            self._engine,
            topic,
            to_offset=to_offset,
            to_time_ms=to_time_ms,
            to_latest=to_latest,
            to_earliest=to_earliest,
            queue_id=queue_id,
        )
        done: dict[int, int] = self._engine.submit(ResetOffset(group, topic, offsets, clip))
        return pa.table(
            {
                "queue_id": pa.array(list(done), pa.int32()),
                "queue_offset": pa.array(list(done.values()), pa.int64()),
            }
        )

    def keyed_state(
        self, group: str, topic: str, *, message_groups: pa.Table | None = None
    ) -> pa.Table | None:
        """A consumer's keyed state, of these message groups or of all; None when never written."""
        return queries.keyed_state(self._engine, group, topic=topic, message_groups=message_groups)

    def sink_files(self, group: str) -> pa.Table:
        """The files that the group's settles have named, in that order."""
        group_id = self._engine.state.group(group).group_id
        self._engine.dispatched()
        return self._engine.database.sink_files(group_id)

    def sql(self, query: str, *, timeout_s: float = limits.QUERY_TIMEOUT_S) -> pa.Table:
        """One SELECT over the documented views; it sees everything answered before."""
        self._engine.dispatched()
        return self._engine.database.query(query, timeout_s=timeout_s)

    def due(self) -> dict[str, Any]:
        """What background work is due, and which groups have something to receive."""
        answer: dict[str, Any] = self._engine.submit(Due())
        answer["jobs"]["seal"].update(ripe.due(self._engine))
        return answer

    def open_window(
        self, name: str, *, owner: str, duration_ms: int, takeover: bool = False
    ) -> dict[str, Any]:
        """Become the one who does this work: epoch, or yielded_to whoever does.

        A new epoch of consumer/<group> ends the leases of the older ones at once.
        """
        answer: dict[str, Any] = self._engine.submit(OpenWindow(name, owner, duration_ms, takeover))
        return answer

    def renew_window(self, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        """Hold it for longer; FencedError when somebody took over."""
        answer: dict[str, Any] = self._engine.submit(RenewWindow(name, epoch, duration_ms))
        return answer

    def close_window(self, name: str, *, epoch: int) -> None:
        """Let the next one begin."""
        self._engine.submit(CloseWindow(name, epoch))

    def deliver_scheduled(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Deliver what is due now and within ``wait_ms``, each to the millisecond; a report."""
        wait = arguments.poll_ms(wait_ms)
        return deliver_scheduled(self._engine, wait_ms=wait, limit=limit, window=window)

    def revive(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Record leases that have ended, bury what has no attempt left; a report."""
        wait = arguments.poll_ms(wait_ms)
        return revive(self._engine, wait_ms=wait, limit=limit, window=window)

    def seal(
        self, *, limit_bytes: int = limits.LOG_FILE_BYTES, window: Window | None = None
    ) -> dict[str, Any]:
        """Write old log into Parquet segments and drop it; a report."""
        return seal.seal(self._engine, limit_bytes=limit_bytes, window=window)

    def status(self) -> dict[str, Any]:
        """What an operator asks first."""
        return queries.status(
            self._engine, self._started, mode=self._mode, fallback=self._upkeep.last_fallback
        )
