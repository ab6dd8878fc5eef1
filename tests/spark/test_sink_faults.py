"""A sink has each row once, whatever happens to windows and partitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.handling import sink
from rmq_pipeline.lake import publication, readers
from rmq_pipeline.spark.consumer import run_window
from tests.spark.handlers import SINK
from tests.spark.sink_home import GROUP, bodies_in, counting, next_window, opened, send, spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.spark

HOUR = "1970-01-01T00"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with opened(tmp_path / "home") as broker:
        yield broker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sink"


# ----------------------------------------------------------------------------- replaced partitions


def stage_replacement(folder: Path, *bodies: bytes) -> pa.Table:
    columns = {
        "message_group": [None] * len(bodies),
        "body": list(bodies),
        "step": [0] * len(bodies),
        "born_at_ms": [0] * len(bodies),
    }
    return sink.stage(
        folder,
        pa.table(columns, schema=SINK),
        partition_time="born_at_ms",
        epoch=0,
        batch=0,
        prefix="replay",
    )


@pytest.mark.parametrize("published_first", ["settle", "replacement"])
def test_a_partition_is_replaced_during_an_open_window(
    broker: Broker, folder: Path, spark: SparkSession, published_first: str
) -> None:
    send(broker, b"1", b"2")
    run_window(spec(folder), broker, spark=lambda: spark, owner="before", idle_s=0.2)
    send(broker, b"3")
    meanwhile = Meanwhile(broker, folder, first=published_first)

    report = run_window(spec(folder), meanwhile, spark=lambda: spark, owner="run", idle_s=0.2)
    meanwhile.publish_late()

    assert report.acked == 1
    assert bodies_in(folder) == [b"3", b"ONE", b"TWO"]
    files = readers.sink_paths(folder)
    assert {str(Path(path).relative_to(folder)) for path in files} == counting(broker)
    assert next_window(broker, folder) == 0
    send(broker, b"4")
    run_window(spec(folder), broker, spark=lambda: spark, owner="after", idle_s=0.2)
    assert bodies_in(folder) == [b"3", b"4", b"ONE", b"TWO"]


class Meanwhile:
    """The verbs of a broker, with a partition replaced before a settle, by somebody who is slow.

    The replacement is published at once, or only when the window is over.
    """

    def __init__(self, broker: Broker, folder: Path, *, first: str) -> None:
        self._broker, self._folder, self._first = broker, folder, first
        self._add = stage_replacement(folder, b"ONE", b"TWO")
        self._answer: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def settle(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Settle, a moment after the hour was replaced."""
        if not self._answer:
            self._answer = self._broker.replace_sink_files(
                GROUP,
                replacement_id="replay",
                add=self._add,
                remove=sorted(counting(self._broker)),
                partitions=[HOUR],
            )
            if self._first == "replacement":
                self.publish_late()
        return self._broker.settle(*args, **named)

    def publish_late(self) -> None:
        """Let readers see the replacement."""
        publication.publish_version(
            self._broker,
            GROUP,
            sink=self._folder,
            version=self._answer["version"],
            add=self._add,
            remove=self._answer["removed"],
        )


def test_a_window_killed_between_settle_and_manifest_is_published_by_the_next(
    broker: Broker, folder: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise KilledError

    send(broker, b"1", b"2")
    with monkeypatch.context() as patch:
        patch.setattr("rmq_pipeline.handling.window.publish_version", die)
        with pytest.raises(KilledError):
            run_window(spec(folder), broker, spark=lambda: spark, owner="dead", idle_s=0.2)
    before = readers.sink_paths(folder)

    swept = next_window(broker, folder)

    assert (before, swept) == ([], 0)
    assert bodies_in(folder) == [b"1", b"2"]
