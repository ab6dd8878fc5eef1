"""The blocks of docs/tutorial.md, in their order: commands, files and changes, on a real broker."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.page_reader import Reader, agrees, blocks_of

BLOCKS: Final = blocks_of("docs/tutorial.md")


@pytest.mark.slow
@pytest.mark.dagster
@pytest.mark.timeout(900)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    languages = [block.language for block in BLOCKS]
    assert languages.count("console") >= 10
    assert set(languages) == {"console", "python", "diff"}
    installed = {"pip install 'rmq_pipeline[all]' pytest": "the packages are installed"}

    # A busy machine starts Dagster in a minute.
    with Reader(tmp_path, installed, home="", with_dagster=True, patience_s=150) as reader:
        for block in BLOCKS:
            reader.follow(block)


@pytest.mark.parametrize(
    ("said", "agreed"),
    [
        ("broker 127.0.0.1:4711\nhome /tmp/shop/.rmq\n", True),
        ("broker 127.0.0.1:4711\nhome /tmp/flights/.rmq\n", False),
        ("", False),
    ],
)
def test_another_output_is_found(said: str, *, agreed: bool) -> None:
    assert agrees(said, "broker   127.0.0.1:8082\nhome …/shop/.rmq\n…\n") == agreed
