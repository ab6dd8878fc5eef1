"""Options of the data source: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException

from rmq_pipeline.errors import RequestError
from rmq_pipeline.spark.source.offsets import Offsets, from_json, limited, to_json
from rmq_pipeline.spark.source.options import (
    Address,
    Bound,
    ReadOptions,
    for_batch,
    for_stream,
    for_write,
    matches,
)
from rmq_pipeline.spark.source.reader import Span, cut
from tests.spark.source_broker import TOPIC, Served, places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = {"endpoint": "127.0.0.1:1", "subscribe": "a"}


def test_times_win_over_offsets() -> None:
    said = {
        **HERE,
        "startingOffsets": '{"a": {"0": 3}}',
        "endingOffsets": '{"a": {"0": -1}}',
        "endingOffsetsByTimestamp": '{"a": {"0": 9}}',
    }

    assert for_batch(said).starting == Bound("offsets", {"a": {0: 3}})
    assert for_batch(said).ending == Bound("times", {"a": {0: 9}})
    assert for_batch({**said, "startingTimestamp": "7"}).starting == Bound("times", 7)


def test_where_reading_begins_and_ends_without_a_word() -> None:
    assert for_batch(HERE).starting == Bound("earliest")
    assert for_batch(HERE).ending == Bound("latest")
    assert for_stream(HERE).starting == Bound("latest")


def test_a_home_is_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert for_write({"home": "h"}).address == Address(None, str(tmp_path / "h"))
    assert for_batch({"subscribe": "a"}).address == Address(None, str(tmp_path / ".rmq"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": ""}, "subscribe must name the topics"),
        ({"subscribe": "a,,b"}, "subscribe must name the topics"),
        ({"subscribePattern": "b"}, "either subscribe or subscribePattern"),
        ({"startingOffset": "earliest"}, "Is startingOffsets meant"),
        ({"pushFilters": "yes"}, "pushFilters must be true or false"),
        ({"maxOffsetsPerTrigger": "5"}, "has no option maxOffsetsPerTrigger"),
        ({"startingOffsets": "latest"}, "cannot start at the latest"),
        ({"endingOffsets": "earliest"}, "cannot end at the earliest"),
        ({"startingOffsets": "soon"}, "startingOffsets must be earliest, latest, or JSON"),
        ({"startingOffsets": '{"a": 3}'}, "startingOffsets must be earliest, latest, or JSON"),
        ({"startingOffsets": '{"a": {"0": -3}}'}, "startingOffsets must be"),
        ({"startingOffsets": '{"a": {"0": 1.5}}'}, "startingOffsets must be"),
        ({"startingOffsets": '{"b": {"0": 1}}'}, "set for b, which subscribe does not name"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp must be a whole number"),
        ({"startingTimestamp": "-1"}, "startingTimestamp must be a whole number of at least 0"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": -1}}'}, "startingOffsetsByTimestamp must be"),
        ({"minPartitions": "0"}, "minPartitions must be a whole number of at least 1"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss must be true or false"),
        ({"home": "h"}, "either endpoint or home"),
    ],
)
def test_an_option_that_means_nothing_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        for_batch({**HERE, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribePattern": ""}, "must have 1 to 300 characters"),
        ({"subscribePattern": "a" * 301}, "must have 1 to 300 characters, not 301"),
        ({"subscribePattern": "("}, "must be a regular expression of Python's re"),
        ({"subscribePattern": "a{9999999999}"}, "must be a regular expression"),
        (
            {"subscribePattern": "a.*", "startingOffsets": '{"b": {"0": 1}}'},
            "set for b, which subscribePattern does not name",
        ),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(options: dict[str, str], said: str) -> None:
    for parsed in (for_batch, for_stream):
        with pytest.raises(RequestError, match=said):
            parsed({"endpoint": "127.0.0.1:1", **options})


def test_a_pattern_matches_whole_names_and_dead_letters_only_by_their_prefix() -> None:
    assert matches("orders.*", "orders-eu")
    assert not matches("orders", "orders-eu")
    assert not matches(".*", "%DLQ%billing")
    assert matches("%DLQ%.*", "%DLQ%billing")


waiting = st.dictionaries(st.integers(0, 8), st.integers(0, 1_000), min_size=1)


@given(st.dictionaries(st.sampled_from("abc"), waiting, min_size=1), st.integers(1, 2_000))
def test_a_micro_batch_has_as_many_messages_as_it_may(
    topics: dict[str, dict[int, int]], limit: int
) -> None:
    first = {t: Offsets(1, {q: 10 * q for q in queues}) for t, queues in topics.items()}
    end = {t: Offsets(1, {q: 10 * q + n for q, n in qs.items()}) for t, qs in topics.items()}

    found = limited(first, end, limit=limit)

    steps = [
        (found[t].at[q] - first[t].at[q], n)
        for t, queues in topics.items()
        for q, n in queues.items()
    ]
    assert all(0 <= step <= n for step, n in steps)
    assert sum(step for step, _ in steps) == min(limit, sum(n for _, n in steps))
    assert from_json(to_json(found)) == found


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=5),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 200),
)
def test_tasks_cover_what_is_read(
    sizes: list[int], min_partitions: int | None, max_records: int | None
) -> None:
    spans = [Span("a", q, 7, 7 + n) for q, n in enumerate(sizes)]
    options = ReadOptions(
        address=Address("x:1", None),
        topics=("a",),
        starting=Bound("earliest"),
        ending=Bound("latest"),
        fail_on_data_loss=True,
        min_partitions=min_partitions,
        max_records=max_records,
        max_offsets=None,
        group=None,
    )

    parts = cut(spans, options=options)

    covered = [(p.queue_id, at) for p in parts for at in range(p.start, p.end)]
    assert covered == [(q, at) for q, n in enumerate(sizes) for at in range(7, 7 + n)]
    assert len(parts) >= min(min_partitions or 0, sum(sizes))
    assert max_records is None or all(part.rows <= max_records for part in parts)


# ------------------------------------------------------------------------------- against a broker


@pytest.fixture
def served(tmp_path: Path, spark: SparkSession) -> Iterator[Served]:
    with Served(tmp_path / "home", spark) as served:
        served.broker.create_topic(TOPIC, queues=2)
        yield served


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "nowhere"}, "There is no topic nowhere. Create it with"),
        ({"subscribe": "order"}, "There is no topic order. Is orders meant"),
        ({"startingOffsets": f'{{"{TOPIC}": {{"0": 1}}}}'}, "has the queues 0, 1"),
        ({"startingOffsets": f'{{"{TOPIC}": {{"0": 99, "1": 0}}}}'}, "before 99"),
        (
            {
                "startingOffsets": f'{{"{TOPIC}": {{"0": 4, "1": 0}}}}',
                "endingOffsets": f'{{"{TOPIC}": {{"0": 3, "1": 0}}}}',
            },
            "after its end 3",
        ),
        ({"group": "g"}, "no option group"),
    ],
)
def test_a_read_that_cannot_be_is_refused(
    served: Served, options: dict[str, str], said: str
) -> None:
    served.send(10)

    with pytest.raises(PySparkException, match=said):
        served.read(**options)


@pytest.mark.spark
def test_a_missing_topic_is_found_before_any_task_starts(served: Served) -> None:
    served.send(10)
    before = _jobs(served)

    with pytest.raises(PySparkException, match=r"There is no topic order\. Is orders meant"):
        served.read(subscribe="order")
    with pytest.raises(PySparkException, match=r"No topic matches the subscribePattern 'x\.\*'"):
        served.read(subscribe=None, subscribePattern="x.*")
    rows = served.frame("body binary").write.format("rocketmq").mode("append")
    with pytest.raises(PySparkException, match=r"There is no topic order\. Is orders meant"):
        rows.options(endpoint=served.endpoint, topic="order").save()

    assert _jobs(served) == before


def _jobs(served: Served) -> int:
    """The number of jobs that Spark has started outside a job group."""
    return len(served.spark.sparkContext.statusTracker().getJobIdsForGroup(None))


@pytest.mark.spark
def test_a_pattern_reads_the_topics_that_match_at_planning(served: Served) -> None:
    served.broker.create_topic("orders-eu", queues=1)
    served.broker.create_topic("refunds", queues=1)
    for topic in (TOPIC, "orders-eu", "refunds"):
        served.send(10, topic)

    frame = served.frame(subscribe=None, subscribePattern="orders(-.*)?")

    counted = frame.groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in counted} == {TOPIC: 10, "orders-eu": 10}


@pytest.mark.spark
def test_a_column_that_no_message_has_is_refused(served: Served) -> None:
    with pytest.raises(PySparkException, match="A message has no column price"):
        served.frame("body binary, price int").toArrow()


@pytest.mark.spark
def test_expired_offsets_are_refused_unless_a_gap_will_do(served: Served) -> None:
    served.send(20)
    served.seal()
    served.broker.alter_topic(TOPIC, retention_ms=1_000)
    served.clock.advance(3_600_000)
    assert served.broker.expire()["rows"] == 20
    served.send(6)
    asked = {"startingOffsets": f'{{"{TOPIC}": {{"0": 2, "1": 0}}}}'}

    with pytest.raises(PySparkException, match="have expired"):
        served.read(**asked)
    found = served.read(**asked, failOnDataLoss="false")

    assert places(found) == {0: [10, 11, 12], 1: [10, 11, 12]}
    assert served.read().num_rows == 6
