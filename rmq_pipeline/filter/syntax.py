"""Syntax tree of SQL92 expressions: values and conditions."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Name:
    """Property of a message: a string, or null if the message lacks it."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Literal:
    """String or number; integers have 64 bits."""

    value: str | int | float
    at: int


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conjunction (AND), evaluated from left to right until an operand is false."""

    conditions: "tuple[Condition, ...]"
    at: int


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Disjunction (OR), evaluated from left to right until an operand is true."""

    conditions: "tuple[Condition, ...]"
    at: int


@dataclass(frozen=True, slots=True)
class Not:
    """Negation; unknown where the operand is unknown."""

    condition: "Condition"
    at: int


@dataclass(frozen=True, slots=True)
class Equal:
    """Equality of two values or two conditions; unknown if either is null or unknown."""

    left: "Expression"
    right: "Expression"
    at: int


@dataclass(frozen=True, slots=True)
class Order:
    """Comparison of two numbers by order."""

    #: >, >=, <, <=
    sign: str
    left: Name | Literal
    right: Name | Literal
    at: int


@dataclass(frozen=True, slots=True)
class IsNull:
    """Test for a missing value or an unknown condition; the result is never unknown."""

    operand: "Expression"
    at: int


@dataclass(frozen=True, slots=True)
class In:
    """Test that a property equals one of the strings in ``members``."""

    name: Name
    members: tuple[str, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Match:
    """Substring, prefix or suffix test of a string.

    False if the operand is not a string or is missing, also with ``negated``.
    """

    #: CONTAINS, STARTSWITH, ENDSWITH
    how: str
    operand: "Expression"
    part: str
    negated: bool
    at: int


@dataclass(frozen=True, slots=True)
class Always:
    """Constant condition: TRUE, FALSE or NULL (unknown)."""

    value: bool | None
    at: int


Condition: TypeAlias = AllOf | AnyOf | Not | Equal | Order | IsNull | In | Match | Always
Expression: TypeAlias = Name | Literal | Condition
