"""The blocks of the pages that say how to do something, run in their order on real brokers.

Commands run in processes of their own, Python in this one. Dagster is started only by the test of
the tutorial: elsewhere the broker of ``rmq up`` serves alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import yaml  # type: ignore[import-untyped]

from tests.docs.preparations import PAGES
from tests.page_reader import ROOT, Reader, agrees, blocks_of, commands

#: Parts of the site whose pages say how to do something; in Reference, two pages do.
PARTS: Final = ("Guides", "Operating")
ALSO: Final = {"sql.md", "flight_sql.md"}
#: Pages that a test of their own follows.
ELSEWHERE: Final = {
    "docs/clients.md": "tests/conformance/test_documented.py",
    "docs/incident_night.md": "tests/behaviour/test_incident_night.py",
    "docs/lake.md": "tests/spark/test_followed_pages.py",
    "docs/replay.md": "tests/spark/test_followed_pages.py",
    "docs/spark_source.md": "tests/spark/test_followed_pages.py",
    "docs/testing.md": "tests/testing/test_page.py",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    page = PAGES[name]
    given = {each: request.getfixturevalue(each) for each in page.needs}

    with Reader(
        tmp_path,
        not_run=page.not_run,
        before=page.before,
        fails=page.fails,
        figures=page.figures,
        home=page.home,
        given=given,
    ) as reader:
        page.prepare(reader)
        reader.follow_page(name)
        reader.python(page.then)


@pytest.mark.parametrize("name", PAGES)
def test_exceptions_are_on_their_page(name: str) -> None:
    page = PAGES[name]
    blocks = blocks_of(name)
    lines = {block.first_line for block in blocks} | {
        command for block in blocks for command, _ in commands(block.text)
    }

    assert {*page.not_run, *page.before, *page.fails} <= lines


def test_every_page_is_followed() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    parts = {title: pages for part in site["nav"] for title, pages in part.items()}
    listed = [page for title in PARTS for page in parts[title]]
    files = {
        file for page in listed for file in (page.values() if isinstance(page, dict) else [page])
    }

    assert {f"docs/{file}" for file in files | ALSO} | {"README.md"} == {*PAGES, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text("utf-8")


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match="No broker serves"):
        reader.run("rmq lag")


def test_another_output_is_found(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match="wrote  shop"):
        reader.run("rmq init shop", "wrote  market")


@pytest.mark.parametrize(
    ("said", "agreed"),
    [
        ("Backup 8 of /srv/rmq: 3.5 MiB written at 2027-01-02T03:04:05Z", True),
        ("Backup 8 of /srv/rmq: 3.5 MiB read at 2027-01-02T03:04:05Z", False),
    ],
)
def test_figures_may_differ(said: str, *, agreed: bool) -> None:
    shown = "Backup 7 of /srv/rmq: 2.4 MiB written at 2026-11-28T16:01:30.117Z"

    assert agrees(said, shown, figures=False) == agreed
    assert not agrees(said, shown)
