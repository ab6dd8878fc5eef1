"""The page docs/traces.md: its program prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"


def test_the_program_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    blocks = re.findall(r"```(\w+)[^\n]*\n(.*?)```", page, re.DOTALL)
    program, shown = blocks[0][1], blocks[1][1]
    (tmp_path / "traced.py").write_text(program, "utf-8")

    ended = subprocess.run(
        [sys.executable, "traced.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert shown == f"$ python traced.py\n{ended.stdout}"
