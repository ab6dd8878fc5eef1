"""A usual run tries each verb of a promise at each endpoint, not in process alone."""

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from rmq_pipeline import verbs
from tests.behaviour.over_grpc import OverGrpc
from tests.behaviour.speakable import MODULES, OTHERWISE

HERE: Final = Path(__file__).parent
VERBS: Final = {
    "flight": frozenset(verbs.VERBS),
    "grpc": frozenset(verbs.VERBS) & vars(OverGrpc).keys(),
}


def names_of(test: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Return the names in a test, and in the functions and fixtures of its module it uses."""
    names: set[str] = set()
    unread, left = [test], dict(functions)
    while unread:
        for node in ast.walk(unread.pop()):
            for field in ("attr", "id", "arg"):
                name = getattr(node, field, None)
                if isinstance(name, str):
                    names.add(name)
                    unread += [left.pop(name)] if name in left else []
    return names


def tried(endpoint: str, *, usual: bool) -> dict[str, list[str]]:
    """Return the tests that use each verb at an endpoint, in a usual run or in any."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in sorted(HERE.glob("test_*.py")):
        if endpoint == "grpc" and module.stem not in MODULES:
            continue
        tree = ast.parse(module.read_text())
        of_all = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, function in functions.items():
            names = names_of(function, functions)
            marks = [*of_all, *map(ast.unparse, function.decorator_list)]
            mark = "one_endpoint" if "shared_endpoint" in names else "every_endpoint"
            is_usual = (f"pytest.mark.{mark}" in marks) == (mark == "every_endpoint")
            if not name.startswith("test_") or "inside" in names or (usual and not is_usual):
                continue
            if endpoint == "grpc" and name in OTHERWISE:
                continue
            for verb in VERBS[endpoint] & names:
                found[verb].append(f"{module.name}::{name}")
    return found


@pytest.mark.parametrize("name", VERBS)
def test_a_usual_run_tries_every_verb_at_every_endpoint(name: str) -> None:
    anywhere, usual = (tried(name, usual=usual) for usual in (False, True))

    only_long = {verb: tests[:3] for verb, tests in anywhere.items() if verb not in usual}

    assert len(usual) > 8
    assert not only_long, f"Mark one of these with pytest.mark.every_endpoint: {only_long}"
