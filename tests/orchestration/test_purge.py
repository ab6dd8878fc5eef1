"""Old runs go, and only those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from rmq_pipeline.orchestration.operator_jobs import PURGE, PurgeConfig, purge_asset, purge_runs
from rmq_pipeline.orchestration.upkeep_assets import op_name

SUCCESS = (dg.DagsterRunStatus.SUCCESS,)
Run = Callable[[], str]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        yield instance


@dg.asset
def cheap() -> None:
    """Something to run."""


@pytest.fixture
def run(stored: dg.DagsterInstance) -> Run:
    return lambda: dg.materialize([cheap], instance=stored).run_id


def test_old_runs_and_their_output_go(stored: dg.DagsterInstance, run: Run) -> None:
    run_id = run()
    output = Path(stored.storage_directory()) / run_id
    assert output.exists()

    deleted = purge_runs(stored, statuses=SUCCESS, before=datetime.now(UTC) + timedelta(minutes=1))

    assert deleted == 1
    assert stored.get_runs_count() == 0
    assert not output.exists()


def test_young_runs_stay(stored: dg.DagsterInstance, run: Run) -> None:
    run()

    assert purge_runs(stored, statuses=SUCCESS, before=datetime.now(UTC) - timedelta(days=1)) == 0


def test_a_purge_is_bounded(stored: dg.DagsterInstance, run: Run) -> None:
    run()
    run()
    after = datetime.now(UTC) + timedelta(minutes=1)

    assert purge_runs(stored, statuses=SUCCESS, before=after, limit=1) == 1
    assert stored.get_runs_count() == 1


def test_purge_is_an_asset_that_spares_its_own_run(stored: dg.DagsterInstance, run: Run) -> None:
    run()

    result = dg.materialize(
        [purge_asset()],
        instance=stored,
        run_config=dg.RunConfig(ops={op_name(PURGE): PurgeConfig(keep_days=-1)}),
    )

    metadata = result.asset_materializations_for_node(op_name(PURGE))[0].metadata
    assert (metadata["deleted"].value, metadata["left"].value) == (1, 1)
