"""The examples of docs/semantics print what the pages say."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "semantics.md", *sorted((DOCS / "semantics").glob("*.md"))]
_EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_example_prints_what_its_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = _EXAMPLE.findall(page.read_text("utf-8"))
    assert len(examples) == (page.stem != "differences")

    for program, expected in examples:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(program, page, "exec"), {"__name__": page.stem})
        assert printed.getvalue() == expected


def test_the_first_page_leads_to_every_other() -> None:
    linked = re.findall(r"\]\(semantics/(\w+)\.md\)", PAGES[0].read_text("utf-8"))

    assert set(linked) == {page.stem for page in PAGES[1:]}
