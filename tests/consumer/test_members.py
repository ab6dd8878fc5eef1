"""Members in processes of their own: one is killed, one stopped, one added, under load.

What was called when is in a journal of the members; who owned which queue is in the broker's log.
"""

import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.consumer.scene import GROUP, THREADS, TOPIC, TURN_S, Call, Place, Scene
from tests.waiting import until


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    order, group_order, *more = request.param
    scene = Scene(tmp_path, order=order, group_order=group_order, **(more[0] if more else {}))
    yield scene
    scene.close()


ORDERS: Final = [
    ("queue", "none"),
    ("queue", "queue"),
    ("key", "none"),
    ("key", "message_group"),
    ("concurrently", "none"),
    ("pull", "none"),
]


def _mostly_long(*quick: tuple[str, str]) -> list[Any]:
    """Every order; those that are not named take part in `make chaos`."""
    return [pytest.param(each, marks=[pytest.mark.long] * (each not in quick)) for each in ORDERS]


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    "scene",
    _mostly_long(("queue", "none"), ("key", "message_group")),
    ids="-of-".join,
    indirect=True,
)
def test_a_group_changes_under_load(scene: Scene, request: pytest.FixtureRequest) -> None:
    order, group_order = request.node.callspec.params["scene"]
    scene.load.start()
    for name in ("a", "b", "c"):
        scene.start(name)
    scene.wait_for_calls(100, "a", "b", "c")

    assert scene.end("a", signal.SIGKILL) == -signal.SIGKILL
    in_flight = _uncommitted(scene) if order == "pull" else _in_flight(scene, "a")
    scene.start("d")
    scene.wait_for_calls(100, "b", "c", "d")
    assert scene.end("b", signal.SIGTERM) == 0
    scene.wait_for_calls(200, "c", "d")
    scene.load.stop()
    until(scene.is_drained, within_s=150, what="a group without lag")
    assert scene.end("c", signal.SIGTERM) == 0 == scene.end("d", signal.SIGTERM)

    calls = scene.calls()
    begun = {call.place for call in calls if call.member == "a"}
    twice = _twice(calls, allowed=begun & in_flight)
    _check(scene, calls, twice, order=order)
    assert all(call.end_ms is not None or call.member == "a" for call in calls)
    print(f"{order} of {group_order}: {len(calls)} calls, {len(twice)} twice of {len(in_flight)}")


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    "scene",
    _mostly_long(("pull", "none")),
    ids="-of-".join,
    indirect=True,
)
def test_the_broker_of_a_group_is_killed(scene: Scene, request: pytest.FixtureRequest) -> None:
    order, _ = request.node.callspec.params["scene"]
    scene.load.start()
    scene.start("a")
    scene.start("b")
    scene.wait_for_calls(100, "a", "b")

    for _ in range(2):
        scene.kill_broker()
        scene.wait_for_calls(200, "a", "b")
    scene.load.stop()
    until(scene.is_drained, within_s=150, what="a group without lag")
    assert scene.end("a", signal.SIGTERM) == 0 == scene.end("b", signal.SIGTERM)

    calls = scene.calls()
    _check(scene, calls, _twice(calls, allowed=set()), order=order)
    assert all(call.end_ms is not None for call in calls)


