"""A broker that stops in the middle of a frame."""

from pathlib import Path
from threading import Event

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.publish import Send, prepare
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from rmq_pipeline.tables import columns_of
from tests.broker.sealed_home import MIB

WITHIN_S = 30.0
#: So many are decided ahead.
BULK = 300


def quiet(engine: type[Engine]) -> type[Engine]:
    """The same without housekeeping: it comes when it likes, and waits for a turn to decide."""
    return type(engine.__name__, (engine,), {"_keep_house": lambda _: None})


class Held:
    """A broker whose next frame, once it is armed, stops at a step until it is let go."""

    def __init__(self, home: Path, *, engine: type[Engine] = Engine) -> None:
        self.steps: list[str] = []
        self.at = ""
        self.error: OSError | None = None
        self.held, self.followed, self.let_go = Event(), Event(), Event()
        settings = Settings(log_file_bytes=MIB, reserve_bytes=MIB)
        opened = quiet(engine).open(
            home, clock=ManualClock(), settings=settings, flush="sync", fault=self.step
        )
        self.broker = Broker(opened, "none")
        self.engine = opened
        self.broker.create_topic("t", queues=1)

    def arm(self, at: str = "before_write", *, error: str = "") -> None:
        self.at, self.error = at, OSError(error) if error else None

    def step(self, name: str) -> None:
        self.steps.append(name)
        if self.held.is_set() and name == "staged":
            self.followed.set()
        if name == self.at:
            self.at = ""
            self.held.set()
            assert self.let_go.wait(WITHIN_S)
            if self.error is not None:
                raise self.error

    def prepared(self, table: pa.Table, topic: str = "t") -> Send:
        return prepare(
            self.engine.state.topic(topic).topic,
            columns_of(table, schema.SEND),
            ids=self.engine.ids,
            delay_max_ms=1,
            now_ms=self.engine.clock.now_ms(),
        )

    def bodies(self) -> list[bytes]:
        found: list[bytes] = self.broker.read("t", 0, offset=0, limit=10_000)["body"].to_pylist()
        return found
