"""Pages of promises: tables of what is promised, and the tests that hold it."""

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
#: A row of a table: what is promised, and the tests of it.
_ROW: Final = re.compile(r"\| (?P<promise>.+?) \| (?P<tests>[^|]*) \|")
_TEST: Final = re.compile(r"`(test_\w+\.py::test_\w+)`")


def promises(page: Path) -> dict[str, list[str]]:
    """The tests of each promise, by its heading and its words."""
    found: dict[str, list[str]] = {}
    for section in page.read_text().split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        for line in lines:
            row = _ROW.fullmatch(line)
            if row and row["promise"] not in ("number or promise", "---"):
                found[f"{heading}: {row['promise']}"] = _TEST.findall(row["tests"])
    return found
