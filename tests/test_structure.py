"""The figures of the tree's structure can be taken."""

from typing import Any

import pytest

from benchmarks import structure

pytestmark = pytest.mark.usefixtures("syntax_trees")

#: In 10,000 words of comments and docstrings, and of each page.
MOST_ODD_WORDS = 10


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """All figures, which take seconds."""
    return structure.measure()


def test_every_figure_is_there(figures: dict[str, Any]) -> None:
    assert figures["modules"] > figures["modules with one importer"] > 0
    assert 0 < figures["odd words in 10,000"] < 10_000
    flows = [figure for name, figure in figures.items() if name.startswith("files/functions")]
    assert len(flows) == 7
    for figure in flows:
        files, functions = map(int, figure.split("/"))
        assert 10 < files < functions


def test_examples_are_no_part_of_the_library() -> None:
    library, application = (
        structure.modules(structure.LIBRARY),
        structure.modules(structure.EXAMPLES),
    )

    assert len(application) > 10
    assert not {module.name for module in library} & {module.name for module in application}


def test_the_library_is_written_in_the_fields_words(figures: dict[str, Any]) -> None:
    assert figures["words of comments and docstrings"] > 50_000
    assert figures["odd words in 10,000"] <= MOST_ODD_WORDS, "docs/glossary.md has the words"


def test_pages_are_written_in_the_fields_words() -> None:
    pages = structure.pages()
    odd = {name: structure.odd_words_of_page(text) for name, text in pages.items()}

    found = {
        name: dict(words)
        for name, words in odd.items()
        if words.total() * 10_000 / len(pages[name].split()) > MOST_ODD_WORDS
    }

    assert len(pages) > 80
    assert not found, f"{found}: docs/glossary.md has the words"


def test_odd_words_of_a_page_are_found_outside_code() -> None:
    text = (
        "# What it does\n\nWhich words? Nobody knows. What\ncomes is sent. That time is over.\n"
        "* Who asks\n\n| a | Whether it is `anew` |\n```\nnobody\n```\n"
    )

    assert structure.odd_words_of_page(text) == {
        "nobody": 1,
        "who asks": 1,
        "What": 2,
        "Who": 1,
        "Whether": 1,
    }
