"""SQL92 filters once more, row by row: trees of tuples, their text, and what they mean.

Nothing of the library is used here. A tree is a tuple whose first item says what it is:

values      ("name", n) ("whole", i) ("decimal", text) ("text", t)
conditions  ("and", [c…]) ("or", [c…]) ("not", c) ("true",) ("false",) ("null",) ("holds", name)
            ("order", sign, v, v) ("between", negated, v, v, v) ("in", negated, name, [t…])
            ("match", how, negated, x, part) ("is null", negated, x) ("equal", negated, x, x)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

Tree: TypeAlias = tuple[Any, ...]
Row: TypeAlias = Mapping[str, str]

VALUES = ("name", "whole", "decimal", "text")
ORDER = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class EndedError(Exception):
    """A text could not be read as a number or a boolean."""


def is_matched(tree: Tree, row: Row) -> bool:
    """Whether a message with these properties is wanted."""
    try:
        return truth(tree, row) is True
    except EndedError:
        return False


def truth(tree: Tree, row: Row) -> bool | None:
    """True, false, or None for unknown."""
    kind = tree[0]
    if kind in ("and", "or"):
        return junction(tree, row)
    if kind in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[kind]
    if kind == "not":
        return negation(truth(tree[1], row))
    if kind == "holds":
        text = row.get(tree[1])
        return None if text is None else boolean(text)
    if kind == "order":
        return ordered(tree[1], tree[2], right=tree[3], row=row)
    if kind == "between":
        return between(tree, row)
    if kind == "is null":
        return (value_or_truth(tree[2], row) is None) is not tree[1]
    if kind == "in":
        text = row.get(tree[2])
        return None if text is None else (text in tree[3]) is not tree[1]
    if kind == "match":
        return matched(tree, row)
    assert kind == "equal"
    same = equal(tree[2], tree[3], row=row)
    return negation(same) if tree[1] else same


def junction(tree: Tree, row: Row) -> bool | None:
    stops_at = tree[0] == "or"
    unknown = False
    for part in tree[1]:
        found = truth(part, row)
        if found is stops_at:
            return stops_at
        unknown |= found is None
    return None if unknown else not stops_at


def negation(found: bool | None) -> bool | None:
    return None if found is None else not found


def value(tree: Tree, row: Row) -> str | int | float | None:
    kind, content = tree[0], tree[1]
    if kind == "name":
        return row.get(content)
    return float(content) if kind == "decimal" else content


def value_or_truth(tree: Tree, row: Row) -> str | int | float | bool | None:
    return value(tree, row) if tree[0] in VALUES else truth(tree, row)


def between(tree: Tree, row: Row) -> bool | None:
    _, negated, subject, low, high = tree
    if negated:
        return truth(("or", [("order", "<", subject, low), ("order", ">", subject, high)]), row)
    return truth(("and", [("order", ">=", subject, low), ("order", "<=", subject, high)]), row)


def ordered(sign: str, left: Tree, *, right: Tree, row: Row) -> bool | None:
    one, other = value(left, row), value(right, row)
    if one is None or other is None:
        return None
    if isinstance(one, str) and isinstance(other, str):
        one, other = decimal(one), decimal(other)
    return bool(ORDER[sign](read_like(other, one), read_like(one, other)))


def equal(left: Tree, right: Tree, *, row: Row) -> bool | None:
    one, other = value_or_truth(left, row), value_or_truth(right, row)
    # A side that is there is read even when the other one, a condition, is unknown.
    if left[0] not in VALUES and isinstance(other, str):
        other = boolean(other)
    if right[0] not in VALUES and isinstance(one, str):
        one = boolean(one)
    if right[0] in ("whole", "decimal") and isinstance(one, str):
        one = read_like(other, one)
    if one is None or other is None:
        return None
    return bool(read_like(other, one) == read_like(one, other))


def read_like(pattern: Any, found: Any) -> Any:
    """A text as what the other side is; anything else as it is."""
    if not isinstance(found, str) or isinstance(pattern, str):
        return found
    if isinstance(pattern, float):
        return decimal(found)
    assert isinstance(pattern, int)
    return whole(found)


def matched(tree: Tree, row: Row) -> bool:
    _, how, negated, subject, part = tree
    if not part:
        return False
    found = value_or_truth(subject, row)
    if not isinstance(found, str):
        return False
    has = {
        "CONTAINS": part in found,
        "STARTSWITH": found.startswith(part),
        "ENDSWITH": found.endswith(part),
    }
    return has[how] is not negated


def whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text) or not -(2**63) <= int(text) < 2**63:
        raise EndedError(text)
    return int(text)


def decimal(text: str) -> float:
    if not re.fullmatch(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", text):
        raise EndedError(text)
    return float(text)


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise EndedError(text)
    return text.lower() == "true"


# ------------------------------------------------------------------------------------------- text


def written(tree: Tree) -> str:
    """The expression; brackets only where something would bind otherwise, or hides a condition."""
    kind = tree[0]
    if kind == "or":
        return " OR ".join(written(part) for part in tree[1])
    if kind == "and":
        parts = [f"({written(p)})" if p[0] == "or" else written(p) for p in tree[1]]
        return " AND ".join(parts)
    if kind == "not":
        return f"NOT ({written(tree[1])})"
    if kind in ("true", "false", "null"):
        return str(kind)
    if kind in ("holds", "name"):
        return str(tree[1])
    if kind in ("whole", "decimal"):
        return str(tree[1])
    if kind == "text":
        return quoted(tree[1])
    return predicate(tree)


def predicate(tree: Tree) -> str:
    kind = tree[0]
    if kind == "order":
        return f"{written(tree[2])} {tree[1]} {written(tree[3])}"
    no = "NOT " if tree[2 if kind == "match" else 1] else ""
    if kind == "between":
        subject, low, high = map(written, tree[2:])
        return f"{subject} {no}BETWEEN {low} AND {high}"
    if kind == "in":
        return f"{tree[2]} {no}IN ({', '.join(map(quoted, tree[3]))})"
    if kind == "match":
        return f"{enclosed(tree[3])} {no}{tree[1]} {quoted(tree[4])}"
    if kind == "is null":
        return f"{enclosed(tree[2])} IS {no}NULL"
    return f"{enclosed(tree[2])} {'<>' if no else '='} {enclosed(tree[3])}"


def enclosed(tree: Tree) -> str:
    return written(tree) if tree[0] in VALUES else f"({written(tree)})"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
