"""What runs do: they open windows, take them over, and look at what settles have left."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from rmq_pipeline import errors
from tests.simulation.administering import Administering
from tests.simulation.crashing import Trouble
from tests.simulation.model.consumer import Consumer
from tests.simulation.scenery import ANY, TROUBLE


class Windowing(Administering):
    """Histories of all that, and of the runs that do the consuming."""

    @rule(
        which=ANY,
        how=st.sampled_from(("open", "open", "take over", "take over", "renew", "close")),
        owner=st.sampled_from(("run-1", "run-2")),
        old=st.sampled_from((False, False, True)),
        trouble=TROUBLE,
    )
    def change_window(
        self, which: int, how: str, owner: str, old: bool, trouble: Trouble | None
    ) -> None:
        consumer = self.consumer(which)
        epoch = consumer.window.epoch - old
        if how == "renew":
            self.renew(consumer, epoch, trouble)
        elif how == "close":
            name = f"consumer/{consumer.name}"
            if self.crashing.ask("close_window", name, epoch=epoch, trouble=trouble)[1]:
                consumer.window.close(epoch)
        else:
            takeover, duration = how == "take over", 500 if old else 5_000
            self.open_window(consumer, owner, duration=duration, takeover=takeover, trouble=trouble)

    def renew(self, consumer: Consumer, epoch: int, trouble: Trouble | None) -> None:
        name = f"consumer/{consumer.name}"
        if consumer.window.fences(epoch):
            with pytest.raises(errors.FencedError):
                self.crashing.broker.renew_window(name, epoch=epoch, duration_ms=5_000)
            return
        how = {"epoch": epoch, "duration_ms": 5_000}
        if self.crashing.ask("renew_window", name, trouble=trouble, **how)[1]:
            consumer.window.ends_at = self.now + 5_000

    @rule(which=ANY)
    def look(self, which: int) -> None:
        """At effects, keyed state, files that count; the last settle of a window does no more."""
        consumer, broker = self.consumer(which), self.crashing.broker
        window = consumer.window
        if window.settled is not None and not window.fences(window.settled[0]):
            _, asked, counts = window.settled
            assert counts.items() <= broker.settle(consumer.name, **asked).items()
        self.look_at_effects(consumer)
        state = broker.keyed_state(consumer.name, consumer.topic)
        rows = [] if state is None else state.to_pylist()
        assert {row["message_group"]: row["total"] for row in rows} == window.totals
        files = broker.sink_files(consumer.name)
        assert files["path"].to_pylist() == window.files
        assert int(files.schema.metadata[b"version"]) == window.version
        removed = broker.sink_files(consumer.name, removed=True)["path"].to_pylist()
        assert sorted(removed) == sorted(window.replaced)
