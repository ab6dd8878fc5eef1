"""A member that is gone is forgotten once its queues are unlocked, and not before."""

import pytest

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.members import UnlockMember
from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.work.membership import Members
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import StorageError


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def members(clock: ManualClock) -> Members:
    members = Members(clock, timeout_ms=limits.MEMBER_TIMEOUT_MS)
    members.heard("g", "a", topics=("t",), details={})
    clock.advance(limits.MEMBER_TIMEOUT_MS)
    return members


def test_nobody_learns_of_it_before_its_queues_are_unlocked(members: Members) -> None:
    known: list[list[str]] = []

    def unlock(_request: Request) -> None:
        known.append(list(members.topics_of("g")[1]))

    before = members.topics_of("g")[0]
    members.let_go(unlock, group="g")

    assert known == [["a"]]
    assert members.topics_of("g") == (before + 1, {})


def test_who_could_not_be_unlocked_is_tried_again(members: Members) -> None:
    asked: list[Request] = []

    def fail(_request: Request) -> None:
        raise StorageError("The disk is full.")

    with pytest.raises(StorageError):
        members.let_go(fail, group="g")
    members.let_go(asked.append, group="g")

    assert len(asked) == 1
    assert members.topics_of("g")[1] == {}


def test_who_comes_back_meanwhile_stays_a_member(members: Members) -> None:
    def come_back(_request: Request) -> None:
        members.heard("g", "a", topics=("t",), details={})

    members.let_go(come_back, group="g")

    assert list(members.topics_of("g")[1]) == ["a"]


@pytest.mark.parametrize("trying", [[[["x"]]], [["t", 0]], [["t", 0, 1.5]], [[None, 0, 1]], [7]])
def test_what_names_no_message_keeps_nobody_from_being_unlocked(
    members: Members, clock: ManualClock, trying: list[object]
) -> None:
    details = {"calls": 1, "trying": [*trying, ["t", 0, 1]]}
    members.heard("g", "a", topics=("t",), details=details)
    clock.advance(limits.MEMBER_TIMEOUT_MS)
    asked: list[Request] = []

    members.let_go(asked.append, group="g")

    unlocked = [each.begun for each in asked if isinstance(each, UnlockMember)]
    assert [begun.trying for begun in unlocked if begun] == [frozenset([("t", 0, 1)])]
    assert members.topics_of("g")[1] == {}
