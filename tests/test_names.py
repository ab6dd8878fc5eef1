"""Names that point at something: in pages, docstrings and comments, and kinds of events."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from rmq_pipeline.store.events import Kind
from tests.house_rules import nodes
from tests.test_house import EXAMPLES, LIBRARY, files, python

pytestmark = pytest.mark.usefixtures("syntax_trees")

THIS = "tests/test_names.py"
_SPOKEN = re.compile(r"`([^`\n]+)`")
_MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)(?:\(.*\))?")
#: ``limits.STEP_BYTES``, ``rmq_pipeline.lake.readers``, ``tables.sound(…)``.
_DEFINED = re.compile(r"([a-z_][\w.]*)\.([A-Za-z_]\w*)(?:\(.*\))?")
_FILE = re.compile(r"[\w/.-]+\.(?:py|md|toml|c)|[\w/]+\.sql")


@cache
def members() -> dict[str, set[str]]:
    """By class of the library what is named in its body."""
    found: dict[str, set[str]] = {}
    for source in python(LIBRARY):
        lines = source.text.splitlines()
        for node in nodes(source):
            if isinstance(node, ast.ClassDef):
                body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                found.setdefault(node.name, set()).update(re.findall(r"\w+", body), bases)
    return found


def is_member(of: str, name: str) -> bool:
    """Whether a class, or one it is derived from, names it; of other classes nothing is known."""
    known = members()
    if of not in known:
        return True
    bases = (word for word in known[of] if word in known and word != of)
    return name in known[of] or any(name in known[base] for base in bases)


@cache
def defined() -> dict[str, set[str]]:
    """By dotted end of a module's name what modules of that name define or import.

    A package is listed by its whole name, with its modules: its last word alone may be anything.
    """
    found: dict[str, set[str]] = {}
    for source in python():
        parts = source.module.split(".")
        names = {name for node in source.tree.body for name in _names(node)}
        package = source.path.endswith("/__init__.py")
        for start in range(1 if package else len(parts)):
            found.setdefault(".".join(parts[start:]), set()).update(names)
        for end in range(1, len(parts)):
            found.setdefault(".".join(parts[:end]), set()).add(parts[end])
    return found


def _names(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module gives to something."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    else:
        stored = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        yield from (each.id for each in stored if isinstance(each.ctx, ast.Store))


@cache
def is_defined(module: str, name: str) -> bool:
    """Whether a module has a name; of other modules nothing is known.

    A variable or a table may be called as a module is: what code says of it counts as well.
    """
    known = defined()
    if module not in known or name in known[module]:
        return True
    said = re.compile(rf"\b{re.escape(module)}\.{name}\b(?!`)")
    both = [re.compile(rf"\b{re.escape(word)}\b") for word in (module, name)]
    return any(said.search(each.text) for each in python(but=(THIS,))) or any(
        all(word.search(each.text) for word in both) for each in files(".sql")
    )


@cache
def is_file(name: str) -> bool:
    there = (each for ending in (".py", ".sql", ".md", ".toml", ".c") for each in files(ending))
    return any(f"/{each.path}".endswith(f"/{name}") for each in there)


def misnamed(text: str) -> Iterator[str]:
    """What a text names in backquotes and there is not."""
    for name in _SPOKEN.findall(text):
        member, attribute = _MEMBER.fullmatch(name), _DEFINED.fullmatch(name)
        if _FILE.fullmatch(name):
            there = is_file(name)
        elif member:
            there = is_member(member[1], member[2])
        else:
            there = not attribute or is_defined(attribute[1], attribute[2])
        if not there:
            yield name


def test_pages_name_what_there_is() -> None:
    """Decisions too: one that tells of what is gone says so without backquotes."""
    pages = files(".md")

    found = [f"{page.path}: {name}" for page in pages for name in misnamed(page.text)]

    assert len(pages) > 10
    assert not found, found


def test_docstrings_and_comments_name_what_there_is() -> None:
    sources = [*python(but=(THIS,)), *files(".sql")]

    found = [f"{source.path}: {name}" for source in sources for name in misnamed(source.text)]

    assert not found, found


def test_a_page_that_names_nothing_is_found() -> None:
    text = (
        "`Bridge.cross` and `Bridge.submit`, `files.sql`, `waiting.py`, `Broker.sql(…)`, `a.b`,"
        " `limits.NOTHING`, `limits.STEP_BYTES`, `tests.waiting.until(…)`, `rmq_pipeline.cloud`,"
        " ``docs/sql.md``, ``docs/clouds.md``"
    )

    assert list(misnamed(text)) == [
        "Bridge.cross",
        "files.sql",
        "limits.NOTHING",
        "rmq_pipeline.cloud",
        "docs/clouds.md",
    ]


def test_comments_of_sql_name_files_there_are() -> None:
    found = [
        f"{source.path}: {name}"
        for source in files(".sql")
        for line in re.findall(r"--(.*)", source.text)
        for name in _FILE.findall(line)
        if not is_file(name)
    ]

    assert not found, found


def test_every_kind_of_event_is_made_somewhere() -> None:
    declaring = ("store/events.py", "store/state_tables.py")
    sources = python(LIBRARY, but=EXAMPLES)
    code = "".join(each.text for each in sources if not each.path.endswith(declaring))

    assert not [kind.name for kind in Kind if not re.search(rf"Kind\.{kind.name}\b", code)]


def test_every_row_of_a_snapshot_is_read() -> None:
    texts = {each.path.rsplit("/", 1)[1]: each.text for each in files(".sql")}
    written = set(re.findall(r"'(\w+)' AS what", texts["snapshot.sql"]))
    read = set(re.findall(r"what = '(\w+)'", "".join(texts.values())))

    assert written
    assert written == read
