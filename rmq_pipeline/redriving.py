"""Redriving chosen dead letters at a rate, for as long as not too many of them fail again.

The broker opens each once (the verb ``redrive``) and keeps what becomes of it (the view
``redrives``): so a redrive that was cut short goes on under its id, and none is redriven twice.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.errors import QueryError, RequestError
from rmq_pipeline.filter.expression import SQL92, compile_filter
from rmq_pipeline.flight.client import Client

if TYPE_CHECKING:
    from sqlglot import exp

#: running; every message has an outcome; too many failed again; nobody has settled one for a while.
Status = Literal["running", "done", "stopped", "waiting"]

#: How often outcomes are looked at while there is nothing else to do.
POLL_S: Final = 0.2
_DIALECT: Final = "duckdb"
#: What a filter may look at.
_FILTERED: Final = ("message_id", "message_group", "tag", "keys", "properties")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which dead letters, and how.

    Raises:
        RequestError: a number is out of range.
    """

    group: str
    #: A condition on the columns of the view dead_letters; empty for all that were not redriven.
    where: str = ""
    #: A filter on the messages themselves, as for receive; empty for all.
    filter: str = ""
    filter_type: str = SQL92
    #: Messages per second; 0 for no limit but ``ahead``.
    rate_per_s: float = 0.0
    #: It stops when a larger share of the first outcomes than this are no acks,
    max_failed_share: float = 0.2
    #: once there are this many of them.
    minimum: int = 20
    #: At most this many messages of the redrive, earlier calls under its id included; 0 for all.
    limit: int = 0
    #: Messages that may be without an outcome at a time; fewer at the beginning.
    ahead: int = 1_000
    #: It ends when it waits for outcomes and none has come for this long.
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed_share <= 1:
            raise RequestError(f"max_failed_share is 0 to 1, not {self.max_failed_share!r}.")
        if self.rate_per_s < 0 or self.limit < 0 or self.patience_s < 0:
            raise RequestError("Rate, limit and patience of a redrive are 0 or more.")
        if self.minimum < 1 or self.ahead < 1:
            raise RequestError("minimum and ahead of a redrive are 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far a redrive has come, all calls under its id together."""

    redrive_id: str
    status: Status
    #: Dead letters that were chosen, and those of them that were redriven.
    chosen: int
    redriven: int
    #: How many have which outcome now.
    outcomes: Mapping[str, int] = field(default_factory=dict)
    #: Messages with a first outcome, and those whose first was no ack.
    decided: int = 0
    failed: int = 0
    seconds: float = 0.0

    @property
    def failed_share(self) -> float:
        """Of the messages that came again; 0 before the first."""
        return self.failed / self.decided if self.decided else 0.0

    def facts(self) -> dict[str, Any]:
        """Its fields, for a listing."""
        return {
            "redrive_id": self.redrive_id,
            "status": self.status,
            "chosen": self.chosen,
            "redriven": self.redriven,
            "decided": self.decided,
            "failed": self.failed,
            "failed_share": round(self.failed_share, 4),
            "outcomes": dict(self.outcomes),
            "seconds": round(self.seconds, 3),
        }


def new_id() -> str:
    """An id for a redrive, by which people find it again."""
    return f"redrive-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def redrive(
    client: Client,
    plan: Plan,
    *,
    redrive_id: str,
    on_progress: Callable[[Report], None] = lambda _: None,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = lambda seconds: threading.Event().wait(seconds),
) -> Report:
    """Redrive what the plan chooses, in order within each message group; how it ended.

    Args:
        client: of the broker.
        plan: which, how fast, and when to stop.
        redrive_id: the same id again goes on with that redrive.
        on_progress: told after every step.
        now: seconds on a clock that never goes back.
        pause: waits for some seconds of it.

    Raises:
        QueryError, FilterExpressionError: the condition, the filter is wrong; nothing was redriven.
        ConsumerGroupNotFoundError: there is no such group.
    """
    client.describe_group(plan.group)
    run = _Run(client, plan, redrive_id=redrive_id, now=now)
    while True:
        run.step()
        on_progress(run.report())
        if run.status != "running":
            return run.report()
        if wait_s := run.wait_s():
            pause(wait_s)


def manifest(client: Client, redrive_id: str, *, limit: int | None = None) -> pa.Table:
    """The messages of a redrive, in the order of their places, each with its outcome."""
    return client.sql(manifest_query(redrive_id, limit=limit))


def manifest_query(redrive_id: str, *, limit: int | None = None) -> str:
    """The question that the manifest answers, for ``rmq sql`` too."""
    from sqlglot import exp

    query = exp.select("*").from_("redrives").where(exp.column("redrive_id").eq(redrive_id))
    query = query.order_by("topic", "queue_id", "queue_offset", "dead_letter_offset")
    return (query if limit is None else query.limit(limit)).sql(_DIALECT)


def condition(where: str) -> "exp.Expr":
    """A condition on the columns of a view; nothing but a condition can be said in it.

    Raises:
        QueryError: it is none; where it does not parse.
    """
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import ParseError, SqlglotError

    try:
        (found,) = sqlglot.Dialect.get_or_raise(_DIALECT).parse_into(exp.Condition, where)
    except ParseError as error:
        raise QueryError(f"The condition does not parse: {_place(error)}") from error
    except (SqlglotError, ValueError) as error:
        raise QueryError(f"The condition does not parse: {error.__cause__ or error}.") from error
    if found is None or isinstance(found, exp.Star):
        raise QueryError(f"{where!r} is no condition.")
    return exp.paren(found, copy=False)


