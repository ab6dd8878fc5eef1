"""What a SQL92 expression says: values, and conditions on them."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Name:
    """A property of the message: a text, or nothing."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Literal:
    """A text or a number; whole numbers are of 64 bits."""

    value: str | int | float
    at: int


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of these, tried from left to right until one is false."""

    conditions: "tuple[Condition, ...]"
    at: int


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of these, tried from left to right until one is true."""

    conditions: "tuple[Condition, ...]"
    at: int


@dataclass(frozen=True, slots=True)
class Not:
    """True where the other is false, and unknown where it is."""

    condition: "Condition"
    at: int


@dataclass(frozen=True, slots=True)
class Equal:
    """Two values or two conditions are the same; unknown when one is missing."""

    left: "Expression"
    right: "Expression"
    at: int


@dataclass(frozen=True, slots=True)
class Order:
    """One number is above or below another."""

    #: >, >=, <, <=
    sign: str
    left: Name | Literal
    right: Name | Literal
    at: int


@dataclass(frozen=True, slots=True)
class IsNull:
    """A value is missing, or a condition unknown; never unknown itself."""

    operand: "Expression"
    at: int


@dataclass(frozen=True, slots=True)
class In:
    """A property is one of these texts."""

    name: Name
    members: tuple[str, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Match:
    """A text has a part, or has it not; false for what is no text, with ``negated`` too."""

    #: CONTAINS, STARTSWITH, ENDSWITH
    how: str
    operand: "Expression"
    part: str
    negated: bool
    at: int


@dataclass(frozen=True, slots=True)
class Always:
    """TRUE, FALSE or NULL: a condition that is what it is."""

    value: bool | None
    at: int


Condition: TypeAlias = AllOf | AnyOf | Not | Equal | Order | IsNull | In | Match | Always
Expression: TypeAlias = Name | Literal | Condition
