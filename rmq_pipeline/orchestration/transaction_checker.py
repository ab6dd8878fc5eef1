"""``@transaction_checker``: user code decides the half messages that stay open.

Producers need not be online: the window counts what is due, has the checkers of the code location
asked about it, and ends the transactions as they say.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.transactions import end_all
from rmq_pipeline.handling.pace import Pace
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.held_window import held
from rmq_pipeline.orchestration.topic_assets import KIND, DeclaredTopic, identifier
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
#: Half messages that a checker gets at a time: at most, and as long as nothing is known of it. So
#: few that one of 5 s a row holds up the others for little more than a minute.
ASKED_ROWS: Final = 10_000
FIRST_ROWS: Final = 16
#: What a checker should take for them, in seconds: more is lost with a run that is killed. One that
#: takes less for each call, however many rows it gets, soon gets all.
ASKED_S: Final = 30.0
#: Checks that fall due while the window waits are asked within this time.
LOOK_MS: Final = 500
#: What became of those that a checker was asked about; failed: it raised, or made no sense.
_OUTCOMES: Final = (*RESOLUTIONS, "failed")


@dataclass(frozen=True)
class TransactionChecker:
    """A checker of a pipeline, and the asset that shows what it decided."""

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
        """Its asset; the topic, which gets what it commits, is downstream."""
        return dg.AssetSpec(
            self.key,
            group_name=self.group_name,
            description=self.description,
            kinds={KIND, "python"},
            skippable=True,
        )

    def ask(self, client: Client, *, pace: Pace, until: float, window: Fence) -> dict[str, int]:
        """Have it decide what is offered for its topic; how many it was asked, and outcomes.

        Args:
            client: of the broker.
            pace: how many it gets at a time; learns from what it answers.
            until: by time.monotonic; it is asked once in any case, and not again later than this.
            window: in whose name; it is held as long as the checker takes.
        """
        counts = dict.fromkeys(_OUTCOMES, 0)
        while True:
            checks = client.fetch_checks(
                topics=[self.topic.name],
                client_id=self.key.to_user_string(),
                limit=pace.limit,
                window=window,
            )
            if not checks.num_rows:
                return counts
            with held(client, window):
                began = time.monotonic()
                outcomes = self._decide(client, checks, window=window)
                if not outcomes.get("failed"):  # one that raises at once is no fast one
                    pace.worked(checks.num_rows, time.monotonic() - began)
            for outcome, n in outcomes.items():
                counts[outcome] += n
            if time.monotonic() >= until:
                return counts

    def _decide(self, client: Client, checks: pa.Table, *, window: Fence) -> dict[str, int]:
        try:
            said = answers(checks, self.checker(checks))
        except Exception:  # noqa: BLE001 - user code: the window goes on
            name = self.key.to_user_string()
            dg.get_dagster_logger().exception("%s failed; it is asked again.", name)
            return {"failed": checks.num_rows}
        end_all(client, said, window=window)
        counted = pc.value_counts(said["resolution"]).to_pylist()
        return {each["values"]: each["counts"] for each in counted}


@dataclass(frozen=True, kw_only=True)
class transaction_checker:  # noqa: N801 - read as a decorator
    """Makes a checker of a function: schema.CHECK -> commit, rollback or unknown of each, in order.

    It may also give schema.RESOLUTION. What it raises leaves the half messages open, and they are
    asked about again 30 s later.
    """

    #: Whose half messages it decides.
    topic: DeclaredTopic
    #: Shown with the asset; the first line of the function's docstring when empty.
    description: str = ""

    def __call__(self, checker: Checker) -> TransactionChecker:
        """The checker.

        Raises:
            ValueError: the topic has no transactions.
        """
        if self.topic.type not in ("transaction", "mixed"):
            raise ValueError(f"Topic {self.topic.name} is {self.topic.type}: no transactions.")
        first_line = (checker.__doc__ or "").strip().partition("\n")[0]
        return TransactionChecker(self.topic, checker, self.description or first_line)


def checking_job(checkers: Sequence[TransactionChecker]) -> UpkeepJob:
    """The check job that asks these checkers; its reports have their ``answers``."""
    paces = [
        Pace(ASKED_ROWS, first=FIRST_ROWS, batch_s=ASKED_S, least=FIRST_ROWS) for _ in checkers
    ]

    def call(client: Client, *, wait_ms: int, window: Fence) -> Report:
        until = time.monotonic() + wait_ms / 1000
        while True:
            left_ms = max(0, int(1000 * (until - time.monotonic())))
            report = client.check_transactions(
                wait_ms=min(left_ms, LOOK_MS) if checkers else left_ms, window=window
            )
            report["answers"] = {
                each.topic.name: each.ask(client, pace=pace, until=until, window=window)
                for each, pace in zip(checkers, paces, strict=True)
            }
            answered = any(any(counts.values()) for counts in report["answers"].values())
            if answered or JOBS[JOB].work_of(report) or not left_ms:
                return report

    return replace(JOBS[JOB], call=call)


def transaction_checks(checkers: Sequence[TransactionChecker]) -> dg.AssetsDefinition:
    """The check window as an asset, and one for what each of its checkers decided."""
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
            counts = _counts(result, each.topic.name)
            if any(counts.values()):
                asked = {"asked": sum(counts.values()), "epoch": result.epoch}
                yield dg.MaterializeResult(asset_key=each.key, metadata={**asked, **counts})

    return window


def transaction_check_job(checkers: Sequence[TransactionChecker]) -> Any:
    """The job of the check window."""
    return upkeep_job(JOBS[JOB], *(each.key for each in checkers))


def _counts(result: WindowResult, topic: str) -> dict[str, int]:
    counts = dict.fromkeys(_OUTCOMES, 0)
    for one in result.slices:
        for outcome, n in one.report.get("answers", {}).get(topic, {}).items():
            counts[outcome] += n
    return counts
