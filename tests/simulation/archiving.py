"""What becomes of what is stored: segments merge and expire, readers keep their own offsets."""

from __future__ import annotations

from itertools import cycle

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from rmq_pipeline import errors
from tests.simulation.crashing import Trouble
from tests.simulation.scenery import ANY, CHOICES, KEPT_MS, ROWS, TROUBLE, Rows
from tests.simulation.windowing import Windowing


class Archiving(Windowing):
    """Histories of all that, and of what tends the files."""

    @rule(
        seal=st.booleans(),
        what=st.sampled_from(("compact", "expire", "expire")),
        trouble=TROUBLE,
    )
    def tend(self, seal: bool, what: str, trouble: Trouble | None) -> None:
        if seal:
            self.restart("seal")
        if what == "expire":
            self.expire(trouble)
        else:
            self.crashing.ask("compact", trouble=trouble)

    @rule(
        which=ANY,
        more=ROWS,
        age=st.sampled_from((KEPT_MS - 1, KEPT_MS, 2 * KEPT_MS)),
        trouble=TROUBLE,
    )
    def grow_old(self, which: int, more: Rows, age: int, trouble: Trouble | None) -> None:
        """Until it may expire, or almost, while some of it is leased and some is new."""
        self.take(self.consumer(which), 3, duration=10_000)
        self.crashing.clock.advance(age // 2)
        for topic in range(len(self.names)):
            self.send(topic, more, "fifo", False, None)
        self.crashing.clock.advance(age - age // 2)
        self.restart("seal")
        self.expire(trouble)

    def expire(self, trouble: Trouble | None) -> None:
        """What has gone must have been free to go: the broker may keep more than it needs.

        What follows in a message group that was given up is dead, and copied when it is looked at.
        """
        for consumer in self.model.consumers:
            if consumer.quarantined and not self.record(consumer):
                return
        kept = [name for name, topic in self.model.topics.items() if topic.kept_ms is not None]
        before = {name: self.listed(name) for name in kept}
        self.crashing.ask("expire", trouble=trouble)
        for name, queues in before.items():
            for queue, low in zip(queues, self.bounds(name), strict=True):
                for number in [number for offset, number in queue if offset < low]:
                    self.model.expire(name, number, now=self.now)

    def bounds(self, topic: str) -> list[int]:
        """The first offset that is kept, of each queue."""
        offsets = self.crashing.broker.describe_topic(topic)["offsets"]
        return [queue["min_offset"] for queue in offsets]

    def listed(self, topic: str) -> list[list[tuple[int, int]]]:
        """Offset and message of all that is kept, queue by queue."""
        found = []
        for queue, low in enumerate(self.bounds(topic)):
            table = self.crashing.broker.read(topic, queue, offset=low, limit=100_000)
            rows = table.select(["queue_offset", "body"]).to_pylist()
            found.append([(row["queue_offset"], int(row["body"])) for row in rows])
        return found

    @rule(
        which=ANY,
        queue=st.integers(0, 4),
        share=st.sampled_from((0, 1, 2, 100)),
        trouble=TROUBLE,
    )
    def update_offset(self, which: int, queue: int, share: int, trouble: Trouble | None) -> None:
        """A group says how far it is in a queue; not where something is under way."""
        consumer = self.consumer(which)
        if not self.record(consumer):
            return
        queue %= self.model.topics[consumer.topic].queues
        rows = self.listed(consumer.topic)[queue]
        if not rows:
            return
        asked = rows[share][0] if share < len(rows) else rows[-1][0] + 1
        before = [consumer.entries[number] for _, number in rows]
        try:
            answer, done = self.crashing.ask(
                "update_offsets",
                consumer.name,
                consumer.topic,
                offsets={queue: asked},
                trouble=trouble,
            )
        except errors.InUseError:
            waits = any(entry.given and entry.state in ("open", "parked") for entry in before)
            assert waits or consumer.ordered, f"{consumer.name}: nothing is under way"
            return
        if done:
            now_at = asked if answer is None else answer["queue_offset"][0].as_py()
            assert now_at >= asked
            consumer.pass_over(rows, asked=asked, now_at=now_at)

    @rule(
        which=ANY,
        chosen=CHOICES,
        how=st.sampled_from(("new", "new", "new", "again", "unknown", "known")),
        trouble=TROUBLE,
    )
    def replace_sink_files(
        self, which: int, chosen: list[bool], how: str, trouble: Trouble | None
    ) -> None:
        """A file counts instead of others; asked again, it is answered the same."""
        consumer = self.consumer(which)
        window, broker = consumer.window, self.crashing.broker
        if how == "again":
            if window.replacement is not None:
                asked, said = window.replacement
                assert broker.replace_sink_files(consumer.name, **asked) == said
            return
        known = window.files + window.replaced
        refused = how == "unknown" or (how == "known" and bool(known))
        added = known[0] if how == "known" and known else f"{consumer.name}-for-{window.version}"
        removed = [file for file, yes in zip(window.files, cycle(chosen), strict=False) if yes]
        asked = {
            "replacement_id": f"replacement-{window.version}",
            "add": pa.table({"path": [added], "rows": [1]}),
            "remove": [*removed, "unknown"] if how == "unknown" else removed,
        }
        if refused:
            with pytest.raises(errors.SinkChangedError):
                broker.replace_sink_files(consumer.name, **asked)
            return
        answer, done = self.crashing.ask(
            "replace_sink_files", consumer.name, trouble=trouble, **asked
        )
        if done:
            said = window.replace(asked, added)
            assert answer is None or answer == said
