"""What Dagster loads: whole, without a broker, and with the lineage of the data."""

import dagster as dg

from definitions import defs
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG


def parents(key: str) -> set[str]:
    graph = defs.resolve_asset_graph()
    return {
        parent.to_user_string()
        for parent in graph.get(dg.AssetKey.from_user_string(key)).parent_keys
    }


def test_definitions_are_loadable() -> None:
    dg.Definitions.validate_loadable(defs)


def test_lineage_follows_the_data() -> None:
    assert parents("departures") == set()
    assert parents("aircraft_rotations") == {"departures"}
    assert parents("late_aircraft") == {"aircraft_rotations"}
    assert parents("late_summary") == {"late_aircraft"}
    assert parents("aircraft_rotations_dead_letters") == {"aircraft_rotations"}
    assert parents("aircraft_checks") == {"departures"}
    assert parents("crew_changes") == {"crew_changes_checks"}


def test_sensors_run_from_the_start() -> None:
    sensors = defs.get_repository_def().sensor_defs

    assert {sensor.name for sensor in sensors} >= {
        "due_work",
        "aircraft_rotations_messages",
        "late_summary_messages",
        "aircraft_checks_messages",
        "flights_topics",
    }
    assert all(sensor.default_status == dg.DefaultSensorStatus.RUNNING for sensor in sensors)


def test_windows_carry_the_tags_that_limit_them() -> None:
    for name, spark in (
        ("deliver_scheduled", False),
        ("revive", False),
        ("check_transactions", False),
        ("seal", False),
        ("aircraft_rotations_window", True),
        ("late_summary_window", True),
        ("aircraft_checks_window", True),
    ):
        tags = defs.resolve_job_def(name).run_tags
        assert tags[WINDOW_TAG]
        assert ("rmq/spark" in tags) == spark


def test_every_run_is_one_process() -> None:
    jobs = defs.get_repository_def().get_all_jobs()

    assert {job.executor_def.name for job in jobs} == {"in_process"}
