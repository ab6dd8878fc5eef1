"""A replay keeps its id, however its run or backfill is executed again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.plan.resume_retry import ReexecutionStrategy
from dagster._core.test_utils import in_process_test_workspace
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from rmq_pipeline.orchestration.replay import REPLAY_ID_TAG, keep_replay_id, replay_id_of


@dg.op
def replay(context: dg.OpExecutionContext) -> None:
    """Notes its id, as a replay does, and fails."""
    keep_replay_id(context.instance, context.run)
    raise dg.Failure("once more")


@dg.job
def replaying() -> None:
    replay()


defs = dg.Definitions(jobs=[replaying])


class Runs:
    """Runs of the job, and their re-executions as the UI makes them."""

    def __init__(self, instance: dg.DagsterInstance, workspace: Any) -> None:
        self._instance, self._workspace = instance, workspace
        self._location = workspace.code_locations[0]
        (repository,) = self._location.get_repositories().values()
        self._job = repository.get_full_job("replaying")

    def first(self, **tags: str) -> dg.DagsterRun:
        result = replaying.execute_in_process(
            instance=self._instance,
            raise_on_error=False,
            tags={f"dagster/{k}": v for k, v in tags.items()},
        )
        return self._of(result.run_id)

    def again(
        self,
        run: dg.DagsterRun,
        strategy: ReexecutionStrategy = ReexecutionStrategy.ALL_STEPS,
        *,
        inherits: bool = True,
    ) -> dg.DagsterRun:
        return self._instance.create_reexecuted_run(
            request_context=self._workspace,
            parent_run=run,
            code_location=self._location,
            remote_job=self._job,
            strategy=strategy,
            use_parent_run_tags=inherits,
        )

    def _of(self, run_id: str) -> dg.DagsterRun:
        run = self._instance.get_run_by_id(run_id)
        assert run is not None
        return run


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """On disk, as the UI's is: an ephemeral one loads no code."""
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        yield instance


@pytest.fixture
def runs(instance: dg.DagsterInstance) -> Iterator[Runs]:
    target = LoadableTargetOrigin(module_name=__name__, attribute="defs")
    with in_process_test_workspace(instance, target) as workspace:
        yield Runs(instance, workspace)


@pytest.mark.parametrize(
    "strategy", [ReexecutionStrategy.ALL_STEPS, ReexecutionStrategy.FROM_FAILURE]
)
def test_a_run_of_an_ended_backfill_keeps_its_id(
    instance: dg.DagsterInstance, runs: Runs, strategy: ReexecutionStrategy
) -> None:
    first = runs.first(backfill="ended")
    second = runs.again(first, strategy)
    third = runs.again(second)

    assert "dagster/backfill" not in second.tags
    assert replay_id_of(instance, second) == "ended"
    assert replay_id_of(instance, third) == "ended"


def test_a_run_that_inherits_no_tags_asks_those_it_descends_from(
    instance: dg.DagsterInstance, runs: Runs
) -> None:
    second = runs.again(runs.first(backfill="ended"), inherits=False)

    assert REPLAY_ID_TAG not in second.tags
    assert replay_id_of(instance, runs.again(second, inherits=False)) == "ended"


def test_a_run_without_a_backfill_shares_the_id_of_the_first(
    instance: dg.DagsterInstance, runs: Runs
) -> None:
    first = runs.first()

    assert replay_id_of(instance, runs.again(runs.again(first), inherits=False)) == first.run_id


def test_a_backfill_that_is_executed_again_keeps_the_id_of_the_first(
    instance: dg.DagsterInstance, runs: Runs
) -> None:
    second = runs.first(backfill="second", root_backfill_id="ended", parent_backfill_id="ended")

    assert replay_id_of(instance, second) == "ended"


def test_the_id_outlives_the_first_run(instance: dg.DagsterInstance, runs: Runs) -> None:
    first = runs.first(backfill="ended")
    second = runs.again(first)
    instance.delete_run(first.run_id)

    assert replay_id_of(instance, runs.again(second)) == "ended"


def test_an_unknown_id_is_refused_and_not_made_up(instance: dg.DagsterInstance, runs: Runs) -> None:
    first = runs.first(backfill="ended")
    second = runs.again(first, inherits=False)
    instance.delete_run(first.run_id)

    with pytest.raises(LookupError, match="Set replay_id"):
        replay_id_of(instance, second)
