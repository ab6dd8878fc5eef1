"""The house is in order, and every rule of it can fail."""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import house_rules as rules
from tests.house_rules import Source

pytestmark = pytest.mark.usefixtures("syntax_trees")

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "rmq_pipeline/"
CLI = ("rmq_pipeline/cli/", "rmq_pipeline/cli.py")
SQL_FOLDER = "rmq_pipeline/store/sql/"
APPLICATION = ("assets/", "resources/", "sensors/", "definitions.py")
#: In the library's wheel, and written as a user would write it: no part of the library.
EXAMPLES = ("rmq_pipeline/examples/",)
NOT_OURS = {"dagster_home", "build", "dist", "node_modules"}

Rule = Callable[[Source], Iterable[str]]


@cache
def files(ending: str) -> tuple[Source, ...]:
    """Every file of the project with this ending."""
    tops = [top for top in ROOT.iterdir() if top.name[0] != "." and top.name not in NOT_OURS]
    paths = [path for top in tops for path in ([top] if top.is_file() else top.rglob(f"*{ending}"))]
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
        for path in sorted(paths)
        if path.name.endswith(ending)
    )


def python(*starts: str, but: tuple[str, ...] = ()) -> Iterator[Source]:
    """Python files below these places, all without any, but not those of ``but``."""
    for source in files(".py"):
        if source.path.startswith(starts or "") and not source.path.startswith(but):
            yield source


def assert_none(offenders: Iterable[str], *, remedy: str) -> None:
    found = sorted(offenders)
    assert not found, "\n  ".join([remedy, *found])


def assert_kept(rule: Rule, sources: Iterable[Source], *, remedy: str) -> None:
    assert_none((each for source in sources for each in rule(source)), remedy=remedy)


def test_there_is_a_house() -> None:
    assert any(source.path.startswith(LIBRARY) for source in files(".py"))
    assert any(source.path.startswith("tests/") for source in files(".py"))
    assert any(source.path.startswith(SQL_FOLDER) for source in files(".sql"))


def test_every_test_can_fail() -> None:
    tests = [source for source in files(".py") if source.path.startswith("tests/")]
    remedy = "Assert what the test is named for."
    assert_none(rules.tests_that_cannot_fail(tests), remedy=remedy)


def test_modules_are_short() -> None:
    assert_kept(rules.long_modules, python(), remedy="Cut by promise: at most 600 lines a module.")


def test_functions_are_short() -> None:
    assert_kept(rules.long_functions, python(), remedy="At most 60 lines a function.")


def test_lines_are_short() -> None:
    sources = [*files(".py"), *files(".sql")]
    assert_kept(rules.long_lines, sources, remedy="At most 100 characters a line.")


def test_names_say_something() -> None:
    assert_kept(rules.empty_names, python(), remedy="Name a module for the noun or verb in it.")


def test_public_functions_have_docstrings() -> None:
    sources = python(LIBRARY, *APPLICATION)
    remedy = "Say what the signature does not: shapes, units, errors."
    assert_kept(rules.undocumented, sources, remedy=remedy)


def test_more_than_two_arguments_are_given_by_keyword() -> None:
    sources = python(LIBRARY, *APPLICATION, "benchmarks/")
    assert_kept(rules.many_positional, sources, remedy="Make arguments keyword-only.")


def test_sql_lives_in_its_folder() -> None:
    sources = python(LIBRARY, *APPLICATION, but=EXAMPLES)
    assert_kept(rules.sql_texts, sources, remedy=f"Move the statement to {SQL_FOLDER}.")


def test_statements_have_names() -> None:
    remedy = "Put '-- name: what_it_is_called' above the statement."
    assert_kept(rules.unnamed_statements, files(".sql"), remedy=remedy)
    assert_none(rules.repeated_names(files(".sql")), remedy="One name, one statement.")


