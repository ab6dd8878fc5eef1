"""Sharing the queues of a group's topics among its members, and handing them over in order.

Every member computes its share alone: from the members that the heartbeat tells of, the queues of
the topic and the strategy. With locks a queue changes hands only once its owner has let it go or
its lock has ended, so it has one owner at a time, whatever the members believe meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rmq_pipeline.consumer.allocation import Strategy, average
from rmq_pipeline.consumer.membership import Membership
from rmq_pipeline.consumer.message_queue import BROKER_NAME, MessageQueue, queues_of
from rmq_pipeline.consumer.queue_locks import FIRST_RENEW_S, LOCK_MS, RENEW_S, QueueLocks
from rmq_pipeline.consumer.verbs import MembershipVerbs
from rmq_pipeline.errors import BusyError, RocketMQError, TopicNotFoundError

log = logging.getLogger(__name__)

#: Clustering: a queue has one owner in the group. Broadcasting: every member owns all queues.
Model = Literal["clustering", "broadcasting"]
#: topic, all its queues, those that are this member's now.
QueueListener = Callable[[str, list[MessageQueue], list[MessageQueue]], None]


class QueueOwner(Protocol):
    """Who works on the queues that a member owns; called from one thread, and must not wait."""

    def take(self, queue: MessageQueue) -> None:
        """Begin with a queue.

        A RocketMQError says that it could not, an offset that cannot be read for instance: the
        queue is offered again at the next rebalance.
        """
        ...

    def drop(self, queue: MessageQueue) -> bool:
        """Begin no more of a queue; whether nothing of it runs any more.

        It is asked again until it says so, for 20 s at most, and once where the lock is lost. Then
        the queue is somebody else's, and may come back by ``take`` as a new one.
        """
        ...

    def reset(self, queue: MessageQueue) -> None:
        """The group was put elsewhere in a queue, or others had it meanwhile: cache nothing."""
        ...

    def report(self) -> dict[str, Any]:
        """What the heartbeat tells of this member: model, order, queues, statistics; any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How often what is done; RocketMQ's numbers."""

    balanced_s: float = 20.0
    unbalanced_s: float = 1.0
    #: Between two rebalances, however often the group changes.
    gap_s: float = 1.0
    #: How often the owner is asked whether a queue is dropped, and a reset is tried again.
    ask_s: float = 0.1
    #: Then a dropped queue is let go, whatever its owner says. Its lock is renewed no more, but
    #: holds for longer than this.
    let_go_s: float = 20.0
    #: For how long a lock holds at the broker; its holder trusts in it for half of that.
    lock_ms: int = LOCK_MS
    renew_s: float = RENEW_S
    first_renew_s: float = FIRST_RENEW_S
    #: How often who assigns queues is told of new ones.
    look_s: float = 30.0
    #: How long a fetch of a pull consumer waits at the broker. A queue that came or was put
    #: elsewhere waits as long at most, and not at all once somebody polls.
    fetch_ms: int = 1_000


class Rebalancer:
    """Keeps this client a member, and gives the queues that are its share to a QueueOwner."""

    def __init__(
        self,
        verbs: MembershipVerbs,
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
        """Say how; ``start`` begins.

        Args:
            locking: own queues only with their lock; with broadcasting there are none.
            listener: told when the share of a topic is another; from the thread that rebalances.
            broker_name: of all queues, for strategies that go by rooms.
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
        )
        #: Owned queues, each with the resets that its owner knows of.
        self._owned: dict[MessageQueue, int] = {}
        #: Queues on their way to others, and since when.
        self._dropping: dict[MessageQueue, float] = {}
        self._shares: dict[str, tuple[list[MessageQueue], list[MessageQueue]]] = {}
        self._changed = threading.Condition()
        self._is_changed = True
        self._rebalance_at = self._rebalanced_at = float("-inf")
        self._renew_at = 0.0
        self._close_by: float | None = None
        self._is_cut_off = False
        self._thread: threading.Thread | None = None
        #: Why the last rebalance did not come to its end; None when it did.
        self.trouble: RocketMQError | None = None

    def start(self) -> None:
        """Join the group and take what is there to take, then go on in the background.

        Raises:
            RocketMQError: no such group or topic, no right, no broker.
        """
        for topic in self._topics:
            self._verbs.describe_topic(topic)
        try:
            self._membership.join()
        except BaseException:
            self._membership.leave()  # the broker may have heard of it
            raise
        self._renew_at = time.monotonic() + self._pace.first_renew_s
        self._thread = threading.Thread(target=self._run, name="rmq-rebalance", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str) -> None:
        """Share in another topic, too."""
        if topic not in self._topics:
            self._verbs.describe_topic(topic)
            self._topics.append(topic)
            try:
                self._membership.refresh()
            except BaseException:
                self._topics.remove(topic)  # what was taken of it meanwhile is dropped
                raise
            finally:
                self.rebalance_soon()

    def unsubscribe(self, topic: str) -> None:
        """Drop what is owned of a topic, and leave it to others."""
        if topic in self._topics:
            self._topics.remove(topic)
            self._membership.refresh()
            self.rebalance_soon()

    def rebalance_soon(self) -> None:
        """Rebalance now, or a second after the last time."""
        with self._changed:
            self._is_changed = True
            self._changed.notify_all()

    def holds(self, queue: MessageQueue) -> bool:
        """Whether a queue may be worked on now: owned, its lock young enough; from any thread."""
        if queue not in self._owned and queue not in self._dropping:
            return False
        return self._locks is None or self._locks.is_live(queue)

    def owned(self) -> list[MessageQueue]:
        """The queues that are this client's now; from any thread."""
        return sorted(self._owned.copy())

    def close(self, *, patience_s: float = 20.0) -> None:
        """Drop all queues, waiting up to ``patience_s`` for their owner, and leave the group."""
        with self._changed:
            self._close_by = time.monotonic() + patience_s
            self._is_changed = True  # it may be at work, and would wait afterwards
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._membership.leave()

    # ------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        while True:
            try:
                if not self._step():
                    return
            except Exception:
                log.exception("A rebalance of %s has failed, and is tried again.", self._client_id)
                self._rebalance_at = time.monotonic() + self._pace.unbalanced_s
                if self._close_by is not None and time.monotonic() >= self._close_by:
                    return
            self._wait()

    def _step(self) -> bool:
        """What is due now; whether anything is left to be done later."""
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
                log.log(level, "topic %s is not balanced: %s", topic, error)
                self.trouble, balanced = error, False
        self._rebalanced_at = time.monotonic()
        pace = self._pace.balanced_s if balanced else self._pace.unbalanced_s
        self._rebalance_at = self._rebalanced_at + pace

    def _balance(self, topic: str) -> bool:
        """Drop and take queues of a topic; whether this client has its whole share now."""
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
        """Begin with queues that are locked; one that cannot be begun with keeps none from it."""
        left, failure = list(queues), None
        try:
            while left and not isinstance(failure, BusyError):
                try:
                    self._take(left.pop(0))
                except RocketMQError as error:
                    failure = error
        finally:
            for queue in left:  # they may be others' before they are offered again
                self._unlock(queue)
        if failure is not None:
            raise failure

    def _take(self, queue: MessageQueue) -> None:
        resets = self._membership.members.resets.get((queue.topic, queue.queue_id), 0)
        # Before the owner hears of it: it may ask at once whether it holds the queue.
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
        """Whether it is given up although its owner still works on it."""
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
            self._locks.forget(queue)  # one call after the other would wait for a broker
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
            log.info("locks are not renewed: %s", renewed.refusal)
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
        """Queues whose owner does not know yet that the group was put elsewhere."""
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