def _place(error: Any) -> str:
    """Where sqlglot stopped; it tries a condition as several things, and wraps what each said."""
    inner = error.__cause__ or error
    first = (getattr(inner, "errors", None) or error.errors or [{}])[0]
    said, near = first.get("description"), first.get("highlight")
    if not said:
        return str(error)
    return f"line {first.get('line')}, column {first.get('col')}, near {near!r}: {said}."


def _choose(client: Client, plan: Plan) -> pa.Table:
    """The dead letters of the plan that were not redriven; schema.DEAD_LETTER."""
    from sqlglot import exp

    wanted = compile_filter(plan.filter, plan.filter_type) if plan.filter else None
    letters = (
        exp.select("*")
        .from_("dead_letters")
        .where(exp.column("consumer_group").eq(plan.group))
        .where("redriven_at_ms IS NULL")
    )
    if plan.where:
        letters = letters.where(condition(plan.where))
    # As the messages were stored: a message group lies in one queue, or has moved to a newer one.
    query = (
        exp.select("d.queue_id", "d.queue_offset", *(f"d.{name}" for name in _FILTERED))
        .from_(letters.subquery("d"))
        .join(
            "messages AS m",
            on="m.topic = d.topic AND m.queue_id = d.origin_queue_id"
            " AND m.queue_offset = d.origin_queue_offset",
            join_type="left",
        )
        .order_by("m.stored_at_ms NULLS LAST", "d.topic", "d.origin_queue_id")
        .order_by("d.origin_queue_offset", "d.queue_offset")
    )
    found = client.sql(query.sql(_DIALECT, comments=False))
    if wanted is not None:
        found = found.filter(wanted.matches(found))
    return found.select(schema.DEAD_LETTER.names).cast(schema.DEAD_LETTER)


class _Run:
    """A redrive under way."""

    def __init__(
        self, client: Client, plan: Plan, *, redrive_id: str, now: Callable[[], float]
    ) -> None:
        self.status: Status = "running"
        self._client, self._plan, self._id, self._now = client, plan, redrive_id, now
        self._began = self._changed = now()
        self._outcomes: dict[str, int] = {}
        self._redriven = self._decided = self._failed = 0
        self._left = _choose(client, plan)
        self._look()
        if plan.limit:
            allowed = max(0, plan.limit - self._redriven)
            self._left = self._left.slice(0, min(self._left.num_rows, allowed))
        self._chosen = self._redriven + self._left.num_rows
        #: What the rate allows now, and since when it was not topped up.
        self._allowance, self._topped_at = 1.0, self._began

    def report(self) -> Report:
        """How far it has come."""
        return Report(
            redrive_id=self._id,
            status=self.status,
            chosen=self._chosen,
            redriven=self._redriven,
            outcomes=dict(self._outcomes),
            decided=self._decided,
            failed=self._failed,
            seconds=self._now() - self._began,
        )

    def step(self) -> None:
        """Redrive what may be now, look at the outcomes, and see whether it is over."""
        if self._failed_too_often():
            self.status = "stopped"
            return
        n = min(self._left.num_rows, self._room(), self._allowed())
        if n > 0:
            chunk, self._left = self._left.slice(0, n), self._left.slice(n)
            self._client.redrive(self._plan.group, chunk, redrive_id=self._id)
            self._allowance -= n
        self._look()
        if self._failed_too_often():
            self.status = "stopped"
        elif not self._left.num_rows and not self._undecided():
            self.status = "done"
        elif self._waits_for_outcomes() and self._idle_s() >= self._plan.patience_s:
            self.status = "waiting"

    def wait_s(self) -> float:
        """How long there is nothing to do but to look; 0 when there is."""
        if self._waits_for_outcomes():
            return POLL_S
        missing = 1.0 - self._allowance if self._plan.rate_per_s else 0.0
        # No less than the clock can tell apart.
        return max(0.001, min(POLL_S, missing / self._plan.rate_per_s)) if missing > 0 else 0.0

    def _look(self) -> None:
        """What became of the messages of this redrive so far."""
        from sqlglot import exp

        query = exp.select("outcome", "first_outcome", "count(*) AS n").from_("redrives")
        query = query.where(exp.column("redrive_id").eq(self._id)).group_by("ALL")
        before = (self._redriven, self._decided)
        self._outcomes = {}
        self._redriven = self._decided = self._failed = 0
        for row in self._client.sql(query.sql(_DIALECT)).to_pylist():
            outcome, first, n = row["outcome"], row["first_outcome"], row["n"]
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + n
            self._redriven += n
            # What is gone came to nobody, so it says nothing about the consumer.
            if first is not None and first != "gone":
                self._decided += n
                self._failed += n if first != "acked" else 0
        if before != (self._redriven, self._decided):
            self._changed = self._now()

    def _undecided(self) -> int:
        return self._outcomes.get("waiting", 0)

    def _failed_too_often(self) -> bool:
        enough = self._decided >= self._plan.minimum
        return enough and self._failed > self._plan.max_failed_share * self._decided

    def _room(self) -> int:
        """How many more may be without an outcome; twice as many as have one."""
        most = min(self._plan.ahead, max(self._plan.minimum, 2 * self._decided))
        return most - self._undecided()

    def _allowed(self) -> int:
        """How many the rate allows; what was not used is lost after a second."""
        rate = self._plan.rate_per_s
        if not rate:
            return int(self._left.num_rows)
        now = self._now()
        self._allowance += rate * (now - self._topped_at)
        self._allowance, self._topped_at = min(self._allowance, max(1.0, rate)), now
        return int(self._allowance)

    def _waits_for_outcomes(self) -> bool:
        return not self._left.num_rows or self._room() <= 0

    def _idle_s(self) -> float:
        return self._now() - self._changed