def test_sql_files_are_in_their_folder() -> None:
    strangers = [each.path for each in files(".sql") if not each.path.startswith(SQL_FOLDER)]
    assert_none(strangers, remedy=f"SQL lives in {SQL_FOLDER}.")


def test_library_prints_nothing() -> None:
    sources = python(LIBRARY, *APPLICATION, but=CLI)
    assert_kept(rules.prints, sources, remedy="Log a line with fields, or return the value.")


def test_library_waits_through_the_clock() -> None:
    sources = python(LIBRARY, *APPLICATION, but=("rmq_pipeline/clock.py",))
    assert_kept(rules.sleeps, sources, remedy="Wait with clock.wait_until or on a condition.")


def test_parquet_has_checksums() -> None:
    sources = python(LIBRARY, *APPLICATION)
    assert_kept(rules.unchecked_parquet, sources, remedy="Use rmq_pipeline.checked_parquet.")


def test_tests_wait_on_conditions() -> None:
    sources = python("tests/")
    assert_kept(rules.sleeps, sources, remedy="Use tests.waiting.until, or ManualClock.")


def test_importing_the_library_does_nothing() -> None:
    # A command line is put together by calls that register its commands.
    sources = python(LIBRARY, but=CLI)
    assert_kept(rules.work_at_import, sources, remedy="Move the call into a function.")


def test_only_the_table_endpoint_imports_flight() -> None:
    endpoint = "rmq_pipeline/flight/"
    sources = python(LIBRARY, *APPLICATION, but=(endpoint,))
    assert_kept(rules.flight_imports, sources, remedy=f"Arrow Flight belongs to {endpoint}.")


def test_no_file_is_dead() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    targets = [project["scripts"], *project["entry-points"].values()]
    found = [target.partition(":")[0] for each in targets for target in each.values()]
    library = list(python(LIBRARY, but=EXAMPLES))
    importers = [*library, *python(*APPLICATION, *EXAMPLES)]
    dead = rules.dead_modules(library, importers, entry_points=found)
    assert_none(dead, remedy="Use it or delete it; what only tests import is dead too.")


