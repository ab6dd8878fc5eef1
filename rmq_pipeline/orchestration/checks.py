"""Asset checks: order, no loss, oldest unread, dead letters, and that Dagster did the upkeep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.broker_resource import BrokerResource

FALLBACK_HOURS: Final = 1
#: How far back the checks of order and loss look; the windows that run them are minutes apart.
HISTORY_HOURS: Final = 24
OLDEST_UNREAD_MINUTES: Final = 15
DEAD_LETTERS: Final = 0

Evaluate = Callable[[Client], dg.AssetCheckResult]


@dataclass(frozen=True)
class Thresholds:
    """When a consumer's checks turn yellow."""

    #: Messages in the dead letter topic that are expected.
    dead_letters: int = DEAD_LETTERS
    #: How long a message may wait to be settled.
    oldest_unread_minutes: float = OLDEST_UNREAD_MINUTES


def consumer_checks(
    group: str, key: dg.AssetKey, *, ordered: bool, thresholds: Thresholds
) -> list[dg.AssetChecksDefinition]:
    """The checks of a consumer's asset; they run after each of its windows, and on demand."""
    checks = [
        _check(key, "no_loss", evaluate=lambda client: _no_loss(client, group)),
        _check(
            key,
            "oldest_unread",
            evaluate=lambda client: _oldest_unread(
                client, group, limit_minutes=thresholds.oldest_unread_minutes
            ),
        ),
        _check(
            key,
            "dead_letters",
            evaluate=lambda client: dead_letter_result(
                client, group, expected=thresholds.dead_letters
            ),
        ),
    ]
    if ordered:
        checks.append(_check(key, "order", evaluate=lambda client: _order(client, group)))
    return checks


def fallback_check(job: str, key: dg.AssetKey) -> dg.AssetChecksDefinition:
    """Red when the broker had to do this upkeep itself, because no window came."""
    return _check(key, "no_fallback", evaluate=lambda client: fallback_result(client, job))


def _check(key: dg.AssetKey, name: str, *, evaluate: Evaluate) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=key, name=name, description=_DESCRIPTIONS[name])
    def check(broker: BrokerResource) -> dg.AssetCheckResult:
        with broker.client() as client:
            return evaluate(client)

    return check


_DESCRIPTIONS: Final = {
    "order": "No message was settled before an earlier one of its message group.",
    "no_loss": "Every message delivered is settled, or will be given again.",
    "oldest_unread": "No message has waited too long.",
    "dead_letters": "No more dead letters than expected.",
    "no_fallback": "Dagster did this upkeep; the broker did not have to.",
}


def _order(client: Client, group: str) -> dg.AssetCheckResult:
    from rmq_pipeline.orchestration import queries

    violations = queries.order_violations(client, group, since_ms=_since_ms(client))
    return dg.AssetCheckResult(passed=violations == 0, metadata={"violations": violations})


def _no_loss(client: Client, group: str) -> dg.AssetCheckResult:
    from rmq_pipeline.orchestration import queries

    lost = queries.lost(client, group, since_ms=_since_ms(client))
    return dg.AssetCheckResult(passed=lost == 0, metadata={"lost": lost})


def _since_ms(client: Client) -> int:
    return int(client.due()["now_ms"]) - HISTORY_HOURS * 3_600_000


def _oldest_unread(client: Client, group: str, *, limit_minutes: float) -> dg.AssetCheckResult:
    from rmq_pipeline.orchestration import queries

    lag, oldest_ms = queries.lag(client, group)
    waited_s = 0.0
    if oldest_ms is not None:
        waited_s = max(0.0, (int(client.due()["now_ms"]) - oldest_ms) / 1000)
    return dg.AssetCheckResult(
        passed=waited_s <= 60 * limit_minutes,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"lag": lag, "oldest_waited_seconds": round(waited_s, 1)},
    )


def dead_letter_result(client: Client, group: str, *, expected: int) -> dg.AssetCheckResult:
    """Whether a group has no more dead letters than expected; the reasons of those it has."""
    from rmq_pipeline.orchestration import queries

    count = queries.dead_letters(client).get(group, 0)
    reasons = queries.dead_letter_reasons(client, group) if count else []
    rows = [
        dg.TableRecord({"reason": each["reason"] or "", "messages": each["n"]}) for each in reasons
    ]
    return dg.AssetCheckResult(
        passed=count <= expected,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"dead_letters": count, "expected": expected}
        | ({"reasons": dg.MetadataValue.table(rows)} if rows else {}),
    )


def fallback_result(client: Client, job: str) -> dg.AssetCheckResult:
    """Whether the broker did this kind of overdue work itself within the last hour."""
    from rmq_pipeline.orchestration import queries

    since_ms = int(client.due()["now_ms"]) - FALLBACK_HOURS * 3_600_000
    found = queries.fallbacks(client, job, since_ms=since_ms)
    metadata: dict[str, Any] = {"fallbacks": len(found), "hours": FALLBACK_HOURS}
    if found:
        metadata["last_at"] = dg.MetadataValue.timestamp(found[0]["at_ms"] / 1000)
    return dg.AssetCheckResult(passed=not found, metadata=metadata)
