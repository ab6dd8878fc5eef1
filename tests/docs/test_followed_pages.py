"""The blocks of the pages that say how to do something, run in their order on real brokers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.preparations import PAGES
from tests.page_reader import Reader, blocks_of, commands


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
        for block in blocks_of(name):
            reader.follow(block)
        reader.python(page.then)


@pytest.mark.parametrize("name", PAGES)
def test_exceptions_are_on_their_page(name: str) -> None:
    page = PAGES[name]
    blocks = blocks_of(name)
    lines = {block.first_line for block in blocks} | {
        command for block in blocks for command, _ in commands(block.text)
    }

    assert {*page.not_run, *page.before, *page.fails} <= lines
