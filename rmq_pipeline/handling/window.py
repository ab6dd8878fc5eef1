"""The receives and settles of one window; an engine works in a thread next to it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Required, TypedDict

import pyarrow as pa
from typing_extensions import Unpack

from rmq_pipeline import tracing
from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import (
    BrokerUnavailableError,
    BusyError,
    FencedError,
    MessageBodyTooLargeError,
    ReceiptHandleError,
    RocketMQError,
)
from rmq_pipeline.handling import sink
from rmq_pipeline.handling.batch import Batch, cut
from rmq_pipeline.handling.executor import Engine, Executor, Pending, Work
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.pace import BATCH_S, Pace
from rmq_pipeline.handling.results import (
    BatchReport,
    BatchResult,
    Ended,
    TooMuchError,
    WindowReport,
    WorkerDiedError,
    failed_alone,
)
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.window_lease import WindowLease
from rmq_pipeline.idempotency import IDEMPOTENCY_KEY, mark
from rmq_pipeline.lake.publication import (
    GRACE_MS,
    delete_staged,
    publish,
    publish_version,
    replaced_files,
)
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import Address
from rmq_pipeline.verb import Window as Fence
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)

#: Invisible duration of a delivery; the next window's epoch ends those of a dead window.
INVISIBLE_MS: Final = 30 * 60_000


class LostError(Exception):
    """A delivery has ended or is unknown, so all messages in flight must be redelivered."""


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


_PAUSE_S: Final = 0.25
_TRIES: Final = 240


def settle(
    verbs: Verbs,
    spec: ConsumerSpec,
    *,
    outcomes: pa.Table,
    result: BatchResult,
    fence: Fence,
    number: int,
) -> dict[str, Any]:
    """Settle the outcomes of micro-batch ``number`` and its results; return the counts.

    Raises:
        FencedError, ReceiptHandleError: nothing was changed.
        TooMuchError: the batch exceeds the limit of one settle; nothing was changed.
        BusyError: the broker was busy for a minute, or does not answer.
    """
    result.check_size()
    pause = threading.Event()
    for tries_left in reversed(range(_TRIES)):
        try:
            return verbs.settle(
                spec.group,
                outcomes,
                # Repeating is safe: the broker remembers the last settle of a window.
                settle_id=f"{fence[1]}-{number}",
                window=fence,
                publish=result.publish or None,
                sink_files=result.files if result.files.num_rows else None,
                state=result.state,
                topic=spec.topic,
            )
        except MessageBodyTooLargeError as error:
            raise TooMuchError(str(error), is_refused=True) from error
        except BusyError as error:
            # The client has already retried for long enough to reach an absent broker.
            if isinstance(error, BrokerUnavailableError) or not tries_left:
                raise
            logger.info("settle waits group=%s number=%d why=%s", spec.group, number, error)
            pause.wait(_PAUSE_S)
    raise AssertionError("unreachable")


class Publication:
    """The published files of a group's sink; does nothing without a sink."""

    def __init__(
        self, verbs: Verbs, *, group: str, folder: Address | None, columns: pa.Schema | None = None
    ) -> None:
        self._verbs = verbs
        self._group = group
        self._folder = None if folder is None else at(folder)
        self._columns = columns

    def finish_previous(self, *, epoch: int) -> int:
        """Publish what earlier windows settled; delete their other files and return the number.

        Call it after window ``epoch`` is open: the broker then refuses settles of older windows.
        """
        if self._folder is None:
            return 0
        self._folder.create_folder()
        self._folder.check_put_if_absent()
        named = publish(self._verbs, self._group, sink=self._folder, columns=self._columns)
        replaced = replaced_files(self._verbs, self._group, grace_ms=GRACE_MS)
        kept = [path for path, over in replaced.items() if not over]
        return len(sink.delete_unnamed(self._folder, named, epoch=epoch, kept=kept))

    def add(self, settled: pa.Table, *, version: int) -> None:
        """Publish the files that a settle named, as a version of the sink."""
        if self._folder is not None and settled.num_rows:
            publish_version(
                self._verbs,
                self._group,
                sink=self._folder,
                version=version,
                add=settled,
                remove=[],
                columns=self._columns,
            )

    def discard(self, staged: pa.Table) -> None:
        """Delete the staged files of a refused settle; on an error the next window deletes them."""
        if self._folder is None or not staged.num_rows:
            return
        try:
            # Ask the broker: the refused call may repeat a settle that had succeeded.
            named = self._verbs.sink_files(self._group)["path"].to_pylist()
            delete_staged(self._folder, staged, named=named)
        except (RocketMQError, OSError) as error:
            logger.warning("staged files kept group=%s why=%s", self._group, error)