#: As long as it takes until a member that does nothing is gone: seconds instead of minutes, with
#: the same between a lock's trust, a lock and a member. Machines of CI stood still for 12 s.
HASTY: Final = {
    "settings": {"member_timeout_ms": 24_000},
    "pace": {"lock_ms": 24_000, "renew_s": 0.5, "first_renew_s": 0.5},
}


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    "scene",
    [("queue", "none", HASTY), pytest.param(("key", "none", HASTY), marks=pytest.mark.long)],
    ids=["queue", "key"],
    indirect=True,
)
def test_a_member_that_stood_still_works_on_nothing_of_others(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    order, *_ = request.node.callspec.params["scene"]
    scene.load.start()
    scene.start("a")
    scene.start("b")
    scene.wait_for_calls(100, "a", "b")

    scene.members["a"].send_signal(signal.SIGSTOP)
    in_flight = _in_flight(scene, "a")
    scene.load.turn_s = 10 * TURN_S  # half a minute of the full load would only take time
    until(lambda: scene.holders() == {"b"}, within_s=150, what="all queues with b")
    scene.load.turn_s = TURN_S
    scene.wait_for_calls(100, "b")
    scene.members["a"].send_signal(signal.SIGCONT)
    scene.wait_for_calls(100, "a", "b")
    scene.load.stop()
    until(scene.is_drained, within_s=150, what="a group without lag")
    assert scene.end("a", signal.SIGTERM) == 0 == scene.end("b", signal.SIGTERM)

    calls = scene.calls()
    begun = {call.place for call in calls if call.member == "a"}
    _twice(calls, allowed=begun & in_flight)
    held = _locks(scene)
    stale = [call for call in calls if not _is_within(call, held)]
    # The calls it was in, or was about to make, when it stood still: their acks are refused.
    assert len(stale) <= THREADS
    assert {call.member for call in stale} <= {"a"}
    rest = [call for call in calls if call not in stale]
    print(f"not within a lock: {stale}\nlocks: {held}")
    _check(scene, rest, _twice(rest, allowed=begun & in_flight), order=order)


def _check(scene: Scene, calls: list[Call], twice: set[Place], *, order: str) -> None:
    """Nothing is lost, and what the consumers' order promises holds."""
    called, sent = {call.body for call in calls}, set(scene.load.sent)
    assert not sent - called, "nothing is lost"
    assert not called - sent, "nothing comes that was not sent"
    if order in ("queue", "pull"):
        _check_order(calls, twice, key_of=lambda call: call.place[0], at=lambda c: c.place[1])
    if order != "concurrently":
        _check_order(
            calls,
            twice,
            key_of=lambda call: call.body.partition(":")[0],
            at=lambda call: int(call.body.partition(":")[2]),
        )
        _check_owners(scene, calls)


def _in_flight(scene: Scene, member: str) -> set[Place]:
    """What a member that was killed just now has and has not settled."""
    rows = scene.sql(f"SELECT queue_id, queue_offset FROM in_flight WHERE client_id = '{member}'")
    return {(row["queue_id"], row["queue_offset"]) for row in rows}


def _uncommitted(scene: Scene) -> set[Place]:
    """What lies behind the committed offsets now."""
    ends = scene.client.describe_topic(TOPIC)["offsets"]
    begun = scene.client.start_offsets(GROUP, TOPIC, where="first")
    return {
        (end["queue_id"], offset)
        for end in ends
        for offset in range(begun[end["queue_id"]], end["max_offset"])
    }


def _twice(calls: list[Call], *, allowed: set[Place]) -> set[Place]:
    """Messages that came twice: none but these, and once more each."""
    times = Counter(call.place for call in calls)
    twice = {place for place, n in times.items() if n > 1}
    assert twice <= allowed, twice - allowed
    assert all(times[place] == 2 for place in twice)
    return twice


def _check_order(calls: list[Call], twice: set[Place], *, key_of: Any, at: Any) -> None:
    """Within a key nothing is passed over, and only what came twice comes again."""
    following: defaultdict[Any, int] = defaultdict(int)
    for call in calls:
        key, number = key_of(call), at(call)
        if number < following[key]:
            assert call.place in twice, f"{call} came again"
        else:
            assert number == following[key], f"{call} before {following[key]}"
        following[key] = number + 1
    ran: dict[Any, Call] = {}
    for call in calls:
        before = ran.get(key_of(call))
        if before is not None and before.end_ms is not None:
            assert before.end_ms <= call.begin_ms, f"{before} still ran at {call}"
        ran[key_of(call)] = call


def _check_owners(scene: Scene, calls: list[Call]) -> None:
    """The broker's log: a queue is locked by one at a time, and each call lies within a lock."""
    held = _locks(scene)
    assert [call for call in calls if not _is_within(call, held)] == []


def _is_within(call: Call, held: dict[int, list[tuple[str, int, int]]]) -> bool:
    """Whether the member had the queue locked while it was called."""
    end_ms = call.begin_ms if call.end_ms is None else call.end_ms
    locks = [lock for lock in held[call.place[0]] if lock[0] == call.member]
    return any(begin <= call.begin_ms and end_ms <= end for _, begin, end in locks)


def _locks(scene: Scene) -> dict[int, list[tuple[str, int, int]]]:
    """By queue who had it locked from when to when."""
    rows = scene.sql(
        "SELECT kind, at_ms, queue_id, visible_at_ms, client_id FROM events"
        " WHERE kind IN ('queue_locked', 'queue_unlocked') ORDER BY position, \"row\""
    )
    held: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
    now: dict[int, tuple[str, int, int]] = {}
    for row in rows:
        queue_id, client_id, at_ms = row["queue_id"], row["client_id"], row["at_ms"]
        before = now.pop(queue_id, None)
        if row["kind"] == "queue_unlocked":
            assert before is not None
            assert before[0] == client_id
            held[queue_id].append((client_id, before[1], at_ms))
            continue
        if before is not None and before[0] != client_id:
            assert before[2] <= at_ms, f"queue {queue_id} of {before} was locked by {client_id}"
            held[queue_id].append(before)
            before = None
        begin_ms = at_ms if before is None else before[1]
        now[queue_id] = (client_id, begin_ms, row["visible_at_ms"])
    for queue_id, lock in now.items():
        held[queue_id].append(lock)
    return held
