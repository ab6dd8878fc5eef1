"""Histories of locked queues and kept offsets, with crashes in them, held against a model."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from rmq_pipeline import errors
from tests.simulation.crashing import CrashingBroker, Trouble
from tests.simulation.model.owned_queue import Given, OwnedQueue
from tests.simulation.scenery import LOST, MEMORY, SETTINGS, TROUBLE

HISTORIES = int(os.environ.get("RMQ_SIMULATION_HISTORIES", "0"))
STEPS = 50
TOPIC, OWNERS, READERS, THIRD = "t", "owners", "readers", "third"
QUEUES = 3
CLIENT = st.sampled_from(("a", "b", "c"))
SOME_QUEUES = st.sets(st.integers(0, QUEUES - 1), min_size=1)
DURATION = st.sampled_from((100, 1_000, 5_000))


class Owning(RuleBasedStateMachine):
    """One group whose clients lock queues, one whose reader commits offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="owning-", dir=MEMORY))
        self.crashing = CrashingBroker(self.folder, SETTINGS)
        self.queues = [OwnedQueue() for _ in range(QUEUES)]

    @property
    def now(self) -> int:
        return self.crashing.clock.now_ms()

    @initialize()
    def begin(self) -> None:
        self.crashing.broker.create_topic(TOPIC, queues=QUEUES)
        for group in (OWNERS, READERS, THIRD):
            self.crashing.broker.create_group(group, max_attempts=1000)

    @rule(n=st.integers(1, 9), trouble=TROUBLE)
    def send(self, n: int, trouble: Trouble | None) -> None:
        table = pa.table({"body": [b"x"] * n})
        if self.crashing.ask("send", TOPIC, table, trouble=trouble)[1]:
            for facts in self.crashing.broker.describe_topic(TOPIC)["offsets"]:
                self.queues[facts["queue_id"]].end = facts["max_offset"]

    @rule(client=CLIENT, asked=SOME_QUEUES, duration=DURATION, trouble=TROUBLE)
    def lock(self, client: str, asked: set[int], duration: int, trouble: Trouble | None) -> None:
        how: dict[str, Any] = {"queue_ids": sorted(asked), "client_id": client}
        answer, done = self.crashing.ask(
            "lock_queues", OWNERS, TOPIC, duration_ms=duration, trouble=trouble, **how
        )
        if done:
            until = self.now + duration
            locked = [
                queue_id
                for queue_id in sorted(asked)
                if self.queues[queue_id].take_over(client, now=self.now, until=until)
            ]
            assert answer is None or answer == locked

    @rule(client=CLIENT, asked=SOME_QUEUES, leave=st.booleans(), trouble=TROUBLE)
    def unlock(self, client: str, asked: set[int], leave: bool, trouble: Trouble | None) -> None:
        """Of some queues; of all when the client leaves the group."""
        asked = set(range(QUEUES)) if leave else asked
        if leave:
            answer, done = self.crashing.ask("leave", OWNERS, client, trouble=trouble)
        else:
            how: dict[str, Any] = {"queue_ids": sorted(asked), "client_id": client}
            answer, done = self.crashing.ask("unlock_queues", OWNERS, TOPIC, trouble=trouble, **how)
        if done:
            unlocked = [q for q in sorted(asked) if self.queues[q].unlock(client, self.now)]
            assert answer is None or answer == unlocked

    @rule(
        client=CLIENT,
        asked=st.one_of(st.none(), SOME_QUEUES),
        limit=st.sampled_from((1, 4, 100)),
        duration=DURATION,
        trouble=TROUBLE,
    )
    def receive(
        self,
        client: str,
        asked: set[int] | None,
        limit: int,
        duration: int,
        trouble: Trouble | None,
    ) -> None:
        how: dict[str, Any] = {"client_id": client, "limit": limit}
        how |= {"invisible_duration_ms": duration, "queue_ids": asked and sorted(asked)}
        taken = {q for q in range(QUEUES) if self.queues[q].holder(self.now) not in (None, client)}
        if asked is not None and asked & taken:
            with pytest.raises(errors.QueueLockedError):
                self.crashing.broker.receive(OWNERS, TOPIC, **how)
            return
        open_queues = (set(range(QUEUES)) if asked is None else asked) - taken
        got, done = self.crashing.ask("receive", OWNERS, TOPIC, trouble=trouble, **how)
        if not done:
            return
        rows = self.unheard() if got is None else got.to_pylist()
        allowed = {
            (queue_id, offset): attempt
            for queue_id in open_queues
            for offset, attempt in self.queues[queue_id].deliverable(self.now).items()
        }
        assert len(rows) <= limit
        assert rows or got is None or not allowed
        for row in rows:
            at = row["queue_id"], row["queue_offset"]
            assert allowed[at] == row["delivery_attempt"], at
            queue = self.queues[at[0]]
            given = Given(allowed[at], self.now + duration, row["receipt_handle"])
            queue.given[at[1]] = given
            queue.cursor = max(queue.cursor, at[1] + 1)

    def unheard(self) -> list[dict[str, Any]]:
        """What a receive leased whose answer got lost, as the broker tells of it."""
        rows = self.crashing.broker.sql(
            "SELECT queue_id, queue_offset, delivery_attempt FROM in_flight"
            f" WHERE consumer_group = '{OWNERS}' AND visible_at_ms > {self.now}"
        ).to_pylist()
        found = []
        for row in rows:
            known = self.queues[row["queue_id"]].given.get(row["queue_offset"])
            if known is None or not known.is_with_somebody(self.now):
                found.append({**row, "receipt_handle": LOST})
        return found

    @rule(
        verb=st.sampled_from(("ack", "ack", "release")),
        which=st.lists(st.booleans(), min_size=1, max_size=4),
        trouble=TROUBLE,
    )
    def settle(self, verb: str, which: list[bool], trouble: Trouble | None) -> None:
        """Some of what was delivered; all of it when nothing of that has ended, else nothing."""
        chosen = [
            (queue, offset, given)
            for queue in self.queues
            for n, (offset, given) in enumerate(queue.given.items())
            if given.receipt not in ("", LOST) and which[n % len(which)]
        ]
        receipts = [given.receipt for *_, given in chosen]
        if not all(given.is_with_somebody(self.now) for *_, given in chosen):
            with pytest.raises(errors.ReceiptHandleError):
                getattr(self.crashing.broker, verb)(receipts)
            return
        if self.crashing.ask(verb, receipts, trouble=trouble)[1]:
            for queue, offset, given in chosen:
                if verb == "release":
                    given.release()
                else:
                    del queue.given[offset]

    @rule(
        asked=st.dictionaries(
            st.integers(0, QUEUES - 1), st.tuples(st.booleans(), st.integers(-3, 9)), min_size=1
        ),
        behind=st.sampled_from((None, 0, 0, 1)),
        trouble=TROUBLE,
    )
    def commit(
        self, asked: dict[int, tuple[bool, int]], behind: int | None, trouble: Trouble | None
    ) -> None:
        """From where the group is, or from where it may not be, to somewhere near.

        Who commits knows of all resets, or of all but the last, or says nothing of them.
        """
        offsets = {}
        for queue_id, (knows, by) in asked.items():
            queue = self.queues[queue_id]
            before = queue.committed if knows else max(-1, by)
            offsets[queue_id] = (before, min(queue.end, max(0, queue.committed + by)))
        resets = None
        if behind is not None:
            resets = {q: max(0, self.queues[q].resets - behind) for q in offsets}
        answer, done = self.crashing.ask(
            "commit_offsets", READERS, TOPIC, offsets=offsets, resets=resets, trouble=trouble
        )
        if done:
            for queue_id, (before, after) in offsets.items():
                if resets is None or resets[queue_id] == self.queues[queue_id].resets:
                    self.queues[queue_id].commit(before, after)
            now = {queue_id: self.queues[queue_id].committed for queue_id in offsets}
            assert answer is None or answer == now

    @rule(
        how=st.sampled_from(("first", "last", "reset", "clone")),
        queue_id=st.integers(0, QUEUES - 1),
        trouble=TROUBLE,
    )
    def place(self, how: str, queue_id: int, trouble: Trouble | None) -> None:
        """The group begins somewhere, or is put elsewhere."""
        if how == "reset":
            to = {"to_offset": self.queues[queue_id].end // 2, "queue_id": queue_id}
            if self.crashing.ask("reset_offset", READERS, TOPIC, trouble=trouble, **to)[1]:
                queue = self.queues[queue_id]
                queue.committed, queue.resets = to["to_offset"], queue.resets + 1
            return
        if how == "clone":
            answer, done = self.crashing.ask(
                "clone_offsets", READERS, THIRD, topic=TOPIC, trouble=trouble
            )
            known = {q: one.committed for q, one in enumerate(self.queues) if one.committed >= 0}
            assert answer is None or answer == known
            return
        answer, done = self.crashing.ask(
            "start_offsets", READERS, TOPIC, where=how, trouble=trouble
        )
        if done:
            has_begun = any(queue.committed >= 0 for queue in self.queues)
            for queue in self.queues:
                if queue.committed < 0:
                    queue.committed = queue.end if how == "last" and not has_begun else 0
            assert answer is None or list(answer.values()) == [q.committed for q in self.queues]

    @rule(milliseconds=st.sampled_from((1, 99, 100, 900, 4_000)))
    def advance(self, milliseconds: int) -> None:
        self.crashing.clock.advance(milliseconds)

    @rule(what=st.sampled_from(("dispatch", "crash", "reopen", "reopen from the log")))
    def restart(self, what: str) -> None:
        if what == "dispatch":
            self.crashing.broker.engine.dispatched()
        elif what == "crash":
            self.crashing.crash()
        else:
            self.crashing.reopen(from_the_log=what.endswith("log"))

    @rule()
    def look(self) -> None:
        """What the broker says of locks, resets and progress is what happened."""
        broker = self.crashing.broker
        locks = {q: one.lock for q, one in enumerate(self.queues) if one.lock is not None}
        rows = broker.sql("FROM queue_locks").to_pylist()
        names = ("client_id", "locked_at_ms", "expires_at_ms")
        assert {row["queue_id"]: tuple(row[name] for name in names) for row in rows} == locks
        held = {lock["queue_id"] for lock in broker.describe_group(OWNERS)["locks"]}
        assert held == {q for q, lock in locks.items() if lock[2] > self.now}
        beat = broker.heartbeat(READERS, "looker", topics=[TOPIC], details={})
        broker.leave(READERS, "looker")
        places = self.crashing.broker.committed_offsets(READERS, TOPIC)
        assert places == {q: (one.committed, one.resets) for q, one in enumerate(self.queues)}
        resets = {q: one.resets for q, one in enumerate(self.queues) if one.resets}
        assert beat["resets"] == ({TOPIC: resets} if resets else {})
        assert self.progress(READERS) == {
            q: one.committed for q, one in enumerate(self.queues) if one.committed >= 0
        }
        owned = self.progress(OWNERS)
        assert not owned or list(owned.values()) == [q.settled_before() for q in self.queues]

    def progress(self, group: str) -> dict[int, int]:
        rows = self.crashing.broker.sql(
            f"FROM progress WHERE consumer_group = '{group}' ORDER BY queue_id"
        ).to_pylist()
        return {row["queue_id"]: row["committed_offset"] for row in rows}

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.crashing.crash()
                self.look()
        finally:
            self.crashing.end()
            shutil.rmtree(self.folder)


def test_queues_have_one_owner_whatever_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "rmq_pipeline")  # every planted failure would be told of
    run_state_machine_as_test(
        Owning,
        settings=profile(
            max_examples=HISTORIES or 6,
            stateful_step_count=STEPS,
            derandomize=not HISTORIES,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
