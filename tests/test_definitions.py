"""What Dagster loads: whole, without a broker, and with the lineage of the data."""

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from definitions import defs as checkout
from rmq_pipeline.dagster import (
    BrokerResource,
    Outcome,
    Pipeline,
    definitions,
    python_consumer,
    topic,
    transaction_checker,
)
from rmq_pipeline.examples.flights.definitions import defs
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG
from rmq_pipeline.orchestration.windows import JOBS

ORDERS, BILLS = topic("orders"), topic("bills", type="transaction")
ROW = pa.schema([("born_at_ms", pa.int64())])


def handler(messages: pa.Table, state: pa.Table) -> Outcome:
    raise NotImplementedError


def check(checks: pa.Table) -> list[str]:
    raise NotImplementedError


TOTALS = python_consumer(topic=ORDERS, group="totals", sink="totals", sink_schema=ROW)(handler)
SAME_SINK = python_consumer(topic=ORDERS, group="more", sink="totals", sink_schema=ROW)(handler)
CHECKER = transaction_checker(topic=BILLS)(check)
SHOP = Pipeline("shop", topics=[ORDERS], consumers=[TOTALS])
CHECKED = Pipeline("checked", topics=[BILLS], consumers=[], checkers=[CHECKER])


def parents(key: str) -> set[str]:
    graph = defs.resolve_asset_graph()
    return {
        parent.to_user_string()
        for parent in graph.get(dg.AssetKey.from_user_string(key)).parent_keys
    }


def test_definitions_are_loadable() -> None:
    dg.Definitions.validate_loadable(defs)

    assert defs.resolve_asset_graph().get_all_asset_keys()


def test_lineage_follows_the_data() -> None:
    assert parents("departures") == set()
    assert parents("aircraft_rotations") == {"departures"}
    assert parents("late_aircraft") == {"aircraft_rotations"}
    assert parents("late_summary") == {"late_aircraft"}
    assert parents("aircraft_rotations_dead_letters") == {"aircraft_rotations"}
    assert parents("aircraft_checks") == {"departures"}
    assert parents("crew_changes") == {"crew_changes_checks"}


def test_the_lineage_of_a_pipeline_is_one_picture_and_that_of_its_replays_another() -> None:
    graph = defs.resolve_asset_graph()
    groups = {key.to_user_string(): graph.get(key).group_name for key in graph.get_all_asset_keys()}

    assert {key for key, group in groups.items() if group == "flights_replay"} == {
        *("topic_log/departures", "topic_log/late_aircraft", "topic_log/crew_changes"),
        *("replay_aircraft_rotations", "replay_late_summary", "replay_aircraft_checks"),
    }
    assert groups["departures"] == groups["crew_changes_checks"] == "flights"


def test_sensors_run_from_the_start() -> None:
    sensors = defs.get_repository_def().sensor_defs

    assert {sensor.name for sensor in sensors} >= {
        "due_work",
        "flights_consumers",
        "flights_topics",
    }
    assert all(sensor.default_status == dg.DefaultSensorStatus.RUNNING for sensor in sensors)


def test_each_kind_of_upkeep_says_when_the_broker_had_to_do_it() -> None:
    keys = defs.resolve_asset_graph().asset_check_keys

    assert {key.asset_key.path[-1] for key in keys if key.name == "no_fallback"} == set(JOBS)


def test_windows_carry_the_tags_that_limit_them() -> None:
    for name, engine in (
        ("deliver_scheduled", set()),
        ("revive", set()),
        ("check_transactions", set()),
        ("seal", set()),
        ("aircraft_rotations_window", {"rmq/spark"}),
        ("late_summary_window", {"rmq/spark"}),
        ("aircraft_checks_window", {"rmq/python"}),
    ):
        tags = defs.resolve_job_def(name).run_tags
        assert tags[WINDOW_TAG]
        assert {"rmq/spark", "rmq/python"} & set(tags) == engine


