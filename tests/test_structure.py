"""The figures of the tree's structure can be taken."""

from benchmarks import structure

#: In 10,000 words of comments and docstrings.
MOST_ODD_WORDS = 10


def test_every_figure_is_there() -> None:
    figures = structure.measure()

    assert figures["modules"] > figures["modules with one importer"] > 0
    assert 0 < figures["odd words in 10,000"] < 10_000
    flows = [figure for name, figure in figures.items() if name.startswith("files/functions")]
    assert len(flows) == 7
    for figure in flows:
        files, functions = map(int, figure.split("/"))
        assert 10 < files < functions


def test_the_library_is_written_in_the_fields_words() -> None:
    found = structure.odd_words(structure.modules(structure.LIBRARY))

    assert found["words of comments and docstrings"] > 50_000
    assert found["odd words in 10,000"] <= MOST_ODD_WORDS, "docs/glossary.md has the words"
