"""Keyed state with dictionaries is counted as large as it is, and written wherever a file ends."""

import random
import string
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.request import Decision
from rmq_pipeline.broker.work import writer
from rmq_pipeline.errors import MessageBodyTooLargeError
from rmq_pipeline.store.log import frame
from rmq_pipeline.store.log.frame_builder import FrameBuilder
from tests.broker.sealed_home import MIB, open_broker

NO_OUTCOMES = schema.OUTCOME.empty_table()


def of_kinds(*kinds: str) -> pa.Table:
    groups = [str(i) for i in range(len(kinds))]
    return pa.table({"message_group": groups, "kind": pa.array(kinds).dictionary_encode()})


@pytest.mark.parametrize("kinds", [["x"], ["x" * 3 * MIB], [f"kind-{i}" for i in range(3000)]])
def test_keyed_state_takes_no_more_than_is_counted(kinds: list[str]) -> None:
    (batch,) = of_kinds(*kinds).to_batches()
    builder = FrameBuilder({}, seed=0, start=0)
    builder.stage(writer.KEYED_STATE, batch)

    assert builder.length <= Decision(keyed_state=[batch]).encode() <= builder.length + 16 * 1024


def test_what_is_counted_of_a_payload_is_its_length() -> None:
    (batch,) = of_kinds("a", "b", "a").slice(1).to_batches()

    assert frame.encoded_bytes(batch) == len(frame.encode(batch, None))


def test_settles_with_dictionaries_go_on_into_the_next_log_file(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    letters = random.Random(1).choices(string.ascii_letters, k=200 * 1024)
    state = of_kinds(*("".join(letters[i : i + 1024]) for i in range(0, len(letters), 1024)))
    with open_broker(home, log_file_bytes=4 * MIB) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        before = broker.engine.state

        for _ in range(50):
            broker.settle("g", NO_OUTCOMES, state=state, topic="t")

        assert broker.engine.state is before
        assert broker.engine.log.end > 2 * 4 * MIB
    assert not caplog.records


def test_a_store_takes_states_of_the_largest_size(home: Path) -> None:
    """DuckDB has all values of 2,048 rows in memory, in a commit, a checkpoint and a read."""
    memory, n = 64 * MIB, 2500
    largest = 16 * 1024 - 50
    values = [random.Random(i).randbytes(largest) for i in range(n)]
    state = pa.table({"message_group": [str(i) for i in range(n)], "value": values})

    with open_broker(home, log_file_bytes=64 * MIB, duckdb_memory_bytes=memory) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        for part in (state, state.slice(0, n // 2), state.slice(n // 2)):
            broker.settle("g", NO_OUTCOMES, state=part, topic="t")
        assert broker.sql("SELECT count(value) AS n FROM keyed_state_g")["n"].to_pylist() == [n]
        broker.engine.database.checkpoint()

    with open_broker(home, duckdb_memory_bytes=memory) as broker:
        found = broker.keyed_state("g", "t")
    assert found is not None
    assert sorted(found["value"].to_pylist()) == sorted(values)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", ["plain", "dictionary", "list"])
def test_a_state_that_dispatch_has_no_room_for_is_refused(
    home: Path, kind: str, is_first: bool
) -> None:
    def state_of(size: int) -> pa.Table:
        text = pa.array(["", "x" * size])
        made = {
            "plain": text,
            "dictionary": text.dictionary_encode(),
            "list": pa.array([[], ["x" * (size // 8)] * 8]),
        }
        return pa.table({"message_group": ["a", "b"], "value": made[kind]})

    with open_broker(home) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        if not is_first:
            broker.settle("g", NO_OUTCOMES, state=state_of(64_000), topic="t")

        with pytest.raises(MessageBodyTooLargeError, match=r"group b takes 66.* duckdb_memory_byt"):
            broker.settle("g", NO_OUTCOMES, state=state_of(66_000), topic="t")

        found = broker.keyed_state("g", "t")
    assert (found is None) == is_first
