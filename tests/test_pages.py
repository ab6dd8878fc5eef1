"""The code of the pages, without running it: it compiles, and names commands and columns there are.

Other tests run the blocks of the tutorial, the pages of semantics, Guides and Operating, and a few
more. This test asks less, and asks it of every block of every page, and of commands and queries
within the prose.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml  # type: ignore[import-untyped]

import rmq_pipeline.dagster
from rmq_pipeline.broker import Broker
from rmq_pipeline.cli.app import app
from rmq_pipeline.flight import flags
from rmq_pipeline.flight.client import Client
from rmq_pipeline.route_table import RouteTable
from rmq_pipeline.settings import Settings
from tests.store.test_sql_document import SECTIONS

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
#: Decisions are records of their day: their code is not kept up.
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"),
]
#: Of pages with blocks that this test cannot check: languages of these blocks, and why.
UNCHECKED: Final = {
    "docs/verbs.md": ("python", "signatures, generated from the code"),
    "docs/clients.md": ("javascript", "tests/conformance/test_documented.py runs it"),
    "docs/tutorial.md": ("diff", "tests/test_tutorial.py applies it"),
}
#: The page whose TOML is a route table; elsewhere it is settings.
ROUTES: Final = "docs/routes.md"
#: Languages without code to check: outputs and drawings.
PROSE: Final = {"text", ""}
#: Programs of others: their arguments are theirs.
FOREIGN: Final = {
    *("bash", "cat", "cd", "chmod", "cp", "curl", "dg", "docker", "export", "generate", "grep"),
    *("jq", "journalctl", "mv", "podman", "pytest", "python", "rm", "sha256sum", "sudo"),
    *("systemctl", "systemd-analyze", "tar", "touch", "useradd", "uv"),
}
#: Variables of the pages whose class is known. A `broker` may be a resource, too.
RECEIVERS: Final[dict[str, type]] = {"client": Client}
_FENCE: Final = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SPOKEN: Final = re.compile(r"`((?:rmq|make|pip|SELECT|FROM) [^`\n]+)`")
#: Between the commands of a line; not within quotes.
_JOINTS: Final = {"|", "&&", ";", "·", "||"}


@dataclass(frozen=True)
class Code:
    """A block of a page, or code within its prose."""

    page: str
    language: str
    text: str
    #: Prose may name a command without its arguments.
    spoken: bool = False


@cache
def blocks() -> list[Code]:
    """Return the blocks of all pages."""
    return [
        Code(str(page.relative_to(ROOT)), f"{language} ".split(" ")[0], textwrap.dedent(text))
        for page in PAGES
        for _, language, text in _FENCE.findall(page.read_text("utf-8"))
    ]


@cache
def spoken() -> list[Code]:
    """Return commands and queries within the prose of all pages."""
    return [
        Code(
            str(page.relative_to(ROOT)),
            "sql" if text.startswith(("SELECT", "FROM")) else "console",
            text,
            spoken=True,
        )
        for page in PAGES
        for text in _SPOKEN.findall(_FENCE.sub("", page.read_text("utf-8")))
    ]


def of(*languages: str) -> list[Code]:
    return [
        code
        for code in blocks()
        if code.language in languages
        and code.language not in UNCHECKED.get(code.page, ("", ""))[0].split()
    ]


# ------------------------------------------------------------------------------------- Python


def imported(tree: ast.AST) -> dict[str, object]:
    """Return what a program imports from the library; an ImportError names what there is not."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("rmq_pipeline"):
            module = importlib.import_module(f"{node.module}")
            for each in node.names:
                assert hasattr(module, each.name), f"{node.module} has no {each.name}"
                found[each.asname or each.name] = getattr(module, each.name)
    return found