#: Duration of one long poll.
WAIT_MS: Final = 5_000
#: Larger receives are divided into two batches: while one is settled and its groups are received
#: again, the engine handles the other.
ROWS_TO_OVERLAP: Final = 20_000
_PENDING: Final = 2
#: Maximum number of message groups for which the log says that a message failed alone.
TOLD_MOST: Final = 100
#: A window that waits for its handler checks this often whether it was fenced.
_LOOK_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a window ends."""

    idle_s: float
    ends: Deadline


class Window:
    """Receives messages, passes them to the engine, and settles; call ``run`` once.

    The broker holds back a message group until its messages are settled. A batch received while
    another is in flight therefore has other groups, and the last settle stored their state.
    """

    def __init__(
        self,
        spec: ConsumerSpec,
        verbs: Verbs,
        *,
        lease: WindowLease,
        engine: Engine,
        bounds: Bounds,
    ) -> None:
        self._spec, self._verbs, self._lease = spec, verbs, lease
        self._engine, self._bounds = engine, bounds
        self._publication = Publication(
            verbs, group=spec.group, folder=spec.sink, columns=spec.sink_schema
        )
        self._rules = _rules(spec, verbs)
        self._pace = Pace(
            spec.max_batch,
            first=engine.first_rows,
            batch_s=BATCH_S,
            least=engine.least_rows,
            at_once=engine.at_once,
        )
        self._pending: deque[Pending] = deque()
        self._next_number = 0
        #: Number of messages that failed alone, and the groups for which this was logged.
        self._failed_alone = 0
        self._told: set[str | None] = set()
        self._idle = Deadline(self._bounds.idle_s)
        self.ended: Ended = "idle"
        #: Number of times that everything in flight had to be redelivered.
        self.lost = 0
        #: Number of deleted files that dead windows had staged.
        self.swept_files = 0

    def run(self) -> Generator[BatchReport, None, None]:
        """Yield a report per settled micro-batch; ``ended`` then says why the window ended."""
        while True:
            self.swept_files += self._publication.finish_previous(epoch=self._lease.epoch)
            try:
                # The engine may still be writing files: after this block they are complete, and can
                # be deleted.
                with self._spans(), Executor(self._engine) as executor:
                    self.ended = yield from self._batches(executor)
            except FencedError:
                self._lease.lose()
            except LostError as error:
                self.lost += 1
                logger.warning("window reopens name=%s why=%s", self._spec.window, error)
            else:
                return
            self._discard_pending()
            if self._lease.lost or not self._reopened():
                self.ended = "fenced"
                return

    @contextmanager
    def _spans(self) -> Iterator[None]:
        """End the spans of the batches that are left in flight when the block ends."""
        try:
            yield
        finally:
            for pending in self._pending:
                pending.span.failed(
                    "not_settled", "The window ended before this batch was settled."
                )
                pending.span.end()

    def _reopened(self) -> bool:
        try:
            self._lease.reopen()
        except FencedError:
            self._lease.lose()
        # Messages will be redelivered, so the idle time starts again.
        self._idle = Deadline(self._bounds.idle_s)
        return not self._lease.lost

    def _discard_pending(self) -> None:
        for pending in self._pending:
            left = pending.left()
            if left is not None:
                self._publication.discard(left.files)
        self._pending.clear()

    def _batches(self, executor: Executor) -> Generator[BatchReport, None, Ended]:
        while not self._lease.lost:
            over = self._bounds.ends.is_over
            if not over and self._has_capacity() and self._receive(executor):
                continue
            if self._pending:
                yield from self._settle_next(executor)
            elif over:
                return "length"
            elif self._idle.is_over:
                return "idle"
        raise FencedError

    def _has_capacity(self) -> bool:
        # Finished batches are settled first: their groups can then be received again.
        done = bool(self._pending) and self._pending[0].done
        return len(self._pending) < _PENDING and not done

    def _receive(self, executor: Executor) -> bool:
        """Receive messages and submit them; return False if there were none."""
        started = time.monotonic()
        received = receive(
            self._spec,
            self._verbs,
            fence=self._lease.fence,
            limit=self._pace.limit,
            wait_ms=0 if self._pending else self._wait_ms(),
            held=[pending.batch for pending in self._pending],
        )
        n = received.num_rows
        if n == 0:
            return False
        batches = cut(
            received,
            number=self._next_number,
            batches=2 if n > ROWS_TO_OVERLAP and not self._pending else 1,
            parts=self._engine.parts(n),
            ordered=self._spec.order_by is not None,
        )
        self._next_number += len(batches)
        for batch in batches:
            self._pending.append(self._submitted(batch, executor, received_at=started))
        self._idle = Deadline(self._bounds.idle_s)
        return True

    def _wait_ms(self) -> int:
        left_s = min(self._idle.left_s, self._bounds.ends.left_s)
        return max(1, min(WAIT_MS, int(left_s * 1000)))

    def _submitted(self, batch: Batch, executor: Executor, *, received_at: float) -> Pending:
        spec = self._spec
        state = None
        if spec.state is not None:
            groups = batch.message_groups()
            state = self._verbs.keyed_state(spec.group, spec.topic, message_groups=groups)
        span = tracing.begin_batch(batch.received, topic=spec.topic, group=spec.group)
        work = Work(
            self._rules,
            batch,
            state,
            sink=spec.sink,
            epoch=self._lease.epoch,
            is_suspect=self._lease.follows_unclosed,
            span=span,
        )
        try:
            return executor.submit(work, received_at=received_at)
        except BaseException as error:
            span.ended_by(error)
            raise

    def _settle_next(self, executor: Executor) -> Iterator[BatchReport]:
        pending = self._pending[0]
        try:
            with pending.span:
                result, work_s = self._result(pending)
                batch = pending.batch
                self._pace.handled(
                    batch.received.num_rows,
                    work_s,
                    failed=result.not_done(),
                    parts=batch.parts,
                    share=max(result.shares().values()),
                )
                report = self._settle(pending, result, work_s=work_s)
        except (WorkerDiedError, TooMuchError) as error:
            logger.warning("settled in parts name=%s why=%s", self._spec.name, error)
            alone = self._failed_alone
            yield from self._isolate(pending, executor, error=error)
            # If a message failed alone, it was too large, and the batch was not.
            if isinstance(error, TooMuchError) and error.is_refused and self._failed_alone == alone:
                self._pace.refused(pending.batch.received.num_rows)
        else:
            self._pace.settled(report.messages)
            yield report
        self._pending.popleft()

    def _result(self, pending: Pending) -> tuple[BatchResult, float]:
        """Wait for the engine's result of a batch, but stop if the window is fenced.

        Another window then has the messages, so further calls would be repetitions. The engine
        starts no further part once the executor ends.
        """
        while not pending.is_done_within(_LOOK_S):
            if self._lease.lost:
                raise FencedError
        return pending.result()

    def _isolate(
        self, pending: Pending, executor: Executor, *, error: WorkerDiedError | TooMuchError
    ) -> Generator[BatchReport, None, bool]:
        """Settle in halves a batch that killed a worker or is too large, down to one message.

        Each half is handled again, because rows, published messages and sink files belong to all
        messages of a call.

        Returns:
            True if a message failed.
        """
        if pending.batch.received.num_rows == 1:
            self._tell(pending, error)
            yield self._settle(pending, failed_alone(error), work_s=0.0)
            return True
        failed = False
        ordered = self._spec.order_by is not None
        halves = pending.batch.halves(number=self._next_number, ordered=ordered)
        self._next_number += 2
        divided = ordered and halves[0].goes_on_in(halves[1])
        for half in halves:
            if failed and divided:
                # The settle of the failed half released the messages behind it.
                break
            again = self._submitted(half, executor, received_at=pending.received_at)
            try:
                with again.span:
                    result, work_s = self._result(again)
                    report = self._settle(again, result, work_s=work_s)
            except (WorkerDiedError, TooMuchError) as another:
                failed = yield from self._isolate(again, executor, error=another)
            else:
                failed = report.acked < report.messages
                yield report
        return failed

    def _tell(self, pending: Pending, error: WorkerDiedError | TooMuchError) -> None:
        """Log that a message fails on its own, once per message group."""
        self._failed_alone += 1
        (message_group,) = pending.batch.received["message_group"].to_pylist()
        if message_group not in self._told and len(self._told) < TOLD_MOST:
            self._told.add(message_group)
            logger.error(
                "messages fail group=%s message_group=%s first=%s why=%s",
                self._spec.group,
                message_group,
                pending.batch.received["message_id"][0].as_py(),
                error,
            )

    def _settle(self, pending: Pending, result: BatchResult, *, work_s: float) -> BatchReport:
        outcomes = pending.batch.outcomes(result.exceptions, run_id=self._lease.owner)
        fence, number = self._lease.fence, pending.batch.number
        try:
            with pending.span.publishing(result.publish) as publish:
                traced = replace(result, publish=publish)
                # A context must not make a result too large that was not.
                fits = max(traced.shares().values()) <= 1
                answer = settle(
                    self._verbs,
                    self._spec,
                    outcomes=outcomes,
                    result=traced if fits else result,
                    fence=fence,
                    number=number,
                )
        except ReceiptHandleError as error:
            raise LostError(str(error)) from error
        except TooMuchError:
            self._publication.discard(result.files)
            raise
        self._publication.add(result.files, version=int(answer.get("sink_version", 0)))
        self._idle = Deadline(self._bounds.idle_s)
        messages = pending.batch.received.num_rows
        report = BatchReport(
            epoch=fence[1],
            number=number,
            messages=messages,
            acked=int(answer["acked"]),
            retried=int(answer["retried"]),
            dead_lettered=int(answer["dead_lettered"]),
            parked=int(answer.get("parked", 0)),
            released=messages - outcomes.num_rows,
            rows=sum(result.files["rows"].to_pylist()),
            files=result.files.num_rows,
            bytes=sum(result.files["bytes"].to_pylist()),
            published={topic: table.num_rows for topic, table in result.publish.items()},
            seconds=time.monotonic() - pending.received_at,
            work_s=work_s,
            failures=pending.batch.failures(result.exceptions),
        )
        pending.span.settled(report)
        return report


def _rules(spec: ConsumerSpec, verbs: Verbs) -> Rules:
    return Rules(
        handler=spec.handler,
        ordered=spec.order_by is not None,
        state_schema=spec.state,
        sink_schema=spec.sink_schema,
        partition_time=spec.partition_time if spec.sink_schema is not None else "",
        origin=spec.origin,
        publishes={topic: str(verbs.describe_topic(topic)["type"]) for topic in spec.publishes},
    )


IDLE_S: Final = 20.0
LENGTH_S: Final = 600.0


class Terms(TypedDict, total=False):
    """Owner and limits of a window, independent of its engine."""

    #: Identifies the owner; unique to this run.
    owner: Required[str]
    #: Seconds without a message after which the window ends; default 20.
    idle_s: float
    #: Maximum length of the window in seconds; default 600.
    length_s: float
    #: Called after each settled micro-batch, in the caller's thread.
    on_batch: Callable[[BatchReport], None] | None
    #: Take over an open window instead of yielding to it.
    takeover: bool


def run_window(
    spec: ConsumerSpec, verbs: Verbs, *, engine: Engine, **terms: Unpack[Terms]
) -> WindowReport:
    """Handle a group's messages until none come.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        engine: runs the handler; not used before the first message.
        terms: see Terms.

    Raises:
        BrokerUnavailableError: no broker answers; the next window continues after the last settle.
        RocketMQError: the broker refused a micro-batch for another reason than its receipts.
    """
    started, ends = time.monotonic(), Deadline(terms.get("length_s", LENGTH_S))
    on_batch = terms.get("on_batch")
    lease = WindowLease(verbs, name=spec.window, owner=terms["owner"])
    report = WindowReport(spec.name, spec.topic, spec.group)
    report.yielded_to = lease.open(takeover=terms.get("takeover", False))
    if report.yielded_to is not None:
        report.ended = "yielded"
        return report
    bounds = Bounds(idle_s=terms.get("idle_s", IDLE_S), ends=ends)
    with lease:
        window = Window(spec, verbs, lease=lease, engine=engine, bounds=bounds)
        # Closing stops all work, also if on_batch raises.
        with closing(window.run()) as batches:
            for batch in batches:
                report.add(batch)
                if on_batch is not None:
                    on_batch(batch)
    report.ended, report.lost, report.swept_files = window.ended, window.lost, window.swept_files
    report.epoch, report.seconds = lease.epoch, time.monotonic() - started
    return report
