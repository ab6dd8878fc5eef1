"""Declaration of broker methods as verbs that other processes can call.

All other facts about a verb follow from the method: its name, its typed arguments, those that are
tables, and its docstring. ``make verbs`` writes them to ``rmq_pipeline/verbs.py``, which the client
and typed callers use, and to docs/verbs.md. The Flight endpoint reads the declarations themselves.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_origin

import pyarrow as pa

from rmq_pipeline.access.rights import Rights
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.verb import Verb

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK: Final = "declaration"


@dataclass(frozen=True)
class Declaration:
    """Verb and rights of a declared method."""

    verb: Verb
    rights: Rights
    #: A standby answers it, too.
    on_standby: bool = False


def verb(
    *,
    rights: Rights,
    repeatable: bool = False,
    repeatable_with: tuple[str, ...] = (),
    quick: bool = False,
    on_standby: bool = False,
) -> Callable[[Method], Method]:
    """Declare a method as a verb.

    Args:
        rights: rights that a caller needs if access control is on.
        repeatable: see ``Verb``.
        repeatable_with: see ``Verb``.
        quick: see ``Verb``.
        on_standby: a standby answers it, as of the last frame that it has.
    """

    def declare(method: Method) -> Method:
        hints = {n: p.annotation for n, p in inspect.signature(method).parameters.items()}
        declared = Verb(
            method.__name__,
            tables=tuple(name for name, hint in hints.items() if _is_table(hint)),
            table_maps=tuple(name for name, hint in hints.items() if _maps_to_tables(hint)),
            repeatable=repeatable,
            repeatable_with=repeatable_with,
            quick=quick,
        )
        setattr(
            method,
            _MARK,
            Declaration(declared, rights, on_standby),
        )
        return method

    return declare


def _is_table(hint: Any) -> bool:
    return hint is pa.Table or pa.Table in get_args(hint)


def _maps_to_tables(hint: Any) -> bool:
    return any(
        get_origin(one) in {dict, Mapping} and get_args(one)[1] is pa.Table
        for one in (hint, *get_args(hint))
    )


@cache
def declarations(kind: type) -> Mapping[str, Declaration]:
    """Return the verbs that a class declares, by name, in the order of their groups."""
    return {
        name: getattr(method, _MARK)
        for group in reversed(kind.__mro__)
        for name, method in vars(group).items()
        if hasattr(method, _MARK)
    }


class Opened:
    """Open store with an engine that runs the verbs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