def wrong_calls(tree: ast.AST, names: dict[str, object]) -> Iterator[str]:
    """Yield calls of the library's names with an argument that they do not have."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else None
        called = names.get(name) if name else _method(node.func)
        if called is None:
            continue
        parameters = inspect.signature(called).parameters  # type: ignore[arg-type]
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            continue
        given = {keyword.arg for keyword in node.keywords if keyword.arg}
        yield from (f"{ast.unparse(node.func)}({name}=)" for name in given - set(parameters))


def _method(function: ast.expr) -> object:
    """Return the method of a client or broker that is called."""
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None
    owner = RECEIVERS.get(function.value.id)
    if owner is None:
        return None
    assert hasattr(owner, function.attr), f"a {function.value.id} has no {function.attr}"
    found: object = getattr(owner, function.attr)
    return found


def test_python_compiles_and_calls_what_there_is() -> None:
    wrong = []
    for code in of("python"):
        try:
            tree = ast.parse(code.text)
            names = {**vars(rmq_pipeline.dagster), **imported(tree)}
            wrong += [f"{code.page}: {call}" for call in wrong_calls(tree, names)]
        except (SyntaxError, ImportError, AssertionError) as error:
            wrong.append(f"{code.page}: {error}: {code.text[:80]}")

    assert len(of("python")) > 40
    assert not wrong


@pytest.mark.parametrize(
    "program",
    [
        "from rmq_pipeline import Brooker",
        "client.sends('orders')",
        "client.send('orders', messages, colour='red')",
        "topic('orders', colour='red')",
    ],
)
def test_python_that_names_what_there_is_not_is_found(program: str) -> None:
    tree = ast.parse(program)
    try:
        wrong = list(wrong_calls(tree, {**vars(rmq_pipeline.dagster), **imported(tree)}))
    except AssertionError as error:
        wrong = [str(error)]

    assert wrong


# ------------------------------------------------------------------------------------- commands


def commands(code: Code) -> Iterator[list[str]]:
    """Yield the commands of a console block, or of a command in the prose, as words."""
    text = code.text.replace("\\\n", " ")
    lines = re.findall(r"^\$ (.*)", text, re.MULTILINE) if not code.spoken else [text]
    for line in lines:
        words: list[str] = []
        for word in [*_split(line), "&&"]:
            if word not in _JOINTS:
                words.append(word)
                continue
            if words:
                yield words
            words = []


def _split(line: str) -> list[str]:
    # `create|delete` is a choice, and [--from ADDRESS] may be left out.
    line = re.sub(r"(?<=\w)\|\w+", "", line)
    if '"' not in line and "'" not in line:
        line = re.sub(r"[\[\]]", "", line)
    lexer = shlex.shlex(re.sub(r"\s\d?>.*", "", line), posix=True)
    lexer.whitespace_split = True
    return ["X" if word in {"…", "..."} else word for word in lexer]


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str], *, spoken: bool) -> None:
    """Parse a command line of ``rmq`` as the command does, without running it.

    Raises:
        Exception: the parser's, with what is wrong.
    """
    command = command_line()
    name, context = "rmq", None
    rest = list(words)
    while True:
        try:
            context = command.make_context(name, rest, parent=context)
        except Exception as error:
            if type(error).__name__ == "Exit" or (
                spoken and type(error).__name__ in {"MissingParameter", "NoArgsIsHelpError"}
            ):
                return
            raise
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)


def wrong_command(words: list[str], *, spoken: bool) -> str:
    """Say what is wrong with a command; an empty text if nothing is."""
    program, *rest = words
    program = program.rpartition("/")[2]
    if program == "rmq":
        try:
            parse(rest, spoken=spoken)
            flags.given(None, [b for a, b in itertools.pairwise(rest) if a == "--set"])
        except Exception as error:  # noqa: BLE001 - the parser's own classes are private
            return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return "" if not rest or rest[0] in targets else f"no target {rest[0]}"
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = ",".join(re.findall(r"rmq_pipeline\[(.*?)\]", " ".join(rest)))
        unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
        return f"no extra {unknown}" if unknown else ""
    elif program not in FOREIGN and "=" not in program:
        return f"the program {program} is not known to this test"
    return ""


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RMQ_SETTINGS")
    all_code = [*of("console"), *(code for code in spoken() if code.language == "console")]

    tried, wrong = 0, []
    for code in all_code:
        for words in commands(code):
            tried += 1
            if told := wrong_command(words, spoken=code.spoken):
                wrong.append(f"{code.page}: {shlex.join(words)}: {told}")

    assert tried > 100
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "rmq tpoic list",
        "rmq topic create orders --colour red",
        "rmq topic create orders --queues many",
        "rmq broker --set colour=red",
        "make tea",
        "pip install 'rmq_pipeline[tea]'",
        "kettle",
    ],
)
def test_a_command_that_does_not_parse_is_found(line: str) -> None:
    (words,) = commands(Code("", "console", f"$ {line}"))

    assert wrong_command(words, spoken=True)


def test_commands_are_in_blocks_that_are_checked() -> None:
    wrong = [
        f"{code.page}: {code.text[:60]}"
        for code in blocks()
        if code.language in PROSE and re.search(r"^(\$ |rmq |make |pip )", code.text, re.MULTILINE)
    ]

    assert not wrong, "a command is in a block ```console, after $"


# ------------------------------------------------------------------------------------- the others


def queries() -> Iterator[tuple[str, str]]:
    """Yield page and text of each query: of SQL blocks, of the prose, and of `rmq sql`."""
    everything = [*of("sql", "console"), *spoken()]
    for code in everything:
        if code.language == "sql":
            yield from ((code.page, query) for query in code.text.split(";") if query.strip())
            continue
        for program, *rest in commands(code):
            if program == "rmq" and rest[:1] == ["sql"] and rest[1:]:
                yield code.page, rest[1]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20)
    home = tmp_path_factory.mktemp("pages") / "home"
    with Broker.open(home, upkeep="none", settings=settings) as broker:
        yield broker


def test_queries_bind(broker: Broker) -> None:
    views = re.compile(rf"\b({'|'.join(SECTIONS)})\b")
    whole = [(page, query) for page, query in queries() if views.search(query)]

    wrong = []
    for page, query in whole:
        try:
            # A moment of the pages is before the history of a new home.
            broker.sql(re.sub(r"_at\((TIMESTAMP '[^']*'|m\.at_ms)\)", "_at(0)", query))
        except rmq_pipeline.errors.RocketMQError as error:
            wrong.append(f"{page}: {query}: {error}")

    assert len(whole) > 20
    assert not wrong


def test_settings_files_are_valid() -> None:
    found = [tomllib.loads(code.text) for code in of("toml") if code.page != ROUTES]

    assert found
    assert all(Settings(**values) for values in found)


def test_route_tables_are_valid() -> None:
    found = [code.text for code in of("toml") if code.page == ROUTES]

    assert found
    assert all(RouteTable.parse(text, broker_name="a").topics for text in found)


def test_components_are_there() -> None:
    found = [yaml.safe_load(code.text) for code in of("yaml")]
    named = [each["type"].rpartition(".") for each in found if "type" in each]

    assert len(named) >= 2
    assert [name for _, _, name in named if name not in rmq_pipeline.dagster.__all__] == []


def test_every_language_is_checked_or_listed() -> None:
    checked = {"python", "console", "sql", "toml", "yaml"} | PROSE

    unknown = {
        f"{code.page}: {code.language}"
        for code in blocks()
        if code.language not in checked
        and code.language not in UNCHECKED.get(code.page, ("", ""))[0].split()
    }

    assert not unknown
