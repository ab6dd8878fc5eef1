"""The rules of the house: each takes a source and yields its offenders, as ``place: what``."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import duckdb

MODULE_LINES = 600
FUNCTION_LINES = 60
LINE_LENGTH = 100
POSITIONAL_ARGUMENTS = 2
EMPTY_NAMES = frozenset({"utils", "common", "helpers", "core", "models", "manager", "base"})

#: How a statement opens, told from English by its second word or by its capitals.
SQL_TEXT = re.compile(
    r"""\s*(?:
      SELECT\s | (?i:with\s+\w+\s+as\s*\() | VALUES\s*\( | FROM\s+\w+\s+SELECT\b
    | SET\s+\w+\s*(?:=|TO\b) | (?:FORCE\s+)?CHECKPOINT\b | PRAGMA\s | ATTACH\s | EXPLAIN\s
    | (?i:select\s.+\sfrom\s
        | insert\s+(?:or\s+\w+\s+)?into\s+[\w.{}"]+\s*(?:\(|values\b|select\b|by\b|from\b|$)
        | merge\s+into\s+[\w.{}"]+\s+(?:as\b|using\b)
        | delete\s+from\s+[\w.{}"]+\s*(?:;|where\b|using\b|$)
        | update\s+[\w.{}"]+\s+set\s
        | truncate\s+table\s
        | begin\s+transaction\b
        | (?:create|alter|drop)\s+(?:or\s+replace\s+)?(?:temp(?:orary)?\s+)?
          (?:table|view|index|schema|sequence|macro|type)\s+(?:if\s+(?:not\s+)?exists\s+)?
          [\w.{}"]+\s*(?:;|\(|as\b|on\b|add\b|rename\b|$)
        | copy\s+[\w.{}"(].*\s(?:to|from)\s+['$?{]
      )
    )""",
    re.VERBOSE | re.DOTALL,
)
STATEMENT_NAME = re.compile(r"^--\s*name:\s*([a-z][a-z0-9_]*)\s*$", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """A file of the project: its path from the root, with slashes, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        (tree, *_) = nodes(self)
        assert isinstance(tree, ast.Module)
        return tree

    @property
    def module(self) -> str:
        """The dotted name; that of the package for an ``__init__.py``."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"


@cache
def nodes(source: Source) -> tuple[ast.AST, ...]:
    """All nodes of a source, its module first. The fixture ``syntax_trees`` forgets them."""
    return tuple(ast.walk(ast.parse(source.text, source.path)))


def functions(source: Source) -> Iterator[Function]:
    return (node for node in nodes(source) if isinstance(node, FUNCTION))


#: What a test may call that fails when it should.
_ASSERTING = frozenset(
    {
        *("raises", "warns", "fail", "eventually", "run_state_machine_as_test"),
        # Playwright's expectations.
        *("to_have_text", "to_contain_text", "to_have_attribute"),
    }
)


def _called(function: Function) -> set[str]:
    """Names that a function calls, and ``assert`` where it asserts or raises itself."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            found.add("assert")
        elif isinstance(node, ast.Call):
            called = node.func
            found.add(getattr(called, "attr", getattr(called, "id", "")))
    return found


def tests_that_cannot_fail(sources: Iterable[Source]) -> Iterator[str]:
    """Tests that neither assert, nor expect an error, nor call a function of tests that does."""
    helpers: dict[str, list[set[str]]] = {}
    tests: list[tuple[str, str, set[str]]] = []
    for source in sources:
        for function in functions(source):
            if function.name.startswith("test_"):
                tests.append((source.at(function), function.name, _called(function)))
            else:
                helpers.setdefault(function.name, []).append(_called(function))
    asserting = {"assert", *_ASSERTING}
    while True:
        more = {
            name
            for name, calls in helpers.items()
            if name not in asserting and all(each & asserting for each in calls)
        }
        if not more:
            break
        asserting |= more
    for place, name, calls in tests:
        if not calls & asserting:
            yield f"{place}: {name} asserts nothing"


def is_generated(source: Source) -> bool:
    """Whether a module says in its docstring that it is written by a command."""
    return "\nGenerated from " in (ast.get_docstring(source.tree) or "")


def long_modules(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MODULE_LINES and not is_generated(source):
        yield f"{source.path}: {lines} lines"


def long_functions(source: Source) -> Iterator[str]:
    for function in functions(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{source.at(function)}: {function.name} has {lines} lines"


def long_lines(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if len(line) > LINE_LENGTH:
            yield f"{source.path}:{number}: {len(line)} characters"


def empty_names(source: Source) -> Iterator[str]:
    for name in EMPTY_NAMES.intersection(source.path.removesuffix(".py").split("/")):
        yield f"{source.path}: the name {name!r} says nothing"


def is_decorated(function: Function, name: str) -> bool:
    return any(ast.unparse(each).split(".")[-1] == name for each in function.decorator_list)


def undocumented(source: Source) -> Iterator[str]:
    """Public functions, methods and classes without a docstring; overrides inherit theirs."""

    def search(body: Iterable[ast.stmt]) -> Iterator[str]:
        for node in body:
            if not isinstance(node, (*FUNCTION, ast.ClassDef)) or node.name[0] == "_":
                continue
            inherits = isinstance(node, FUNCTION) and (
                is_decorated(node, "override") or is_decorated(node, "overload")
            )
            if not inherits and not ast.get_docstring(node):
                yield f"{source.at(node)}: {node.name}"
            if isinstance(node, ast.ClassDef):
                yield from search(node.body)

    return search(source.tree.body)


def many_positional(source: Source) -> Iterator[str]:
    """Functions with more than two positional arguments.

    Python fixes the arguments of ``__dunder__`` methods, a base class those of ``@override``.
    """
    methods = {
        function
        for node in nodes(source)
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, FUNCTION) and not is_decorated(function, "staticmethod")
    }
    for function in functions(source):
        is_fixed = re.fullmatch(r"__(?!init__)\w+__", function.name)
        if is_fixed or is_decorated(function, "override"):
            continue
        positional = [*function.args.posonlyargs, *function.args.args]
        count = len(positional) - (function in methods)
        if count > POSITIONAL_ARGUMENTS:
            yield f"{source.at(function)}: {function.name} has {count}, add a *"


def text_of(node: ast.expr) -> str | None:
    """The text of a literal, with ``{}`` where an f-string has a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return None


def sql_texts(source: Source) -> Iterator[str]:
    """Literals that open like a statement; a docstring, or a ``help=`` or ``epilog=``, is prose."""
    prose: set[ast.expr] = set()
    for node in nodes(source):
        if isinstance(node, ast.Expr):
            prose.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in {"help", "epilog"}:
            prose.update(each for each in ast.walk(node.value) if isinstance(each, ast.expr))
        elif isinstance(node, ast.JoinedStr):
            prose.update(node.values)  # looked at as a whole
    for node in nodes(source):
        if isinstance(node, ast.expr) and node not in prose:
            text = text_of(node)
            if text and SQL_TEXT.match(text):
                yield f"{source.at(node)}: {' '.join(text.split())[:60]}"


def prints(source: Source) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield source.at(node)


def sleeps(source: Source) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep":
            yield source.at(node)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (source.at(node) for name in node.names if name.name == "sleep")


def work_at_import(source: Source) -> Iterator[str]:
    """Calls at the top of a module whose value is not used: they have a side effect."""
    for node in source.tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield f"{source.at(node)}: {ast.unparse(node.value)[:60]}"


def imported_names(source: Source) -> Iterator[tuple[str, ast.stmt]]:
    """Every dotted name a source imports; of ``from a import b`` both a and a.b."""
    package = source.module.split(".")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((name.name, node) for name in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield start, node
            yield from ((f"{start}.{name.name}", node) for name in node.names)


def flight_imports(source: Source) -> Iterator[str]:
    """Imports of ``pyarrow.flight``: a part of an outside package, which import-linter misses."""
    for name, node in imported_names(source):
        if name == "pyarrow.flight":
            yield source.at(node)


#: What makes or reads Parquet without being told of checksums.
_UNCHECKED = re.compile(
    r"pq\.(ParquetFile|ParquetWriter|ParquetDataset|write_table|read_table)\(|\bds\.dataset\("
)


def unchecked_parquet(source: Source) -> Iterator[str]:
    """Parquet that is written or read without checksums: checked_parquet.py does it with them."""
    if source.module == "rmq_pipeline.checked_parquet":
        return
    for number, line in enumerate(source.text.splitlines(), start=1):
        if _UNCHECKED.search(line):
            yield f"{source.path}:{number}: {line.strip()[:60]}"


def dead_modules(
    library: Iterable[Source], importers: Iterable[Source], *, entry_points: Iterable[str]
) -> Iterator[str]:
    """Modules of the library that no other module imports, or starts by its name in a text."""
    alive = set(entry_points)
    for source in importers:
        alive.update(name for name, _ in imported_names(source) if name != source.module)
        alive.update(
            node.value
            for node in nodes(source)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
    for source in library:
        is_entry = source.path.endswith(("__init__.py", "__main__.py"))
        if not is_entry and source.module not in alive:
            yield f"{source.path}: no module imports it"


def unnamed_statements(source: Source) -> Iterator[str]:
    """Statements of a ``.sql`` file without a line ``-- name: what_it_is_called`` of their own.

    A CREATE needs none: it is called what it creates.
    """
    starts = [match.start() for match in STATEMENT_NAME.finditer(source.text)]
    blocks = [source.text[a:b] for a, b in zip([0, *starts], [*starts, None], strict=True)]
    for number, block in enumerate(blocks):
        statements = duckdb.extract_statements(block)
        others = [each for each in statements if each.type != duckdb.StatementType.CREATE]
        for statement in others[1:] if number else others:
            yield f"{source.path}: {' '.join(statement.query.split())[:60]}"


def repeated_names(sources: Iterable[Source]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for source in sources:
        for name in STATEMENT_NAME.findall(source.text):
            if name in seen:
                yield f"{source.path}: {name} is in {seen[name]} too"
            seen[name] = source.path
