"""The unit of deploy/ starts what docs/deployment.md says: a command that parses, as user rmq."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.test_pages import parse

ROOT: Final = Path(__file__).parents[1]
UNIT: Final = ROOT / "deploy" / "systemd" / "rmq.service"


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
