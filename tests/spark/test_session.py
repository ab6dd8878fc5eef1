"""What a session gets; Java is looked for where Spark looks, and its absence has a remedy."""

import os
from pathlib import Path

import pytest

from rmq_pipeline.spark.session import java_lacks, prepare_environment, settings


@pytest.fixture
def jdk(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    return tmp_path


def test_java_on_the_path_is_enough(jdk: Path) -> None:
    assert java_lacks({"PATH": str(jdk / "bin")}) == ""


def test_no_java_anywhere(tmp_path: Path) -> None:
    said = java_lacks({"PATH": str(tmp_path)})

    assert said.startswith("Spark needs a JDK. There is no java on the PATH")
    assert "apt-get install openjdk-17" in said


def test_a_java_home_without_java_is_not_mended_by_the_path(jdk: Path, tmp_path: Path) -> None:
    said = java_lacks({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(jdk / "bin")})

    assert f"JAVA_HOME is {tmp_path / 'gone'}, which has no bin/java." in said


@pytest.mark.parametrize(
    ("version", "suffices"), [("1.8.0_292", False), ("11.0.2", False), ("17", True), ("25", True)]
)
def test_the_version_must_be_one_that_spark_runs_on(
    jdk: Path, version: str, suffices: bool
) -> None:
    (jdk / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')

    assert (java_lacks({"JAVA_HOME": str(jdk)}) == "") is suffices


@pytest.mark.parametrize(
    ("master", "address", "left"),
    [
        ("local[2]", None, "127.0.0.1"),
        ("local[2]", "192.0.2.7", "192.0.2.7"),
        ("spark://127.0.0.1:7077", "127.0.0.1", "127.0.0.1"),
        ("spark://host:7077", "127.0.0.1", None),
        ("k8s://https://host:6443", "127.0.0.1", None),
        ("yarn", None, None),
        ("spark://host:7077", "192.0.2.7", "192.0.2.7"),
    ],
)
def test_executors_on_other_machines_are_told_no_loopback_address(
    monkeypatch: pytest.MonkeyPatch, master: str, address: str | None, left: str | None
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", address or "")
    if address is None:
        monkeypatch.delenv("SPARK_LOCAL_IP")

    prepare_environment({"spark.master": master})

    assert os.environ.get("SPARK_LOCAL_IP") == left


def test_a_cluster_has_the_memory_that_its_own_settings_name() -> None:
    chosen = settings({"spark.master": "spark://host:7077"})

    assert "spark.driver.memory" not in chosen
    assert "spark.driver.host" not in chosen
    assert chosen["spark.sql.session.timeZone"] == "UTC"
    assert settings()["spark.driver.memory"] == "1g"
