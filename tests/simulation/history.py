"""A broker and a model that are told the same: their time, their restarts, their upkeep."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from rmq_pipeline import schema
from tests.simulation.crashing import CrashingBroker, Trouble
from tests.simulation.model.consumer import Consumer
from tests.simulation.model.entry import Entry
from tests.simulation.model.topics import REPEAT_MS, Model
from tests.simulation.model.window import EFFECT_MS
from tests.simulation.scenery import MEMORY, SETTINGS, TROUBLE, tag


class History(RuleBasedStateMachine):
    """Events of a broker that do not depend on its clients."""

    model: Model

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-", dir=MEMORY))
        self.crashing = CrashingBroker(self.folder, SETTINGS)
        self.sealed = False
        self.sent = 0
        self.handles: dict[int, str] = {}
        self.receipts: dict[str, list[str]] = defaultdict(list)
        #: Of the broker, when the model was last told of one.
        self.lives = self.crashing.lives

    @property
    def now(self) -> int:
        return self.crashing.clock.now_ms()

    def consumer(self, which: int) -> Consumer:
        return self.model.consumers[which % len(self.model.consumers)]

    @property
    def names(self) -> list[str]:
        """The topics there are."""
        return sorted(self.model.topics)

    def table(
        self, n: int, *, again: Sequence[int | None] = (), **columns: Any
    ) -> tuple[list[int], pa.Table]:
        """New messages, and their numbers; ``again``: of a common id (0), key (1), or both (2)."""
        numbers = list(range(self.sent, self.sent + n))
        self.sent += n
        said = [*again, *[None] * (n - len(again))]
        ids = ["again" if s in (0, 2) else f"m-{i}" for i, s in zip(numbers, said, strict=True)]
        keys = ["again" if s in (1, 2) else f"k-{i}" for i, s in zip(numbers, said, strict=True)]
        self.model.names.update(zip(numbers, zip(ids, keys, strict=True), strict=True))
        table = {
            "body": [str(number).encode() for number in numbers],
            "born_at_ms": numbers,
            "message_id": ids,
            "keys": [[key] for key in keys],
            "tag": [tag(number) for number in numbers],
            "properties": [{"n": str(number % 5)} for number in numbers],
            **columns,
        }
        fields = [schema.SEND.field(name) for name in table]
        return numbers, pa.table(table, schema=pa.schema(fields))

    def allowed(
        self, consumer: Consumer, client: str, *, attempt: str
    ) -> tuple[dict[str, list[Entry]], bool]:
        """What a receive may give, and whether it was given to the same attempt before."""
        consumer.expire(self.now)
        self.locate(consumer)
        again = consumer.repeated(attempt, self.now)
        if again:
            return again, True
        consumer.look(self.now)
        asked = consumer.clients[client] if consumer.clients else None
        return consumer.deliverable(self.now, asked), False

    def locate(self, consumer: Consumer) -> None:
        """Learn where its messages lie, if that is their order."""
        broker = self.crashing.broker
        for facts in broker.describe_topic(consumer.topic)["offsets"] if consumer.by_queue else ():
            queue = facts["queue_id"]
            start = max(facts["min_offset"], consumer.located.get(queue, 0))
            rows = broker.read(consumer.topic, queue, offset=start, limit=100_000)
            for row in rows.select(["queue_offset", "body"]).to_pylist():
                entry = consumer.entries.get(int(row["body"]))
                if entry is not None:
                    entry.queue, entry.offset = queue, row["queue_offset"]
            consumer.located[queue] = start + rows.num_rows

    def notice_restarts(self) -> None:
        """A restarted broker does not know its earlier deliveries."""
        if self.lives != self.crashing.lives:
            self.lives = self.crashing.lives
            for consumer in self.model.consumers:
                consumer.pace.restart(self.now)

    @rule(trouble=TROUBLE)
    def revive(self, trouble: Trouble | None) -> None:
        answer, done = self.crashing.ask("revive", trouble=trouble)
        self.crashing.cut_off &= answer is None
        for consumer in self.model.consumers if done else ():
            self.locate(consumer)
            consumer.look(self.now)

    @rule(what=st.sampled_from(("dispatch", "seal", "crash", "reopen", "reopen from the log")))
    def restart(self, what: str) -> None:
        """What lies where on disk changes, and who has it open."""
        if what == "dispatch":
            self.crashing.broker.engine.dispatched()
        elif what == "seal":
            self.sealed = True
            self.crashing.broker.seal()
        elif what == "crash":
            self.crashing.crash()
        else:
            self.crashing.reopen(from_the_log=what.endswith("log") and not self.sealed)

    @rule(milliseconds=st.sampled_from((1, 49, 100, 400, 1_000, 3_000)))
    def advance(self, milliseconds: int) -> None:
        self.crashing.clock.advance(milliseconds)

    @rule(before=st.sampled_from((1, 0)))
    def advance_to_the_next_moment(self, before: int) -> None:
        """To when something ends, or is due; or to one millisecond before."""
        moments = [at for at, _, _ in self.model.scheduled.values()]
        moments += [half.due for half in self.model.halves.values() if half.state == "open"]
        for topic in self.model.topics.values():
            moments += [at + REPEAT_MS for at, _ in topic.known.values()]
        for consumer in self.model.consumers:
            moments += [at + EFFECT_MS for at in consumer.window.effects.values()]
            for entry in consumer.having("open"):
                moments.append(entry.leased_until if entry.receipt else entry.free_at)
        soonest = min((at for at in moments if at - before > self.now), default=self.now)
        self.crashing.clock.advance(max(0, soonest - before - self.now))
