"""The files of deploy/ start what docs/deployment.md says: commands that parse, as the user rmq."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.test_pages import parse

ROOT: Final = Path(__file__).parents[1]
UNIT: Final = ROOT / "deploy" / "systemd" / "rmq.service"
CONTAINERFILE: Final = (ROOT / "deploy" / "Containerfile").read_text("utf-8")


def setting(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    return str(found)


def test_the_unit_starts_a_command_that_parses() -> None:
    program, *arguments = shlex.split(setting("ExecStart"))

    parse(arguments, spoken=False)
    assert Path(program).name == "rmq"
    assert arguments[0] == "up"
    assert setting("User") == "rmq"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    there = f"ExecStart={sys.executable}"
    unit.write_text(re.sub(r"ExecStart=\S+", there, UNIT.read_text("utf-8")), "utf-8")

    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )

    assert not [line for line in told.stderr.splitlines() if line.startswith(unit.name)]


def test_the_image_starts_a_command_that_parses() -> None:
    started = {
        word: json.loads(command)
        for word, command in re.findall(r"(ENTRYPOINT|CMD) (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    }
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)

    assert started["ENTRYPOINT"] == ["rmq"]
    parse(started["CMD"], spoken=False)
    parse(json.loads(health)[1:], spoken=False)
    assert re.findall(r"^USER (\w+)$", CONTAINERFILE, re.MULTILINE) == ["rmq"]


def test_the_image_has_a_dagster_of_the_range_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pyspark,) = (
        each
        for each in project["optional-dependencies"]["spark"]
        if each.startswith("dagster-pyspark")
    )

    # All of Dagster's integrations have one version.
    assert pyspark.replace("pyspark", "postgres") in CONTAINERFILE
