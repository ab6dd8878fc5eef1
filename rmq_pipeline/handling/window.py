"""The receives and settles of one window; an engine works in a thread next to it."""

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

from rmq_pipeline.errors import FencedError, ReceiptHandleError
from rmq_pipeline.handling.batch import Batch, cut
from rmq_pipeline.handling.engine import Engine, Work
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.intake import LostError, receive
from rmq_pipeline.handling.pace import BATCH_S, Pace
from rmq_pipeline.handling.publication import Publication
from rmq_pipeline.handling.report import BatchReport, Ended
from rmq_pipeline.handling.settling import settle
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.stage import Pending, Stage
from rmq_pipeline.handling.tenure import Tenure
from rmq_pipeline.handling.worked import TooMuchError, Worked, WorkerDiedError, failed_alone
from rmq_pipeline.verbs import Verbs

logger = logging.getLogger(__name__)

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
    #: On the monotonic clock.
    ends_at: float


class Window:
    """Receives messages, passes them to the engine, and settles; call ``run`` once.

    The broker holds back a message group until its messages are settled. A batch received while
    another is in flight therefore has other groups, and the last settle stored their state.
    """

    def __init__(
        self, spec: ConsumerSpec, verbs: Verbs, *, tenure: Tenure, engine: Engine, bounds: Bounds
    ) -> None:
        self._spec, self._verbs, self._tenure = spec, verbs, tenure
        self._engine, self._bounds = engine, bounds
        self._publication = Publication(verbs, group=spec.group, folder=spec.sink)
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
        self._last_message = time.monotonic()
        self.ended: Ended = "idle"
        #: Number of times that everything in flight had to be redelivered.
        self.lost = 0
        #: Number of deleted files that dead windows had staged.
        self.swept_files = 0

    def run(self) -> Generator[BatchReport, None, None]:
        """Yield a report per settled micro-batch; ``ended`` then says why the window ended."""
        while True:
            self.swept_files += self._publication.finish_previous(epoch=self._tenure.epoch)
            try:
                # The engine may still be writing files: after this block they are complete, and can
                # be deleted.
                with Stage(self._engine) as stage:
                    self.ended = yield from self._batches(stage)
            except FencedError:
                self._tenure.lose()
            except LostError as error:
                self.lost += 1
                logger.warning("window opens anew name=%s why=%s", self._spec.window, error)
            else:
                return
            self._discard_pending()
            if self._tenure.lost or not self._reopened():
                self.ended = "fenced"
                return

    def _reopened(self) -> bool:
        try:
            self._tenure.reopen()
        except FencedError:
            self._tenure.lose()
        # Messages will be redelivered, so the idle time starts again.
        self._last_message = time.monotonic()
        return not self._tenure.lost

    def _discard_pending(self) -> None:
        for pending in self._pending:
            left = pending.left()
            if left is not None:
                self._publication.discard(left.files)
        self._pending.clear()

    def _batches(self, stage: Stage) -> Generator[BatchReport, None, Ended]:
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
        # Finished batches are settled first: their groups can then be received again.
        done = bool(self._pending) and self._pending[0].done
        return len(self._pending) < _PENDING and not done

    def _receive(self, stage: Stage) -> bool:
        """Receive messages and submit them; return False if there were none."""
        started = time.monotonic()
        received = receive(
            self._spec,
            self._verbs,
            fence=self._tenure.fence,
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
            self._pending.append(self._submitted(batch, stage, received_at=started))
        self._last_message = time.monotonic()
        return True

    def _wait_ms(self) -> int:
        now = time.monotonic()
        idle_s = self._last_message + self._bounds.idle_s - now
        left_s = min(idle_s, self._bounds.ends_at - now)
        return max(1, min(WAIT_MS, int(left_s * 1000)))

    def _submitted(self, batch: Batch, stage: Stage, *, received_at: float) -> Pending:
        spec = self._spec
        state = None
        if spec.state is not None:
            groups = batch.message_groups()
            state = self._verbs.keyed_state(spec.group, spec.topic, message_groups=groups)
        work = Work(
            self._rules,
            batch,
            state,
            sink=spec.sink,
            epoch=self._tenure.epoch,
            is_suspect=self._tenure.follows_unclosed,
        )
        return stage.submit(work, received_at=received_at)

    def _settle_next(self, stage: Stage) -> Iterator[BatchReport]:
        pending = self._pending[0]
        try:
            worked, work_s = self._result(pending)
            batch = pending.batch
            self._pace.worked(
                batch.received.num_rows,
                work_s,
                failed=worked.not_done(),
                parts=batch.parts,
                share=max(worked.shares().values()),
            )
            report = self._settle(pending, worked, work_s=work_s)
        except (WorkerDiedError, TooMuchError) as error:
            logger.warning("settled in parts name=%s why=%s", self._spec.name, error)
            alone = self._failed_alone
            yield from self._isolate(pending, stage, error=error)
            # If a message failed alone, it was too large, and the batch was not.
            if isinstance(error, TooMuchError) and error.is_refused and self._failed_alone == alone:
                self._pace.refused(pending.batch.received.num_rows)
        else:
            self._pace.settled(report.messages)
            yield report
        self._pending.popleft()

    def _result(self, pending: Pending) -> tuple[Worked, float]:
        """Wait for the engine's result of a batch, but stop if the window is fenced.

        Another window then has the messages, so further calls would be repetitions. The engine
        starts no further part once the stage ends.
        """
        while not pending.is_done_within(_LOOK_S):
            if self._tenure.lost:
                raise FencedError
        return pending.result()

    def _isolate(
        self, pending: Pending, stage: Stage, *, error: WorkerDiedError | TooMuchError
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
            again = self._submitted(half, stage, received_at=pending.received_at)
            try:
                worked, work_s = self._result(again)
                report = self._settle(again, worked, work_s=work_s)
            except (WorkerDiedError, TooMuchError) as another:
                failed = yield from self._isolate(again, stage, error=another)
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

    def _settle(self, pending: Pending, worked: Worked, *, work_s: float) -> BatchReport:
        outcomes = pending.batch.outcomes(worked.exceptions, run_id=self._tenure.owner)
        fence, number = self._tenure.fence, pending.batch.number
        try:
            answer = settle(
                self._verbs,
                self._spec,
                outcomes=outcomes,
                worked=worked,
                fence=fence,
                number=number,
            )
        except ReceiptHandleError as error:
            raise LostError(str(error)) from error
        except TooMuchError:
            self._publication.discard(worked.files)
            raise
        self._publication.add(worked.files, version=int(answer.get("sink_version", 0)))
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
            rows=sum(worked.files["rows"].to_pylist()),
            files=worked.files.num_rows,
            bytes=sum(worked.files["bytes"].to_pylist()),
            published={topic: table.num_rows for topic, table in worked.publish.items()},
            seconds=time.monotonic() - pending.received_at,
            work_s=work_s,
            failures=pending.batch.failures(worked.exceptions),
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
