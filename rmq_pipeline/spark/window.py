"""One window's conversation with the broker; Spark works in a thread beside it."""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError, FencedError, ReceiptHandleError
from rmq_pipeline.idempotency import IDEMPOTENCY_KEY, mark
from rmq_pipeline.spark import job
from rmq_pipeline.spark.batch import Batch, cut
from rmq_pipeline.spark.group_walk import Rules
from rmq_pipeline.spark.parcel import Given
from rmq_pipeline.spark.publication import Publication
from rmq_pipeline.spark.report import BatchReport, Ended
from rmq_pipeline.spark.settling import settle
from rmq_pipeline.spark.spec import ConsumerSpec
from rmq_pipeline.spark.tenure import Tenure
from rmq_pipeline.spark.verbs import Verbs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

#: How long a delivery may take; those of a dead window are ended by the next one's epoch.
INVISIBLE_MS: Final = 30 * 60_000
#: One long poll.
WAIT_MS: Final = 5_000
#: Fewer messages are one task: a second one costs more than it saves.
ROWS_PER_TASK: Final = 500
#: More messages than this at once are cut into two batches: while one is settled and its groups
#: are received again, Spark works on the other.
ROWS_TO_OVERLAP: Final = 20_000
_PENDING: Final = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a window ends, and how wide it is."""

    idle_s: float
    #: On the monotonic clock.
    ends_at: float
    #: Tasks of a micro-batch.
    parallelism: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A micro-batch that Spark works on, or will."""

    batch: Batch
    folder: Path
    received_at: float
    result: "Future[tuple[job.JobResult, float]]"


class _LostError(Exception):
    """A delivery has ended, or nobody knows of it: all that is in flight must come again."""