def test_every_job_and_sensor_says_what_it_does() -> None:
    repository = defs.get_repository_def()
    found = [(job.name, job.description) for job in repository.get_all_jobs()]
    found += [(sensor.name, sensor.description) for sensor in repository.sensor_defs]

    # The first is Dagster's own, of assets that are materialized by hand.
    assert [name for name, description in found if not description] == ["__ASSET_JOB"]


def test_every_run_is_one_process() -> None:
    jobs = defs.get_repository_def().get_all_jobs()

    assert {job.executor_def.name for job in jobs} == {"in_process"}


def test_the_checkout_itself_has_the_upkeep_and_no_example() -> None:
    dg.Definitions.validate_loadable(checkout)

    groups = {spec.group_name for spec in checkout.resolve_all_asset_specs()}
    assert groups == {"upkeep"}
    assert set(JOBS) <= {job.name for job in checkout.get_repository_def().get_all_jobs()}


def test_a_location_beside_another_has_only_its_pipelines() -> None:
    beside = definitions([Pipeline("shop", topics=[ORDERS], consumers=[TOTALS])], upkeep=False)

    dg.Definitions.validate_loadable(beside)
    groups = {spec.group_name for spec in beside.resolve_all_asset_specs()}
    assert groups == {"shop", "shop_replay"}
    assert "due_work" not in {sensor.name for sensor in beside.get_repository_def().sensor_defs}


def test_resources_of_ones_own_replace_those_of_the_deployment() -> None:
    broker = BrokerResource(home="/srv/rmq")

    found = definitions(resources={"broker": broker, "mail": 3}).resources or {}

    assert found["broker"] is broker
    assert {"sinks", "spark", "mail"} <= set(found)


def test_definitions_of_ones_own_can_be_merged() -> None:
    @dg.asset
    def report() -> None: ...

    merged = dg.Definitions.merge(dg.Definitions(assets=[report]), definitions())

    dg.Definitions.validate_loadable(merged)
    assert dg.AssetKey("report") in merged.resolve_asset_graph().get_all_asset_keys()


@pytest.mark.parametrize(
    ("pipelines", "settings", "says"),
    [
        ([TOTALS], {}, "A pipeline is .*Give what Pipeline"),
        ([SHOP, Pipeline("shop", topics=[BILLS], consumers=[])], {}, "are named shop"),
        ([SHOP, Pipeline("b", topics=[ORDERS], consumers=[])], {}, "have the topic orders"),
        (
            [SHOP, Pipeline("b", topics=[], consumers=[TOTALS])],
            {},
            "have the consumer group totals",
        ),
        ([SHOP, Pipeline("b", topics=[], consumers=[SAME_SINK])], {}, "have the sink totals"),
        ([CHECKED, Pipeline("b", topics=[], consumers=[], checkers=[CHECKER])], {}, "topic bills"),
    ],
)
def test_pipelines_that_exclude_each_other_are_refused(
    pipelines: list[Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        definitions(pipelines, **settings)


@pytest.mark.parametrize("upkeep", [True, False])
def test_names_that_would_be_one_asset_are_refused(upkeep: bool) -> None:
    checkers = [
        transaction_checker(topic=topic(name, type="transaction"))(check)
        for name in ("pay-in", "pay_in")
    ]
    apart = [
        Pipeline(name, topics=[], consumers=[], checkers=[each])
        for name, each in zip("ab", checkers, strict=True)
    ]
    together = Pipeline("c", topics=[], consumers=[], checkers=checkers)

    for pipelines in (apart, [together]):
        with pytest.raises(ValueError, match=r"pay-in and pay_in .* asset, pay_in\. Rename one"):
            definitions(pipelines, upkeep=upkeep)


def test_a_location_without_upkeep_has_windows_for_its_checkers() -> None:
    alone = definitions([CHECKED], upkeep=False)

    dg.Definitions.validate_loadable(alone)
    repository = alone.get_repository_def()
    assert "check_transactions_bills" in repository.job_names
    assert "transaction_checkers" in {sensor.name for sensor in repository.sensor_defs}
    assert "check_transactions_bills" not in definitions([CHECKED]).get_repository_def().job_names
