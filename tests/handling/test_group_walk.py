"""The walk over message groups: what counts of a handler's calls."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.handling.group_walk import UNORDERED_CALL_ROWS, Rules, walk
from rmq_pipeline.handling.handler import MESSAGES, RESULT, Outcome
from rmq_pipeline.handling.results import WalkResult

SINK = pa.schema([("message_group", pa.string()), ("body", pa.binary()), ("total", pa.int64())])
STATE = pa.schema([("total", pa.int64())])
Handle = Callable[[pa.Table, pa.Table], Outcome]


def messages(*bodies: tuple[str | None, str]) -> pa.Table:
    """Messages of (message_group, body), offsets 0, 1, 2, … on queue 0."""
    n = len(bodies)
    columns: dict[str, list[Any]] = {
        "queue_id": [0] * n,
        "queue_offset": list(range(n)),
        "message_group": [group for group, _ in bodies],
        "body": [body.encode() for _, body in bodies],
        "delivery_attempt": [1] * n,
    }
    return pa.table(
        [pa.array(columns.get(f.name, [None] * n), f.type) for f in MESSAGES], schema=MESSAGES
    )


def running_total(given_messages: pa.Table, state: pa.Table) -> Outcome:
    """Counts the messages of a group; a body of ``bad`` raises."""
    total = state["total"][0].as_py() if state.num_rows else 0
    rows = []
    for group, body in zip(
        given_messages["message_group"].to_pylist(), given_messages["body"].to_pylist(), strict=True
    ):
        if body == b"bad":
            raise ValueError("a bad body")
        total += 1
        rows.append({"message_group": group, "body": body, "total": total})
    return Outcome(
        rows=pa.Table.from_pylist(rows, schema=SINK),
        state=pa.table({"total": [total]}, schema=STATE),
    )


def rules(handler: Handle, **changes: Any) -> Rules:
    return Rules(handler, **{"sink_schema": SINK, "state_schema": STATE, **changes})


def result(table: pa.Table, outcome: str, **columns: Any) -> pa.Table:
    """RESULT rows that say the same of each message."""
    rows = [
        {"queue_id": q, "queue_offset": o, "outcome": outcome, **columns}
        for q, o in zip(
            table["queue_id"].to_pylist(), table["queue_offset"].to_pylist(), strict=True
        )
    ]
    return pa.Table.from_pylist(rows, schema=RESULT)


def exceptions(walked: WalkResult) -> list[tuple[Any, ...]]:
    """(row, outcome, retry_after_ms, reason, error_type), by row."""
    told = walked.exceptions.drop_columns(["traceback"])
    return sorted(tuple(row.values()) for row in told.to_pylist())


def column(walked: WalkResult, name: str) -> list[Any]:
    return [] if walked.rows is None else walked.rows[name].to_pylist()


def bodies(walked: WalkResult) -> list[str]:
    return [body.decode() for body in column(walked, "body")]


def states(walked: WalkResult) -> dict[str, int | None]:
    rows = walked.state.to_pylist() if walked.state else []
    return {row["message_group"]: None if row["removed"] else row["total"] for row in rows}


def test_each_group_is_one_call_with_its_own_state() -> None:
    calls: list[tuple[list[str], int]] = []

    def handler(given_messages: pa.Table, state: pa.Table) -> Outcome:
        calls.append((given_messages["message_group"].to_pylist(), state.num_rows))
        return running_total(given_messages, state)

    known = pa.table({"message_group": ["b", "never"], "total": [10, 99]})
    walked = walk(messages(("a", "1"), ("a", "2"), ("b", "3")), known, rules=rules(handler))

    assert calls == [(["a", "a"], 0), (["b"], 1)]
    assert column(walked, "total") == [1, 2, 11]
    assert states(walked) == {"a": 2, "b": 11}
    assert exceptions(walked) == []


def test_the_first_that_raises_fails_those_before_stand_those_after_are_released() -> None:
    given_messages = messages(("a", "1"), ("a", "2"), ("a", "bad"), ("a", "4"), ("b", "5"))

    walked = walk(given_messages, None, rules=rules(running_total))

    assert bodies(walked) == ["1", "2", "5"]
    assert states(walked) == {"a": 2, "b": 1}
    assert exceptions(walked) == [
        (2, "retry", None, "ValueError: a bad body", "ValueError"),
        (3, "release", None, None, None),
    ]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_single_message_that_raises_is_given_once(ordered: bool) -> None:
    calls = []

    def handler(given_messages: pa.Table, _: pa.Table) -> Outcome:
        calls.append(given_messages.num_rows)
        raise RuntimeError

    walked = walk(messages(("a", "1")), None, rules=rules(handler, ordered=ordered))

    assert calls == [1]
    assert exceptions(walked) == [(0, "retry", None, "RuntimeError: ", "RuntimeError")]


def test_a_handler_that_exits_fails_its_message() -> None:
    def handler(*_: pa.Table) -> Outcome:
        raise SystemExit(3)

    walked = walk(messages(("a", "1")), None, rules=rules(handler))

    assert exceptions(walked) == [(0, "retry", None, "SystemExit: 3", "SystemExit")]


def test_a_retry_of_one_of_several_gives_them_again_one_at_a_time() -> None:
    def handler(given_messages: pa.Table, state: pa.Table) -> Outcome:
        late = [i for i, b in enumerate(given_messages["body"].to_pylist()) if b == b"later"]
        done = running_total(given_messages, state)
        if not late:
            return done
        failed = result(given_messages.take(late), "retry", retry_after_ms=500, reason="too soon")
        return Outcome(rows=done.rows, state=done.state, results=failed)

    walked = walk(messages(("a", "1"), ("a", "later"), ("a", "3")), None, rules=rules(handler))

    assert bodies(walked) == ["1"]
    assert states(walked) == {"a": 1}
    assert exceptions(walked) == [
        (1, "retry", 500, "too soon", None),
        (2, "release", None, None, None),
    ]


def test_a_dead_letter_does_not_stop_its_group() -> None:
    def handler(given_messages: pa.Table, state: pa.Table) -> Outcome:
        done = running_total(given_messages, state)
        given_up = result(given_messages.slice(1, 1), "dead_letter", reason="no")
        return Outcome(rows=done.rows, state=done.state, results=given_up)

    walked = walk(messages(("a", "1"), ("a", "2"), ("a", "3")), None, rules=rules(handler))

    assert bodies(walked) == ["1", "2", "3"]
    assert states(walked) == {"a": 3}
    assert exceptions(walked) == [(1, "dead_letter", None, "no", None)]


def test_acks_said_aloud_are_acks() -> None:
    def handler(given_messages: pa.Table, _: pa.Table) -> Outcome:
        return Outcome(results=result(given_messages, "ack"))

    walked = walk(messages(("a", "1"), ("a", "2")), None, rules=rules(handler))

    assert exceptions(walked) == []


def test_a_state_of_no_rows_is_removed_and_none_is_kept() -> None:
    def handler(given_messages: pa.Table, state: pa.Table) -> Outcome:
        match given_messages["message_group"][0].as_py():
            case "gone":
                return Outcome(state=STATE.empty_table())
            case "kept":
                return Outcome()
            case _:
                return running_total(given_messages, state)

    known = pa.table({"message_group": ["gone", "kept", "new"], "total": [7, 8, 9]})
    walked = walk(messages(("gone", "1"), ("kept", "2"), ("new", "3")), known, rules=rules(handler))

    assert states(walked) == {"gone": None, "new": 10}


def test_messages_without_a_group_are_strangers() -> None:
    calls = []

    def handler(given_messages: pa.Table, state: pa.Table) -> Outcome:
        calls.append((given_messages.num_rows, state.num_rows))
        return Outcome()

    walk(messages((None, "1"), (None, "2")), None, rules=rules(handler))

    assert calls == [(1, 0), (1, 0)]


def test_published_messages_get_every_column_of_send() -> None:
    def handler(given_messages: pa.Table, _: pa.Table) -> Outcome:
        group = given_messages["message_group"][0].as_py()
        extra = {"tag": ["late"]} if group == "a" else {"keys": [["k"]]}
        return Outcome(publish={"onward": pa.table({"body": [b"x"], **extra})})

    walked = walk(
        messages(("a", "1"), ("b", "2")), None, rules=rules(handler, publishes={"onward": "normal"})
    )

    assert walked.publish["onward"].select(["body", "tag", "keys"]).to_pylist() == [
        {"body": b"x", "tag": "late", "keys": None},
        {"body": b"x", "tag": None, "keys": ["k"]},
    ]


ROW = pa.table({"message_group": ["a"], "body": [b"1"], "total": [1]}, schema=SINK)
BODY = pa.table({"body": [b"x"]})
LIST: Any = [BODY]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned NoneType, not an Outcome"),
        (Outcome(rows=[1]), "rows is a list, not a pyarrow Table"),
        (Outcome(rows=ROW.drop_columns(["total"])), "rows lack the column total"),
        (Outcome(rows=ROW.append_column("x", [[1]])), "columns that are not declared: x"),
        (Outcome(rows=pa.table({**ROW.to_pydict(), "total": ["many"]})), "rows do not fit"),
        (Outcome(rows=pa.table({**ROW.to_pydict(), "body": [None]})), "Column body of rows"),
        (Outcome(state=pa.table({"total": [1, 2]})), "state has 2 rows"),
        (Outcome(results=pa.table({"outcome": ["ack"]})), "results lack the column queue_id"),
        (Outcome(results=result(messages(("a", "1")), "nack")), "Outcome 'nack' is not one of"),
        (Outcome(results=result(messages(("", ""), ("", "")), "ack")), "offset 1, which is not"),
        (
            Outcome(results=pa.concat_tables([result(messages(("a", "1")), "retry")] * 2)),
            "name a message twice",
        ),
        (
            Outcome(results=result(messages(("a", "1")), "retry", retry_after_ms=-1)),
            "retry_after_ms -1",
        ),
        (Outcome(publish={"nowhere": BODY}), "Topic nowhere is not among"),
        (Outcome(publish={"onward": pa.table({"tag": ["t"]})}), "lack the column body"),
        (Outcome(publish={"onward": pa.table({"body": [b""]})}), "the body is empty"),
        (Outcome(publish={"fifo": BODY}), "a fifo message needs a message_group"),
        (Outcome(publish={"delay": BODY}), "it has no delay_level or deliver_at_ms"),
        (Outcome(publish=LIST), "publish is a list"),
    ],
)
def test_what_cannot_be_used_fails_its_message(returned: Any, reason: str) -> None:
    these = rules(
        lambda _messages, _state: returned,
        partition_time="body",
        publishes={"onward": "normal", "fifo": "fifo", "delay": "delay"},
    )

    walked = walk(messages(("a", "1")), None, rules=these)

    ((row, outcome, after, said, kind),) = exceptions(walked)
    assert (row, outcome, after) == (0, "retry", None)
    assert kind == "OutcomeError"
    assert said.startswith("OutcomeError: ")
    assert reason in said
    assert (walked.rows, walked.state, walked.publish) == (None, None, {})


def test_state_of_a_consumer_that_declares_none_is_refused() -> None:
    these = rules(lambda _m, _s: Outcome(state=pa.table({"total": [1]})), state_schema=None)

    walked = walk(messages(("a", "1")), None, rules=these)

    assert "declares no schema" in exceptions(walked)[0][3]


def test_unordered_one_bad_message_fails_alone() -> None:
    n = UNORDERED_CALL_ROWS + 10
    given_messages = messages(*[(None, "bad" if i == 7 else str(i)) for i in range(n)])
    sizes = []

    def handler(some: pa.Table, _: pa.Table) -> Outcome:
        sizes.append(some.num_rows)
        if b"bad" in some["body"].to_pylist():
            raise ValueError("a bad body")
        return Outcome(rows=some.select(["body"]))

    walked = walk(
        given_messages,
        None,
        rules=Rules(handler, ordered=False, sink_schema=pa.schema([("body", pa.binary())])),
    )

    assert sizes == [UNORDERED_CALL_ROWS, *[1] * UNORDERED_CALL_ROWS, 10]
    assert len(bodies(walked)) == n - 1
    assert exceptions(walked) == [(7, "retry", None, "ValueError: a bad body", "ValueError")]


def flaky(some: pa.Table, _: pa.Table) -> Outcome:
    """A row and a published message for all, and a retry for the body ``later``."""
    late = [i for i, body in enumerate(some["body"].to_pylist()) if body == b"later"]
    return Outcome(
        rows=some.select(["body"]),
        publish={"onward": some.select(["body"])},
        results=result(some.take(late), "retry") if late else None,
    )


@pytest.mark.parametrize(
    ("given_bodies", "sizes", "counts", "retried"),
    [
        (["0", "later", "2"], [3, 1, 1, 1], ["0", "2"], [1]),
        (["later"], [1], [], [0]),
        (["later", "later"], [2, 1, 1], [], [0, 1]),
        (["0", "1"], [2], ["0", "1"], []),
    ],
)
def test_unordered_nothing_of_a_retried_message_counts(
    given_bodies: list[str], sizes: list[int], counts: list[str], retried: list[int]
) -> None:
    calls = []

    def handler(some: pa.Table, state: pa.Table) -> Outcome:
        calls.append(some.num_rows)
        return flaky(some, state)

    body = pa.schema([("body", pa.binary())])
    these = Rules(handler, ordered=False, sink_schema=body, publishes={"onward": "normal"})
    walked = walk(messages(*[("a", each) for each in given_bodies]), None, rules=these)

    assert calls == sizes
    assert bodies(walked) == counts
    onward = walked.publish["onward"]["body"].to_pylist() if walked.publish else []
    assert [each.decode() for each in onward] == counts
    assert exceptions(walked) == [(row, "retry", None, None, None) for row in retried]


def test_an_empty_table_is_no_call() -> None:
    walked = walk(MESSAGES.empty_table(), None, rules=rules(running_total))

    assert (walked.rows, walked.state, walked.exceptions.num_rows) == (None, None, 0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30),
    st.lists(st.integers(1, 7), min_size=30, max_size=30),
)
def test_what_comes_out_does_not_depend_on_where_batches_are_cut(
    history: list[tuple[str, bool]], cuts: list[int]
) -> None:
    # A message fails the first time it is given alone or with others, and then no more.
    def drained(sizes: list[int]) -> tuple[dict[str, list[str]], dict[str, int]]:
        waiting: dict[str, list[str]] = defaultdict(list)
        for i, (group, fails) in enumerate(history):
            waiting[group].append(f"{i}{'!' if fails else ''}")
        rows: dict[str, list[str]] = defaultdict(list)
        totals: dict[str, int] = {}
        sizes = list(sizes)
        failed: set[bytes] = set()

        def handler(some: pa.Table, state: pa.Table) -> Outcome:
            for body in some["body"].to_pylist():
                if body.endswith(b"!") and body not in failed:
                    if some.num_rows == 1:
                        failed.add(body)
                    raise ValueError
            return running_total(some, state)

        while any(waiting.values()):
            size = sizes.pop() if sizes else 5
            batch = [(g, b) for g in sorted(waiting) for b in waiting[g][:size]]
            known = pa.table(
                {
                    "message_group": pa.array(list(totals), pa.string()),
                    "total": pa.array(list(totals.values()), pa.int64()),
                }
            )
            walked = walk(messages(*batch), known, rules=rules(handler))
            again = set(walked.exceptions["row"].to_pylist())
            for i, (group, body) in enumerate(batch):
                if i not in again:
                    assert waiting[group].pop(0) == body
                    rows[group].append(body)
            totals.update({g: n for g, n in states(walked).items() if n is not None})
            settled = [b for i, (_, b) in enumerate(batch) if i not in again]
            assert bodies(walked) == settled
        return dict(rows), totals

    rows, totals = drained(cuts)

    assert (rows, totals) == drained([100])
    assert totals == {group: len(of) for group, of in rows.items()}
