"""Actions of an operator on a group, each with a plan of its effect before it is carried out."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from rmq_pipeline import redriving, schema
from rmq_pipeline.errors import BusyError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.store.statements import literal, select
from rmq_pipeline.text import format_ms, utc_ms

log = logging.getLogger(__name__)

Row = dict[str, Any]
#: Redrives that run at a time in the process of the page.
MOST_REDRIVES: Final = 4
#: Rate of a redrive in messages per second, unless the form has another.
RATE_PER_S: Final = 50.0
#: A slower redrive would occupy its place for too long.
_LEAST_RATE: Final = 0.1


@dataclass(frozen=True)
class Plan:
    """Effect of an action: a sentence, and its rows by queue or topic."""

    action: str
    sentence: str
    rows: list[Row]
    #: Fields of the form, repeated when the action is confirmed.
    fields: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        """Return True if the action would change nothing."""
        return not self.rows


Form = Mapping[str, str]


class Planner(Protocol):
    """Returns the effect of an action on a group."""

    def __call__(self, client: Client, group: str, *, form: Form) -> Plan:
        """Compute it."""
        ...


class Doer(Protocol):
    """Carries an action out, and returns a sentence about it."""

    def __call__(self, client: Client, group: str, *, form: Form) -> str:
        """Do it."""
        ...


# -------------------------------------------------------------------------------------- redrive


def plan_redrive(client: Client, group: str, *, form: Form) -> Plan:
    """Count the dead letters that a redrive would deliver again."""
    signature = form.get("signature") or None
    query = select("web_redrive_plan", consumer_group=group, signature=signature)
    rows: list[Row] = client.sql(query).to_pylist()
    count = sum(row["messages"] for row in rows)
    sentence = (
        f"{count} dead letters are delivered to {group} again, each once, from their first attempt"
        f" on, at most {_rate(form):g} a second. The redrive stops when more than a fifth of them"
        " fail again."
    )
    return Plan("redrive", sentence, rows, dict(form))


class Redrives:
    """Redrives that run in threads of this process; each continues under its id elsewhere."""

    def __init__(self, *, most: int = MOST_REDRIVES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._running: set[str] = set()

    def start(self, client: Client, group: str, *, form: Form) -> str:
        """Start a redrive; return a sentence with its id.

        Raises:
            BusyError: too many redrives run.
            RequestError: the rate is not a number.
        """
        signature = form.get("signature")
        plan = redriving.Plan(
            group=group,
            where=f"signature = {literal(signature)}" if signature else "",
            rate_per_s=_rate(form),
        )
        redrive_id = redriving.new_id()
        with self._lock:
            if len(self._running) >= self._most:
                raise BusyError(
                    f"{len(self._running)} redrives run in this process.",
                    remedy="Wait until one of them has ended.",
                )
            self._running.add(redrive_id)
        try:
            # Without the right, it is refused here and not where nobody sees it.
            client.redrive(group, schema.DEAD_LETTER.empty_table(), redrive_id=redrive_id)
            threading.Thread(
                target=self._run,
                args=(client, plan),
                kwargs={"redrive_id": redrive_id},
                name="rmq-redrive",
                daemon=True,
            ).start()
        except BaseException:
            self._end(redrive_id)
            raise
        return f"Redrive {redrive_id} has begun; the table of redrives shows its outcomes."

    def _run(self, client: Client, plan: redriving.Plan, *, redrive_id: str) -> None:
        try:
            report = redriving.redrive(client, plan, redrive_id=redrive_id)
            log.info("redrive %s of %s: %s", redrive_id, plan.group, report.status)
        except Exception as error:  # noqa: BLE001 - the thread has no caller
            log.warning(
                "redrive %s of %s ended early: %s Continue it: rmq dead-letters redrive %s --id %s",
                *(redrive_id, plan.group, error, plan.group, redrive_id),
            )
        finally:
            self._end(redrive_id)

    def _end(self, redrive_id: str) -> None:
        with self._lock:
            self._running.discard(redrive_id)


def _rate(form: Form) -> float:
    text = form.get("rate") or str(RATE_PER_S)
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not _LEAST_RATE <= rate <= 1e6:
        raise RequestError(
            f"The rate {text!r} is no number of messages per second.",
            remedy=f"Give {_LEAST_RATE} to 1000000.",
        )
    return rate


# --------------------------------------------------------------------------------------- unpark


def plan_unpark(client: Client, group: str, *, form: Form) -> Plan:
    """Count the parked messages that an unpark would deliver again or skip."""
    wanted = form.get("message_group") or None
    query = select("web_unpark_plan", consumer_group=group, message_group=wanted)
    rows: list[Row] = client.sql(query).to_pylist()
    sums = {name: sum(row[name] for row in rows) for name in ("parked", "waiting", "quarantined")}
    end = "are dead-lettered" if form.get("skip") else "are delivered again from attempt 1 on"
    sentence = f"{sums['parked']} parked messages {end}"
    sentence += f"; the {sums['waiting']} messages behind them follow."
    if sums["quarantined"]:
        sentence += f" The quarantine of {sums['quarantined']} message groups is lifted."
    return Plan("unpark", sentence, rows, dict(form))


def unpark(client: Client, group: str, *, form: Form) -> str:
    """Unpark the messages of the form; return a sentence with their numbers."""
    chosen: Any = None
    if wanted := form.get("message_group"):
        chosen = pa.table({"message_group": pa.array([wanted], pa.string())})
    done = client.unpark(group, message_groups=chosen, skip=bool(form.get("skip")))
    return (
        f"{done['unparked']} messages are delivered again, {done['skipped']} are dead-lettered;"
        f" the quarantine of {done['lifted']} message groups is lifted."
    )


# ---------------------------------------------------------------------------------------- reset


def plan_reset(client: Client, group: str, *, form: Form) -> Plan:
    """Compute how many messages of each queue a reset delivers again or skips."""
    topic = form.get("topic", "")
    target = _target(form)
    offsets = {each["queue_id"]: each for each in client.describe_topic(topic)["offsets"]}
    query = select("web_reset_plan", consumer_group=group, topic=topic)
    known = {row["queue_id"]: row for row in client.sql(query).to_pylist()}
    rows = []
    for queue_id, bounds in offsets.items():
        to = bounds["max_offset"]
        if "to_earliest" in target:
            to = bounds["min_offset"]
        elif "to_time_ms" in target:
            to = client.offset_at(topic, queue_id, at_ms=target["to_time_ms"])
        now = known.get(queue_id, {"cursor": bounds["min_offset"], "in_flight": 0})
        rows.append(
            {
                "queue_id": queue_id,
                "from_offset": now["cursor"],
                "to_offset": to,
                "delivered_again": max(0, now["cursor"] - to),
                "skipped": max(0, to - now["cursor"]),
                "ended_leases": now["in_flight"],
            }
        )
    sums = {name: sum(row[name] for row in rows) for name in ("delivered_again", "skipped")}
    moment = f" to {format_ms(target['to_time_ms'])}" if "to_time_ms" in target else ""
    sentence = (
        f"{group} moves in {topic}{moment}: {sums['delivered_again']} messages are delivered again,"
        f" {sums['skipped']} are skipped. Its leases there end, and their receipts become invalid."
    )
    fields = dict(form)
    if "to_time_ms" in target:
        fields["time"] = str(target["to_time_ms"])
    return Plan("reset", sentence, rows, fields)


def reset(client: Client, group: str, *, form: Form) -> str:
    """Reset the offsets of a group as the form says; return a sentence."""
    moved = client.reset_offset(group, form.get("topic", ""), **_target(form))
    return f"{group} was moved in {moved.num_rows} queues of {form.get('topic')}."


def _target(form: Form) -> dict[str, Any]:
    match form.get("to"):
        case "earliest":
            return {"to_earliest": True}
        case "latest":
            return {"to_latest": True}
        case "time":
            return {"to_time_ms": utc_ms(form.get("time", ""))}
    raise RequestError(
        "The form has no target.", remedy="Choose the beginning, the end, or a time."
    )


PLANS: Final[Mapping[str, Planner]] = {
    "redrive": plan_redrive,
    "unpark": plan_unpark,
    "reset": plan_reset,
}
DOES: Final[Mapping[str, Doer]] = {"unpark": unpark, "reset": reset}
