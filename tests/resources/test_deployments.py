"""Resources per deployment."""

import pytest

from rmq_pipeline.orchestration.resources import BrokerResource, resources_of


def test_local_finds_its_broker_at_run_time() -> None:
    assert resources_of("local")["broker"] == BrokerResource()


def test_production_may_use_a_connect_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMQ_SPARK_MASTER", "sc://spark:15002")

    assert resources_of("production")["spark"].spark_config == {"spark.remote": "sc://spark:15002"}


def test_production_may_use_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMQ_SPARK_MASTER", "spark://host:7077")

    assert resources_of("production")["spark"].spark_config["spark.master"] == "spark://host:7077"


def test_environment_chooses_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RMQ_DEPLOYMENT", "production")

    assert resources_of()["sinks"] == resources_of("production")["sinks"]


def test_unknown_deployment_is_refused() -> None:
    with pytest.raises(ValueError, match="'staging'"):
        resources_of("staging")