# Every rule can fail: (rule, what it refuses, what it lets pass).
CASES: list[tuple[Rule, str, str]] = [
    (rules.long_modules, "x = 1\n" * 601, "x = 1\n" * 600),
    (rules.long_modules, "x = 1\n" * 601, "'A.\\n\\nGenerated from b.'\n" + "x = 1\n" * 601),
    (rules.long_functions, "def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
    (rules.long_lines, "x" * 101, "x" * 100),
    (rules.undocumented, "def f(): pass", "def f():\n    'What it is.'"),
    (rules.undocumented, "class A:\n    'A.'\n    def f(self): pass", "class _A:\n    pass"),
    (rules.undocumented, "class A: pass", "class A:\n    'A.'\n    @override\n    def f(self): 1"),
    (rules.many_positional, "def f(a, b, c): pass", "def f(a, b, *, c): pass"),
    (rules.many_positional, "def f(a, /, b, c): pass", "f = lambda a, b, c: a"),
    (
        rules.many_positional,
        "class A:\n    def f(self, a, b, c): pass",
        "class A:\n    def f(self, a, b): pass\n    def __exit__(self, a, b, c): pass",
    ),
    (
        rules.many_positional,
        "class A:\n    @staticmethod\n    def f(a, b, c): pass",
        "class A:\n    @override\n    def f(self, a, b, c): pass",
    ),
    (rules.many_positional, "class A:\n    def __init__(self, a, b, c): pass", "x = 1"),
    (rules.sql_texts, "q = 'SELECT 1'", "'''SELECT is a word of this docstring.'''"),
    (rules.sql_texts, "q = f'DELETE FROM {t}'", "e = 'Delete from the left.'"),
    (rules.sql_texts, "q = f'''\n  insert into {t} values (1)'''", "e = 'Insert into the gap'"),
    (rules.sql_texts, "q = 'update t set a = 1'", "e = 'Update the topic.'"),
    (rules.sql_texts, "q = 'CREATE OR REPLACE VIEW v AS'", "e = 'Create a topic or view.'"),
    (rules.sql_texts, "q = 'create table if not exists t(a int)'", "e = 'Create table by hand'"),
    (rules.sql_texts, "q = 'with a as (select 1)'", "e = 'With a as b'"),
    (rules.sql_texts, "run('SELECT 1')", "Option(help='SELECT …, one statement')"),
    (rules.prints, "def f():\n    print(1)", "log.print(1)"),
    (rules.sleeps, "time.sleep(1)", "event.wait(1)"),
    (rules.unchecked_parquet, "pq.write_table(t, p)", "checked_parquet.write(t, p)"),
    (rules.unchecked_parquet, "f = pq.ParquetFile(p)", "def f() -> pq.ParquetFile: ..."),
    (rules.sleeps, "from time import sleep", "from time import monotonic"),
    (rules.work_at_import, "connect()", "LIMIT = int('1')\ndef f():\n    connect()"),
    (rules.flight_imports, "import pyarrow.flight as fl", "import pyarrow as pa"),
    (rules.flight_imports, "from pyarrow import flight", "from pyarrow import ipc"),
    (rules.flight_imports, "def f():\n    from pyarrow.flight import connect", "flight = 1"),
]


@pytest.mark.parametrize(("rule", "bad", "good"), CASES)
def test_rule_can_fail(rule: Rule, bad: str, good: str) -> None:
    assert list(rule(Source("rmq_pipeline/snippet.py", bad)))
    assert not list(rule(Source("rmq_pipeline/snippet.py", good)))


@pytest.mark.parametrize("path", ["rmq_pipeline/utils.py", "rmq_pipeline/core/writer.py"])
def test_rule_of_names_can_fail(path: str) -> None:
    assert list(rules.empty_names(Source(path, "")))
    assert not list(rules.empty_names(Source("rmq_pipeline/coredump.py", "")))


def test_rule_of_statements_can_fail() -> None:
    named = "-- name: one\n-- in: nothing\nSELECT 1;\n\n-- name: two\nSELECT ';';\n"
    assert not list(rules.unnamed_statements(Source("a.sql", named)))
    assert not list(rules.unnamed_statements(Source("a.sql", "CREATE TABLE t (a int);")))
    assert list(rules.unnamed_statements(Source("a.sql", "SELECT 1;")))
    assert list(rules.unnamed_statements(Source("a.sql", named + "SELECT 2;")))
    assert list(rules.repeated_names([Source("a.sql", named), Source("b.sql", named)]))


def test_rule_of_dead_files_can_fail() -> None:
    used = Source("rmq_pipeline/broker/used.py", "")
    dead = Source("rmq_pipeline/broker/dead.py", "import rmq_pipeline.broker.dead")
    started = Source("rmq_pipeline/started.py", "")
    user = Source(
        "rmq_pipeline/broker/__init__.py", "from . import used\nx = 'rmq_pipeline.started'"
    )
    library = [used, dead, started, user]

    offenders = list(rules.dead_modules(library, library, entry_points=["rmq_pipeline.cli"]))

    assert offenders == ["rmq_pipeline/broker/dead.py: no module imports it"]


def test_rule_of_tests_that_cannot_fail_can_fail() -> None:
    helper = Source("tests/helping.py", "def holds(x):\n    assert x\n\ndef calls():\n    x()\n")
    good = "def test_a():\n    assert 1\n\ndef test_b():\n    holds(2)\n"
    bad = "def test_c():\n    calls()\n\ndef test_d():\n    broker.ack([])\n"

    offenders = list(rules.tests_that_cannot_fail([helper, Source("tests/test_x.py", good + bad)]))

    assert [each.rpartition(": ")[2] for each in offenders] == [
        "test_c asserts nothing",
        "test_d asserts nothing",
    ]
