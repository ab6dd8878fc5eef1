"""docs/settings.md and docs/errors.md list what the code declares, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from rmq_pipeline import errors
from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.settings import Settings
from tests.house_rules import Source, nodes
from tests.test_house import EXAMPLES, LIBRARY, python

pytestmark = pytest.mark.usefixtures("syntax_trees")

DOCS: Final = Path(__file__).parents[1] / "docs"
SETTINGS: Final = (DOCS / "settings.md").read_text("utf-8")
ERRORS: Final = (DOCS / "errors.md").read_text("utf-8")
#: Names a session of `rmq up` to its own processes; users never set it.
INTERNAL: Final = {"RMQ_DAGSTER_SESSION"}
FAMILIES: Final = ("Request", "Access", "NotFound", "Conflict", "Busy", "Operator")
UNITS: Final = {
    "_bytes": ((1 << 30, "GiB"), (1 << 20, "MiB")),
    "_ms": ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")),
}


def rows(page: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is ``first``."""
    table = re.search(rf"^\| {first} \|.*\n\| --- .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in table[1].splitlines()]


# ------------------------------------------------------------------------------------- settings


def shown(name: str, default: object) -> str:
    """Return a default as the page shows it."""
    if default is None or isinstance(default, bool | str):
        return "none" if default is None else f"{default}".lower()
    if isinstance(default, tuple):
        return ", ".join(shown("_ms", each) for each in default)
    assert isinstance(default, int | float)
    for ending, units in UNITS.items():
        for size, unit in units:
            if name.endswith(ending) and default % size == 0:
                return f"{default // size} {unit}"
    return f"{default:g} s" if name.endswith("_s") else f"{default:,}"


def test_the_page_lists_every_setting_with_its_default() -> None:
    declared = [
        [f"`{name}`", shown(name, field.default)] for name, field in Settings.model_fields.items()
    ]

    assert [row[:2] for row in rows(SETTINGS, "setting")] == declared


def test_the_page_lists_every_environment_variable() -> None:
    read = {name for source in python(LIBRARY, but=EXAMPLES) for name in _variables(source)}

    listed = [cell.strip("`") for cell, *_ in rows(SETTINGS, "variable")]

    assert sorted(listed) == sorted(read - INTERNAL)


def _variables(source: Source) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^(RMQ_(?!SYS_)[A-Z_]+)$", node.value)


# ------------------------------------------------------------------------------------- errors


def declared_errors() -> dict[str, type[RocketMQError]]:
    """Return the error classes of the whole library; importing it finds none that it has not."""
    found: dict[str, type[RocketMQError]] = {
        name: each
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, RocketMQError)
    }
    size = 0
    while size != len(found):
        size = len(found)
        for source in python(LIBRARY, but=EXAMPLES):
            for node in source.tree.body:
                if isinstance(node, ast.ClassDef) and node.name not in found:
                    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                    if bases & set(found):
                        module = importlib.import_module(source.module)
                        found[node.name] = getattr(module, node.name)
    return found


def row(error: type[RocketMQError]) -> list[str]:
    """Return the cells of an error."""
    # Of two families, the one that says how to repeat the call.
    families = [each for each in FAMILIES if issubclass(error, vars(errors)[f"{each}Error"])]
    family = families[-1]
    meaning = f"{inspect.getdoc(error)}".partition("\n")[0]
    cells = [str(error.code), f"`{error.__name__}`", family, meaning, error.remedy]
    return [cell.replace("|", r"\|") for cell in cells]


def test_the_page_lists_every_error_by_its_code() -> None:
    found = declared_errors()
    del found["RocketMQError"]

    expected = sorted(map(row, found.values()), key=lambda cells: (cells[0], cells[1]))

    assert len(expected) > 60
    assert rows(ERRORS, "code") == expected


def test_every_family_is_on_the_page() -> None:
    families = [cell for cell, *_ in rows(ERRORS, "family")]

    assert families == [f"`{each}Error`" for each in FAMILIES]


@pytest.mark.parametrize(
    ("name", "default", "expected"),
    [
        ("seal_after_ms", 90_000, "90 s"),
        ("reserve_bytes", 3 << 20, "3 MiB"),
        ("otlp_interval_s", 2.5, "2.5 s"),
        ("grpc_clients", 10_000, "10,000"),
        ("archive_root", None, "none"),
    ],
)
def test_a_default_is_shown_with_its_unit(name: str, default: object, expected: str) -> None:
    assert shown(name, default) == expected
