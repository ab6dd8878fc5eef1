"""What is looked up of the backlog of a message group, when the state has changed meanwhile."""

from rmq_pipeline.broker.state.event_rows import single
from rmq_pipeline.broker.state.group_order import ByGroup
from rmq_pipeline.store.events import Kind

GROUP = 7


def passed(*, backlog: int, cursor: int) -> ByGroup:
    """A queue whose cursor has passed messages of a group that waits."""
    state = ByGroup()
    state.apply(single(Kind.BEHIND, 0, offset=backlog, message_group_hash=GROUP))
    state.apply(single(Kind.CURSOR, 0, offset=cursor))
    return state


def look_up(state: ByGroup, offsets: list[int], *, stop: int) -> list[int]:
    found = state.looked_up([GROUP], [offsets], starts=[2], more_from=[None], stop=stop)
    state.fill_backlogs(found)
    return state.backlog[GROUP].known


def test_what_was_looked_up_is_the_backlog() -> None:
    assert look_up(passed(backlog=2, cursor=9), [2, 4, 8], stop=9) == [2, 4, 8]


def test_messages_that_the_cursor_has_passed_meanwhile_are_looked_up_later() -> None:
    state = passed(backlog=2, cursor=20)

    assert look_up(state, [2, 4, 8], stop=9) == [2, 4, 8]
    assert state.backlog[GROUP].more_from == 9


def test_a_look_up_beyond_the_cursor_of_a_rebuilt_state_is_dropped() -> None:
    # The frame that moved the cursor to 9 was refused, and the state is that of the log again.
    state = passed(backlog=2, cursor=5)

    assert look_up(state, [2, 4, 8], stop=9) == []
    assert state.backlog[GROUP].more_from == 2
    assert state.empty_backlogs({}) == []
    assert look_up(state, [2, 4], stop=5) == [2, 4]