class Window:
    """Receives, hands to Spark, settles; ``run`` once.

    The broker holds a message group until its messages are settled, so a batch received while
    another is in flight has other groups, and their state is what the last settle left.
    """

    def __init__(
        self,
        spec: ConsumerSpec,
        verbs: Verbs,
        *,
        tenure: Tenure,
        spark: "Callable[[], SparkSession]",
        bounds: Bounds,
        handoff: Path,
    ) -> None:
        self._spec, self._verbs, self._tenure = spec, verbs, tenure
        self._spark, self._bounds, self._handoff = spark, bounds, handoff
        self._publication = Publication(verbs, group=spec.group, folder=spec.sink)
        self._rules = _rules(spec, verbs)
        self._pending: deque[_Pending] = deque()
        self._next_number = 0
        self._last_message = time.monotonic()
        self.ended: Ended = "idle"
        #: Times that everything in flight had to come again.
        self.lost = 0
        #: Files that dead windows staged, deleted.
        self.swept_files = 0

    def run(self) -> Iterator[BatchReport]:
        """The micro-batches as they are settled; then ``ended`` says why there are no more."""
        while True:
            self.swept_files += self._publication.finish_previous(epoch=self._tenure.epoch)
            stage = ThreadPoolExecutor(1, thread_name_prefix="spark")
            try:
                self.ended = yield from self._batches(stage)
            except FencedError:
                self._tenure.lose()
            except _LostError as error:
                self.lost += 1
                logger.warning("window opens anew name=%s why=%s", self._spec.window, error)
            else:
                return
            finally:
                # Spark may still write files: they are whole, and deleted, after this.
                stage.shutdown(wait=True, cancel_futures=True)
            self._discard_pending()
            if self._tenure.lost or not self._reopened():
                self.ended = "fenced"
                return

    def _reopened(self) -> bool:
        try:
            self._tenure.reopen()
        except FencedError:
            self._tenure.lose()
        # Messages are to come again: that is no time to be idle.
        self._last_message = time.monotonic()
        return not self._tenure.lost

    def _discard_pending(self) -> None:
        for pending in self._pending:
            result = pending.result
            if not result.cancelled() and result.exception() is None:
                self._publication.discard(result.result()[0].files)
        self._pending.clear()

    def _batches(self, stage: ThreadPoolExecutor) -> Generator[BatchReport, None, Ended]:
        while not self._tenure.lost:
            over = time.monotonic() >= self._bounds.ends_at
            if not over and self._has_room() and self._receive(stage):
                continue
            if self._pending:
                yield from self._settle_next(stage)
            elif over:
                return "length"
            elif time.monotonic() - self._last_message >= self._bounds.idle_s:
                return "idle"
        raise FencedError

    def _has_room(self) -> bool:
        # What is done is settled first: its groups may then be received again.
        done = bool(self._pending) and self._pending[0].result.done()
        return len(self._pending) < _PENDING and not done

    def _receive(self, stage: ThreadPoolExecutor) -> bool:
        """Hand what there is to Spark; whether there was anything."""
        started = time.monotonic()
        received = self._received(wait_ms=0 if self._pending else self._wait_ms())
        n = received.num_rows
        if n == 0:
            return False
        batches = cut(
            received,
            number=self._next_number,
            batches=2 if n > ROWS_TO_OVERLAP and not self._pending else 1,
            parts=min(self._bounds.parallelism, 1 + n // ROWS_PER_TASK),
            ordered=self._spec.order_by is not None,
        )
        self._next_number += len(batches)
        spark = self._spark()
        for batch in batches:
            self._pending.append(self._submitted(batch, stage, spark=spark, received_at=started))
        self._last_message = time.monotonic()
        return True

    def _wait_ms(self) -> int:
        now = time.monotonic()
        idle_s = self._last_message + self._bounds.idle_s - now
        left_s = min(idle_s, self._bounds.ends_at - now)
        return max(1, min(WAIT_MS, int(left_s * 1000)))

    def _received(self, *, wait_ms: int) -> pa.Table:
        try:
            received = self._verbs.receive(
                self._spec.topic,
                self._spec.group,
                limit=self._spec.max_batch,
                invisible_duration_ms=INVISIBLE_MS,
                filter=self._spec.filter,
                filter_type=self._spec.filter_type,
                wait_ms=wait_ms,
                client_id=self._spec.name,
                window=self._tenure.fence,
            )
            return self._marked(received)
        except BrokerUnavailableError as error:
            # What it leased, if it did, is unknown here and held until a newer epoch ends it.
            raise _LostError(str(error)) from error

    def _marked(self, received: pa.Table) -> pa.Table:
        """With what was seen before, where the consumer has an idempotency key."""
        key = self._spec.idempotency_key
        if key is None or not received.num_rows:
            return received
        held = [p.batch.received[IDEMPOTENCY_KEY.name] for p in self._pending]
        chunks = [chunk for column in held for chunk in column.chunks]
        return mark(
            self._verbs,
            received,
            group=self._spec.group,
            key=key,
            held=pa.chunked_array(chunks, pa.string()),
        )

    def _submitted(
        self,
        batch: Batch,
        stage: ThreadPoolExecutor,
        *,
        spark: "SparkSession",
        received_at: float,
    ) -> _Pending:
        spec, epoch = self._spec, self._tenure.epoch
        state = None
        if spec.state is not None:
            groups = batch.message_groups()
            state = self._verbs.keyed_state(spec.group, spec.topic, message_groups=groups)
        folder = self._handoff / f"{epoch}-{batch.number}"
        folder.mkdir()
        parts = batch.given(folder, state)
        this = job.Job(self._rules, folder, sink=spec.sink, epoch=epoch, batch=batch.number)
        return _Pending(batch, folder, received_at, stage.submit(_timed, spark, parts, this=this))

    def _settle_next(self, stage: ThreadPoolExecutor) -> Iterator[BatchReport]:
        pending = self._pending[0]
        try:
            result, spark_s = pending.result.result()
        except job.WorkerDiedError as error:
            logger.warning("python worker died name=%s, messages one by one", self._spec.name)
            yield from self._isolate(pending, stage, error=error)
        else:
            yield self._settle(pending, result, spark_s=spark_s)
        self._pending.popleft()

    def _isolate(
        self, pending: _Pending, stage: ThreadPoolExecutor, *, error: job.WorkerDiedError
    ) -> Generator[BatchReport, None, bool]:
        """Settle in halves what killed a worker, down to the message; whether one failed."""
        if pending.batch.received.num_rows == 1:
            yield self._settle(pending, job.failed(str(error)), spark_s=0.0)
            return True
        failed = False
        ordered = self._spec.order_by is not None
        halves = pending.batch.halves(number=self._next_number, ordered=ordered)
        self._next_number += 2
        divided = ordered and halves[0].goes_on_in(halves[1])
        for half in halves:
            if failed and divided:
                # What lies behind a failure was given back by its settle.
                break
            again = self._submitted(
                half, stage, spark=self._spark(), received_at=pending.received_at
            )
            try:
                result, spark_s = again.result.result()
            except job.WorkerDiedError as died:
                failed = yield from self._isolate(again, stage, error=died)
            else:
                report = self._settle(again, result, spark_s=spark_s)
                failed = report.acked < report.messages
                yield report
        return failed

    def _settle(self, pending: _Pending, result: job.JobResult, *, spark_s: float) -> BatchReport:
        outcomes = pending.batch.outcomes(result.exceptions, run_id=self._tenure.owner)
        fence, number = self._tenure.fence, pending.batch.number
        try:
            answer = settle(
                self._verbs,
                self._spec,
                outcomes=outcomes,
                result=result,
                fence=fence,
                number=number,
            )
        except ReceiptHandleError as error:
            raise _LostError(str(error)) from error
        self._publication.add(result.files, version=int(answer.get("sink_version", 0)))
        shutil.rmtree(pending.folder, ignore_errors=True)
        self._last_message = time.monotonic()
        messages = pending.batch.received.num_rows
        return BatchReport(
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
            spark_s=spark_s,
        )


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


def _timed(
    spark: "SparkSession", parts: list[Given], *, this: job.Job
) -> tuple[job.JobResult, float]:
    started = time.monotonic()
    return job.run(spark, parts, job=this), time.monotonic() - started
