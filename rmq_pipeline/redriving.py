"""Redrive of chosen dead letters at a limited rate, until too many of them fail again.

The broker takes each dead letter once (the verb ``redrive``) and records its outcome (the view
``redrives``). An interrupted redrive therefore continues under its id without duplicates.
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

#: stopped: too many failed again; waiting: no outcome came for ``patience_s``.
Status = Literal["running", "done", "stopped", "waiting"]

#: Polling interval of outcomes while the rate or the limit allows no message.
POLL_S: Final = 0.2
_DIALECT: Final = "duckdb"
#: Columns that a filter may use.
_FILTERED: Final = ("message_id", "message_group", "tag", "keys", "properties")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Choice of dead letters, and the limits of a redrive.

    Raises:
        RequestError: a number is out of range.
    """

    group: str
    #: A condition on the columns of the view dead_letters; empty: all that no redrive took.
    where: str = ""
    #: A filter on the messages, as for receive; empty: all.
    filter: str = ""
    filter_type: str = SQL92
    #: Messages per second; 0: limited by ``ahead`` only.
    rate_per_s: float = 0.0
    #: The redrive stops when more than this share of the first outcomes are no acks,
    max_failed_share: float = 0.2
    #: and there are at least this many first outcomes.
    minimum: int = 20
    #: Maximum number of messages, including earlier calls under the same id; 0: no maximum.
    limit: int = 0
    #: Maximum number of messages without an outcome; the redrive starts with fewer.
    ahead: int = 1_000
    #: The redrive ends when it has waited this long for an outcome.
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed_share <= 1:
            raise RequestError(f"max_failed_share must be 0 to 1, not {self.max_failed_share!r}.")
        if self.rate_per_s < 0 or self.limit < 0 or self.patience_s < 0:
            raise RequestError("Rate, limit and patience of a redrive must be at least 0.")
        if self.minimum < 1 or self.ahead < 1:
            raise RequestError("minimum and ahead of a redrive must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Progress of a redrive, over all calls under its id."""

    redrive_id: str
    status: Status
    #: Chosen dead letters, and how many of them the redrive has taken.
    chosen: int
    redriven: int
    #: Number of messages by current outcome.
    outcomes: Mapping[str, int] = field(default_factory=dict)
    #: Messages with a first outcome, and those whose first outcome was not an ack.
    decided: int = 0
    failed: int = 0
    seconds: float = 0.0

    @property
    def failed_share(self) -> float:
        """Share of first outcomes that are not acks; 0 before the first."""
        return self.failed / self.decided if self.decided else 0.0

    def facts(self) -> dict[str, Any]:
        """Return the fields for a listing."""
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
    """Return a new id for a redrive, readable by people."""
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
    """Redrive the dead letters of a plan, in order within each message group.

    Args:
        client: of the broker.
        plan: choice of dead letters, rate and limits.
        redrive_id: repeating an id continues that redrive.
        on_progress: called after every step.
        now: monotonic clock in seconds.
        pause: waits for a number of seconds.

    Returns:
        The final report.

    Raises:
        QueryError, FilterExpressionError: the condition or the filter is invalid; nothing was
            changed.
        ConsumerGroupNotFoundError: the group does not exist.
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
    """Return the messages of a redrive with their outcomes, in the order of their offsets."""
    return client.sql(manifest_query(redrive_id, limit=limit))


def manifest_query(redrive_id: str, *, limit: int | None = None) -> str:
    """Return the SQL of ``manifest``, for ``rmq sql``."""
    from sqlglot import exp

    query = exp.select("*").from_("redrives").where(exp.column("redrive_id").eq(redrive_id))
    query = query.order_by("topic", "queue_id", "queue_offset", "dead_letter_offset")
    return (query if limit is None else query.limit(limit)).sql(_DIALECT)


def condition(where: str) -> "exp.Expr":
    """Parse a condition on the columns of a view; any other SQL is refused.

    Raises:
        QueryError: it is not a condition; the error names the position.
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
        raise QueryError(f"{where!r} is not a condition.")
    return exp.paren(found, copy=False)


def _place(error: Any) -> str:
    """Return sqlglot's error position; it tries several parsers and wraps their errors."""
    inner = error.__cause__ or error
    first = (getattr(inner, "errors", None) or error.errors or [{}])[0]
    said, near = first.get("description"), first.get("highlight")
    if not said:
        return str(error)
    return f"line {first.get('line')}, column {first.get('col')}, near {near!r}: {said}."


def _choose(client: Client, plan: Plan) -> pa.Table:
    """Return the plan's dead letters that no redrive has taken; schema.DEAD_LETTER."""
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
    # In stored order: a message group lies in one queue, or moved to another at a resize.
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
    """State of a running redrive."""

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
        #: Messages that the rate allows now, and the time of that calculation.
        self._allowance, self._topped_at = 1.0, self._began

    def report(self) -> Report:
        """Return the progress."""
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
        """Redrive the messages that may go now, read the outcomes and update the status."""
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
        """Return how long to pause before the next step, in seconds; 0 for none."""
        if self._waits_for_outcomes():
            return POLL_S
        missing = 1.0 - self._allowance if self._plan.rate_per_s else 0.0
        # At least the resolution of the clock.
        return max(0.001, min(POLL_S, missing / self._plan.rate_per_s)) if missing > 0 else 0.0

    def _look(self) -> None:
        """Read the outcomes of this redrive's messages."""
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
            # A message whose outcome is gone was never delivered and says nothing about the
            # consumer.
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
        """Return how many more messages may lack an outcome; at most twice the decided ones."""
        most = min(self._plan.ahead, max(self._plan.minimum, 2 * self._decided))
        return most - self._undecided()

    def _allowed(self) -> int:
        """Return how many messages the rate allows; unused allowance expires after a second."""
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
