"""Rebalancing: distribution of a group's queues to its members, and ordered handover.

Every member computes its own share from the members in the heartbeat's reply, the queues of the
topic and the strategy. With locks, a queue changes its owner only after the owner has released it
or its lock has expired. So a queue has one owner at a time, even if members disagree.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rmq_pipeline.consumer.allocation import Strategy, average
from rmq_pipeline.consumer.membership import Membership
from rmq_pipeline.consumer.message_queue import BROKER_NAME, MessageQueue, by_topic, queues_of
from rmq_pipeline.consumer.pace import LOCK_MS, Pace
from rmq_pipeline.errors import BusyError, RocketMQError, TopicNotFoundError
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Renewed:
    """Result of a renewal of locks."""

    #: Queues that other clients have locked.
    lost: list[MessageQueue] = field(default_factory=list)
    #: Queues locked again after a gap, in which another client may have had them.
    doubtful: list[MessageQueue] = field(default_factory=list)
    #: Error of a failed call; its locks are unchanged.
    refusal: RocketMQError | None = None


class QueueLocks:
    """Queue locks of this client; one thread calls it, ``is_live`` is thread-safe."""

    def __init__(
        self,
        verbs: Verbs,
        *,
        group: str,
        client_id: str,
        lock_ms: int = LOCK_MS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to lock queues.

        Args:
            lock_ms: the duration of a lock at the broker; this client trusts a lock for half of
                it, because clocks and calls may be slow.
        """
        self._verbs = verbs
        self._group, self._client_id = group, client_id
        self._lock_ms, self._now_s = lock_ms, now_s
        #: Time before the last successful lock call of each queue, a lower bound of the lock time.
        self._since: dict[MessageQueue, float] = {}
        #: Queues renewed too late, with the time before that call.
        self._doubted: dict[MessageQueue, float] = {}

    def is_live(self, queue: MessageQueue) -> bool:
        """Return True if the queue is locked, and recently enough that no other client has it."""
        since = self._since.get(queue)
        return since is not None and (self._now_s() - since) * 2000 < self._lock_ms

    def is_locked(self, queue: MessageQueue) -> bool:
        """Return True if the queue was locked and no call has reported a loss."""
        return queue in self._since

    def acquire(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues of one topic; return those that no other client has locked."""
        asked_at = self._now_s()
        got = self._ask(list(queues))
        self._since.update(dict.fromkeys(got, asked_at))
        return got

    def renew(self, queues: Iterable[MessageQueue]) -> Renewed:
        """Renew locks; a doubtful queue becomes live with ``trust``."""
        renewed = Renewed()
        for of_topic in by_topic(queues).values():
            asked_at = self._now_s()
            try:
                got = set(self._ask(of_topic))
            except RocketMQError as error:
                renewed.refusal = error
                if isinstance(error, BusyError):
                    break  # further calls would also wait for the unreachable broker
                continue
            # The broker may have renewed the lock as late as now, after another client's lock.
            heard_at = self._now_s()
            for queue in of_topic:
                if queue not in got:
                    self.forget(queue)
                    renewed.lost.append(queue)
                elif (heard_at - self._since.get(queue, heard_at)) * 1000 >= self._lock_ms:
                    self._doubted[queue] = asked_at
                    renewed.doubtful.append(queue)
                else:
                    self._since[queue] = asked_at
        return renewed

    def trust(self, queue: MessageQueue) -> None:
        """Make a doubtful queue live, after its messages from before the gap were dropped."""
        asked_at = self._doubted.pop(queue, None)
        if asked_at is not None:
            self._since[queue] = asked_at

    def _ask(self, wanted: list[MessageQueue]) -> list[MessageQueue]:
        if not wanted:
            return []
        ids = set(
            self._verbs.lock_queues(
                self._group,
                wanted[0].topic,
                queue_ids=[queue.queue_id for queue in wanted],
                client_id=self._client_id,
                duration_ms=self._lock_ms,
            )
        )
        return [queue for queue in wanted if queue.queue_id in ids]

    def release(self, queue: MessageQueue) -> None:
        """Unlock a queue."""
        self._doubted.pop(queue, None)
        if self._since.pop(queue, None) is None:
            return
        self._verbs.unlock_queues(
            self._group, queue.topic, queue_ids=[queue.queue_id], client_id=self._client_id
        )

    def forget(self, queue: MessageQueue) -> None:
        """Drop a lock that another client has taken."""
        self._since.pop(queue, None)
        self._doubted.pop(queue, None)


#: Clustering: each queue has one owner in the group. Broadcasting: every member owns all queues.
Model = Literal["clustering", "broadcasting"]
#: Called with the topic, all its queues, and the queues of this member.
QueueListener = Callable[[str, list[MessageQueue], list[MessageQueue]], None]


class QueueOwner(Protocol):
    """Consumer side of a rebalance; called from one thread, must not block."""

    def take(self, queue: MessageQueue) -> None:
        """Start a queue.

        After a RocketMQError, for example of an unreadable offset, the next rebalance offers the
        queue again.
        """
        ...

    def drop(self, queue: MessageQueue) -> bool:
        """Stop a queue; return True once none of its messages is being processed.

        The call is repeated until it returns True, for at most 20 s, or made once if the lock was
        lost. Then the queue belongs to another member; a later ``take`` starts it as a new one.
        """
        ...

    def reset(self, queue: MessageQueue) -> None:
        """Discard cached messages: the group was reset, or another member had the queue."""
        ...

    def report(self) -> dict[str, Any]:
        """Return model, order, queues and statistics for the heartbeat; thread-safe."""
        ...


class Rebalancer:
    """Rebalancer of one client: keeps it a member and passes its share to a QueueOwner."""

    def __init__(
        self,
        verbs: Verbs,
        *,
        group: str,
        client_id: str,
        topics: Iterable[str],
        owner: QueueOwner,
        locking: bool,
        model: Model = "clustering",
        strategy: Strategy = average,
        listener: QueueListener | None = None,
        broker_name: str = BROKER_NAME,
        pace: Pace | None = None,
    ) -> None:
        """Prepare the rebalancer; ``start`` starts it.

        Args:
            locking: own a queue only with its lock; ignored for broadcasting.
            listener: called from the rebalancing thread when the share of a topic changes.
            broker_name: broker name of all queues, for strategies that use machine rooms.
        """
        self._verbs = verbs
        self._client_id, self._model, self._strategy = client_id, model, strategy
        self._owner, self._listener = owner, listener
        self._broker_name = broker_name
        self._pace = pace or Pace()
        self._topics = list(dict.fromkeys(topics))
        locks = QueueLocks(verbs, group=group, client_id=client_id, lock_ms=self._pace.lock_ms)
        self._locks = locks if locking and model == "clustering" else None
        self._membership = Membership(
            verbs,
            group=group,
            client_id=client_id,
            topics=lambda: list(self._topics),
            details=owner.report,
            changed=self.rebalance_soon,
            gap_s=self._pace.beat_gap_s,
        )
        #: Owned queues, each with the number of resets that its owner knows.
        self._owned: dict[MessageQueue, int] = {}
        #: Queues that are being handed over, with the start time.
        self._dropping: dict[MessageQueue, float] = {}
        self._shares: dict[str, tuple[list[MessageQueue], list[MessageQueue]]] = {}
        self._changed = threading.Condition()
        self._is_changed = True
        self._rebalance_at = self._rebalanced_at = float("-inf")
        self._renew_at = 0.0
        self._close_by: float | None = None
        self._is_cut_off = False
        self._thread: threading.Thread | None = None
        #: Error of the last rebalance; None after a success.
        self.trouble: RocketMQError | None = None

    def start(self) -> None:
        """Join the group, then rebalance in the background.

        Raises:
            RocketMQError: a group or topic does not exist, access is denied, or no broker answers.
        """
        for topic in self._topics:
            self._verbs.describe_topic(topic)
        try:
            self._membership.join()
        except BaseException:
            self._membership.leave()  # the broker may have processed the heartbeat
            raise
        self._renew_at = time.monotonic() + self._pace.first_renew_s
        self._thread = threading.Thread(target=self._run, name="rmq-rebalance", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str) -> None:
        """Add a topic."""
        if topic not in self._topics:
            self._verbs.describe_topic(topic)
            self._topics.append(topic)
            try:
                self._membership.refresh()
            except BaseException:
                self._topics.remove(topic)  # the next rebalance drops its queues
                raise
            finally:
                self.rebalance_soon()

    def unsubscribe(self, topic: str) -> None:
        """Remove a topic and hand over its queues."""
        if topic in self._topics:
            self._topics.remove(topic)
            self._membership.refresh()
            self.rebalance_soon()

    def rebalance_soon(self) -> None:
        """Rebalance now, or ``gap_s`` after the last rebalance."""
        with self._changed:
            self._is_changed = True
            self._changed.notify_all()

    def holds(self, queue: MessageQueue) -> bool:
        """Return True if a queue may be processed now: owned, with a live lock; thread-safe."""
        if queue not in self._owned and queue not in self._dropping:
            return False
        return self._locks is None or self._locks.is_live(queue)

    def suspects(self) -> frozenset[tuple[str, int, int]]:
        """Return messages that may have crashed a member, as of the last heartbeat."""
        return self._membership.members.suspects

    def report_now(self) -> None:
        """Send the report of the owner to the broker at once."""
        self._membership.refresh()

    def owned(self) -> list[MessageQueue]:
        """Return the queues that this client owns now, sorted; thread-safe."""
        return sorted(self._owned.copy())

    def close(self, *, patience_s: float = 20.0) -> None:
        """Drop all queues, waiting up to ``patience_s`` for their owner, and leave the group."""
        with self._changed:
            self._close_by = time.monotonic() + patience_s
            self._is_changed = True  # the thread may be busy and would otherwise wait afterwards
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._membership.leave()

    # --------------------------------------------------------------------- in the own thread only

    def _run(self) -> None:
        while True:
            try:
                if not self._step():
                    return
            except Exception:
                log.exception("a rebalance of %s failed; retrying", self._client_id)
                self._rebalance_at = time.monotonic() + self._pace.unbalanced_s
                if self._close_by is not None and time.monotonic() >= self._close_by:
                    return
            self._wait()

    def _step(self) -> bool:
        """Do the due work; return False once a close is complete."""
        with self._changed:
            closing = self._close_by is not None
            if self._is_changed:
                self._rebalance_at = self._rebalanced_at + self._pace.gap_s
                self._is_changed = False
        if closing:
            for queue in self._owned.copy():
                self._begin_to_drop(queue)
        else:
            self._pass_resets_on()
        if self._locks is not None and time.monotonic() >= self._renew_at:
            self._renew(self._locks)
        self._hand_over()
        if closing:
            return bool(self._dropping)
        if time.monotonic() >= self._rebalance_at:
            self._rebalance()
        return True

    def _wait(self) -> None:
        due_at = self._rebalance_at if self._close_by is None else self._close_by
        if self._dropping or self._unknown_resets():
            due_at = min(due_at, time.monotonic() + self._pace.ask_s)
        if self._locks is not None:
            due_at = min(due_at, self._renew_at)
        with self._changed:
            if not self._is_changed:
                self._changed.wait(max(0.0, due_at - time.monotonic()))

    def _rebalance(self) -> None:
        balanced, self.trouble = True, None
        for topic in {*self._topics, *(queue.topic for queue in self._owned)}:
            try:
                balanced &= self._balance(topic)
            except RocketMQError as error:
                level = logging.INFO if isinstance(error, BusyError) else logging.WARNING
                log.log(level, "topic %s could not be rebalanced: %s", topic, error)
                self.trouble, balanced = error, False
        self._rebalanced_at = time.monotonic()
        pace = self._pace.balanced_s if balanced else self._pace.unbalanced_s
        self._rebalance_at = self._rebalanced_at + pace

    def _balance(self, topic: str) -> bool:
        """Drop and take queues of a topic; return True if this client now owns its share."""
        queues = self._queues(topic)
        share = self._share(topic, queues)
        for queue in self._owned.copy():
            if queue.topic == topic and queue not in share:
                self._begin_to_drop(queue)
        self._hand_over()
        new = [q for q in share if q not in self._owned and q not in self._dropping]
        self._take_all(new if self._locks is None else self._locks.acquire(new))
        mine = sorted(queue for queue in self._owned if queue.topic == topic)
        if self._shares.get(topic) != (queues, mine):
            self._shares[topic] = (queues, mine)
            if self._listener is not None:
                self._listener(topic, queues, mine)
        return mine == sorted(share)

    def _queues(self, topic: str) -> list[MessageQueue]:
        if topic not in self._topics:
            return []
        try:
            count = self._verbs.describe_topic(topic)["queues"]
        except TopicNotFoundError as error:
            self.trouble = error
            return []
        return queues_of(topic, count, broker_name=self._broker_name)

    def _share(self, topic: str, queues: list[MessageQueue]) -> list[MessageQueue]:
        if not queues or self._model == "broadcasting":
            return queues
        members = self._membership.members.of(topic)
        if not members:
            return []
        return self._strategy(self._client_id, queues=queues, client_ids=members)

    def _take_all(self, queues: Iterable[MessageQueue]) -> None:
        """Start locked queues; the failure of one does not prevent the others."""
        left, failure = list(queues), None
        try:
            while left and not isinstance(failure, BusyError):
                try:
                    self._take(left.pop(0))
                except RocketMQError as error:
                    failure = error
        finally:
            for queue in left:  # another member may take them
                self._unlock(queue)
        if failure is not None:
            raise failure

    def _take(self, queue: MessageQueue) -> None:
        resets = self._membership.members.resets.get((queue.topic, queue.queue_id), 0)
        # Set before ``take``, because the owner may call ``holds`` at once.
        self._owned[queue] = resets
        try:
            self._owner.take(queue)
        except BaseException:
            del self._owned[queue]
            self._unlock(queue)
            raise

    def _begin_to_drop(self, queue: MessageQueue) -> None:
        self._dropping[queue] = time.monotonic()
        del self._owned[queue]

    def _hand_over(self) -> None:
        for queue in self._dropping.copy():
            if self._is_dropped(queue) or self._is_late(queue):
                self._unlock(queue)
                del self._dropping[queue]

    def _is_dropped(self, queue: MessageQueue) -> bool:
        try:
            return self._owner.drop(queue)
        except RocketMQError as error:
            log.info("%s is not dropped yet: %s", queue.key, error)
            return False

    def _is_late(self, queue: MessageQueue) -> bool:
        """Return True if a queue must be unlocked although its owner still works on it."""
        now_s = time.monotonic()
        if self._close_by is not None and now_s >= self._close_by:
            return True
        if self._locks is not None and not self._locks.is_locked(queue):
            return True
        return now_s - self._dropping[queue] >= self._pace.let_go_s

    def _unlock(self, queue: MessageQueue) -> None:
        if self._locks is None:
            return
        if self._is_cut_off and self._close_by is not None:
            self._locks.forget(queue)  # each call would wait for the unreachable broker
            return
        try:
            self._locks.release(queue)
        except RocketMQError as error:
            self._is_cut_off = isinstance(error, BusyError)
            log.info("%s stays locked for up to a minute: %s", queue.key, error)

    def _renew(self, locks: QueueLocks) -> None:
        renewed = locks.renew(self._owned.copy())
        pause_s = self._pace.renew_s
        if renewed.refusal is not None:
            log.info("locks could not be renewed: %s", renewed.refusal)
            pause_s = min(pause_s, self._pace.unbalanced_s)
        self._renew_at = time.monotonic() + pause_s
        for queue in renewed.lost:
            log.warning("%s was locked by another member", queue.key)
            self._begin_to_drop(queue)
        for queue in renewed.doubtful:
            self._owned[queue] = -1
        if renewed.lost:
            self.rebalance_soon()

    def _unknown_resets(self) -> list[tuple[MessageQueue, int]]:
        """Return queues with a reset that their owner does not know yet, with the new count."""
        resets = self._membership.members.resets
        told = [(queue, resets.get((queue.topic, queue.queue_id), 0)) for queue in self._owned]
        return [(queue, count) for queue, count in told if self._owned[queue] != count]

    def _pass_resets_on(self) -> None:
        for queue, count in self._unknown_resets():
            try:
                self._owner.reset(queue)
            except RocketMQError as error:
                log.info("%s is not reset yet: %s", queue.key, error)
            else:
                self._owned[queue] = count
                if self._locks is not None:
                    self._locks.trust(queue)
