"""``@transaction_checker``: user code resolves half messages that stay open.

Producers need not be online. The window counts due half messages and passes them to the checkers of
the code location. It ends the transactions as the checkers say.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.clock import Deadline
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.transactions import end_all, kept_checks
from rmq_pipeline.handling.pace import Pace
from rmq_pipeline.orchestration import windows
from rmq_pipeline.orchestration.declarations import KIND, DeclaredTopic, check_callable, identifier
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import (
    GROUP,
    WindowConfig,
    asset_key,
    metadata,
    op_name,
    run_window,
    upkeep_job,
)
from rmq_pipeline.orchestration.windows import JOBS, Fence, Report, UpkeepJob, WindowResult
from rmq_pipeline.transaction import RESOLUTIONS, Checker, answers

JOB: Final = "check_transactions"
#: Maximum number of half messages per call of a checker, and the number before its speed is known.
#: The latter is small: a checker that takes 5 s per row delays the others by little more than a
#: minute.
ASKED_ROWS: Final = 10_000
FIRST_ROWS: Final = 16
#: Target duration of a checker's call in seconds, because a killed run loses the call. A checker
#: with a fixed duration per call, whatever its rows, soon gets all of them.
ASKED_S: Final = 30.0
#: Checks that fall due while the window waits are passed to the checker within this time.
LOOK_MS: Final = 500
#: Outcomes of a checker's answers; failed: it raised, or its answer is invalid.
_OUTCOMES: Final = (*RESOLUTIONS, "failed")


@dataclass(frozen=True)
class TransactionChecker:
    """A checker of a pipeline, and the asset that shows its decisions."""

    topic: DeclaredTopic
    checker: Checker
    description: str
    #: Group of its asset.
    group_name: str | None = None

    @property
    def key(self) -> dg.AssetKey:
        """Key of its asset."""
        return dg.AssetKey(f"{identifier(self.topic.name)}_checks")

    def spec(self) -> dg.AssetSpec:
        """Return its asset; the topic, which receives committed messages, is downstream."""
        return dg.AssetSpec(
            self.key,
            group_name=self.group_name,
            description=self.description,
            kinds={KIND, "python"},
            skippable=True,
        )

    def ask(
        self, client: Client, *, pace: Pace, deadline: Deadline, window: Fence
    ) -> dict[str, int]:
        """Call the checker for due half messages of its topic; return the count of each outcome.

        Args:
            client: client of the broker.
            pace: limits the rows per call; adapts to the checker's speed.
            deadline: end of the fetches; at least one is made in any case.
            window: the window, whose lease is renewed during each call.
        """
        counts = dict.fromkeys(_OUTCOMES, 0)
        holder = uuid.uuid4().hex
        while True:
            checks = client.fetch_checks(
                topics=[self.topic.name],
                client_id=self.key.to_user_string(),
                limit=pace.limit,
                window=window,
                holder=holder,
            )
            if not checks.num_rows:
                return counts
            kept = kept_checks(
                client,
                checks,
                holder=holder,
                who=f"topic {self.topic.name}",
                every_s=windows.RENEW_S,
            )
            with windows.renewed(client, window), kept:
                began = time.monotonic()
                outcomes = self._decide(client, checks, window=window)
                if not outcomes.get("failed"):  # a checker that raises at once is not a fast one
                    pace.handled(checks.num_rows, time.monotonic() - began)
            for outcome, n in outcomes.items():
                counts[outcome] += n
            if deadline.is_over:
                return counts

    def _decide(self, client: Client, checks: pa.Table, *, window: Fence) -> dict[str, int]:
        try:
            said = answers(checks, self.checker(checks))
        except Exception:  # noqa: BLE001 - user code must not end the window
            name = self.key.to_user_string()
            dg.get_dagster_logger().exception("%s failed; its checks are repeated.", name)
            return {"failed": checks.num_rows}
        end_all(client, said, window=window)
        counted = pc.value_counts(said["resolution"]).to_pylist()
        return {each["values"]: each["counts"] for each in counted}


@dataclass(frozen=True, kw_only=True)
class transaction_checker:  # noqa: N801 - read as a decorator
    """Decorator that makes a checker of a function on schema.CHECK.

    The function returns commit, rollback or unknown for each row, in order, or schema.RESOLUTION.
    If it raises, the half messages stay open and are checked again 30 s later.
    """

    #: The topic whose half messages it resolves.
    topic: DeclaredTopic
    #: Shown with the asset; default: the first line of the function's docstring.
    description: str = ""

    def __call__(self, checker: Checker) -> TransactionChecker:
        """Create the checker.

        Raises:
            ValueError: the topic has no transactions.
        """
        if not isinstance(self.topic, DeclaredTopic):
            raise ValueError(  # noqa: TRY004 - as other checks
                f"A checker's topic is {self.topic!r}. Give what topic(...) returns."
            )
        if self.topic.type not in ("transaction", "mixed"):
            raise ValueError(f"Topic {self.topic.name} is {self.topic.type}: no transactions.")
        check_callable(checker, f"The checker of topic {self.topic.name}", takes=("checks",))
        first_line = (checker.__doc__ or "").strip().partition("\n")[0]
        return TransactionChecker(self.topic, checker, self.description or first_line)


def checking_job(checkers: Sequence[TransactionChecker]) -> UpkeepJob:
    """Return the check job that calls these checkers; its reports contain their ``answers``."""
    paces = [
        Pace(ASKED_ROWS, first=FIRST_ROWS, batch_s=ASKED_S, least=FIRST_ROWS) for _ in checkers
    ]

    def call(client: Client, *, wait_ms: int, window: Fence) -> Report:
        deadline = Deadline(wait_ms / 1000)
        while True:
            left_ms = int(1000 * deadline.left_s)
            report = client.check_transactions(
                wait_ms=min(left_ms, LOOK_MS) if checkers else left_ms, window=window
            )
            report["answers"] = {
                each.topic.name: each.ask(client, pace=pace, deadline=deadline, window=window)
                for each, pace in zip(checkers, paces, strict=True)
            }
            answered = any(any(counts.values()) for counts in report["answers"].values())
            if answered or JOBS[JOB].work_of(report) or not left_ms:
                return report

    return replace(JOBS[JOB], call=call)


def transaction_checks(checkers: Sequence[TransactionChecker]) -> dg.AssetsDefinition:
    """Return the check window as an asset, with one asset per checker for its decisions."""
    job = checking_job(checkers)
    upkeep = dg.AssetSpec(
        asset_key(JOB), group_name=GROUP, kinds={KIND}, description=job.description, skippable=True
    )

    @dg.multi_asset(name=op_name(JOB), specs=[upkeep, *(each.spec() for each in checkers)])
    def window(
        context: dg.AssetExecutionContext, *, config: WindowConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        with broker.client() as client:
            for each in checkers:
                each.topic.ensure(client)
        result = run_window(context, job, config=config, broker=broker)
        if result.yielded_to:
            return
        yield dg.MaterializeResult(asset_key=asset_key(JOB), metadata=metadata(job, result))
        for each in checkers:
            counts = answer_counts(result, each.topic.name)
            if any(counts.values()):
                asked = {"asked": sum(counts.values()), "epoch": result.epoch}
                yield dg.MaterializeResult(asset_key=each.key, metadata={**asked, **counts})

    return window


def transaction_check_job(checkers: Sequence[TransactionChecker]) -> Any:
    """Return the job of the check window."""
    return upkeep_job(JOBS[JOB], *(each.key for each in checkers))


def answer_counts(result: WindowResult, topic: str) -> dict[str, int]:
    """Return the number of each outcome of a topic's checker in a window."""
    counts = dict.fromkeys(_OUTCOMES, 0)
    for one in result.slices:
        for outcome, n in one.report.get("answers", {}).get(topic, {}).items():
            counts[outcome] += n
    return counts
