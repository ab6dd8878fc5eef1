"""Hashes are stored: whichever way they are computed, they are the same."""

import pyarrow as pa
import pytest

from rmq_pipeline.message import hash64, hashes_and_queues, java_string_hash, queue_of_groups

#: Few rows and many, short texts and long ones, take different ways to the same number.
TEXTS = ["a", "group-1", "group-12", "x" * 63, "Ω-group", "", "y" * 300]


@pytest.mark.parametrize("count", [2, 100, 600, 5000])
@pytest.mark.parametrize("texts", [TEXTS[:3], TEXTS[:4], TEXTS[:6], TEXTS])
def test_a_text_has_one_hash(texts: list[str], count: int) -> None:
    given = [texts[i % len(texts)] for i in range(count)]

    found = hash64(pa.array(given)).tolist()

    assert found == [hash64(pa.array([text]))[0] for text in given]


@pytest.mark.parametrize("count", [2, 100, 600, 5000])
@pytest.mark.parametrize("texts", [TEXTS[:3], TEXTS[:4]])
def test_a_group_has_one_queue(texts: list[str], count: int) -> None:
    given = [texts[i % len(texts)] for i in range(count)]

    found = queue_of_groups(pa.array(given), 8).tolist()

    assert found == [queue_of_groups(pa.array([text]), 8)[0] for text in given]


@pytest.mark.parametrize("count", [1, 2, 100, 600, 5000])
@pytest.mark.parametrize("texts", [TEXTS[:3], TEXTS[:4], TEXTS[:6], TEXTS, [""]])
def test_hash_and_queue_are_the_same_read_together(texts: list[str], count: int) -> None:
    groups = pa.array([texts[i % len(texts)] for i in range(count)])

    hashes, queues = hashes_and_queues(groups.slice(count // 3), 8)

    assert hashes.tolist() == hash64(groups.slice(count // 3)).tolist()
    assert queues.tolist() == queue_of_groups(groups.slice(count // 3), 8).tolist()


def test_the_hash_of_a_group_is_that_of_java() -> None:
    assert java_string_hash("group-1") == 293_427_299
    assert hash64(pa.array(["group-1"])).tolist() == [-3557784154408675969]
