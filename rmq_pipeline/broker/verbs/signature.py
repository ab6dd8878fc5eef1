"""Check of a call's arguments against the signature of its verb.

JSON has fewer types than Python: a tuple arrives as a list, and the keys of a mapping are text.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from rmq_pipeline.errors import (
    FilterExpressionError,
    IllegalLiteTopicError,
    InvisibleDurationError,
    QueryError,
    RequestError,
    TableSchemaError,
)

#: Arguments with an error class of their own, for any fault.
_OWN: Final[Mapping[str, type[RequestError]]] = {
    "filter": FilterExpressionError,
    "invisible_duration_ms": InvisibleDurationError,
    "lite_topics": IllegalLiteTopicError,
    "query": QueryError,
}
#: Most characters of a value in an error.
_SHOWN: Final = 200
_WORDS: Final[Mapping[Any, str]] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    pa.Table: "a table",
    type(None): "null",
}


def check(verb: str, method: Callable[..., object], *, args: Mapping[str, Any]) -> None:
    """Refuse arguments that do not match the verb's signature.

    Raises:
        RequestError: names the argument, its value, and its type.
    """
    signature, hints = _of(getattr(method, "__func__", method))
    known = set(signature.parameters) - {"self"}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            known |= set(args)
        elif name != "self" and parameter.default is parameter.empty and name not in args:
            wanted = said(hints.get(name, Any))
            raise RequestError(f"{verb} is missing a required argument: {name}, {wanted}.")
    for name, value in args.items():
        if name not in known:
            raise RequestError(f"{verb} has no argument {name[:_SHOWN]!r}.")
        hint = hints.get(name, Any)
        if not fits(value, hint):
            error = TableSchemaError if hint is pa.Table else _OWN.get(name, RequestError)
            raise error(f"{verb}: {name} must be {said(hint)}, not {_shown(value)}.")


@functools.cache
def _of(function: Callable[..., object]) -> tuple[inspect.Signature, dict[str, Any]]:
    return inspect.signature(function), get_type_hints(function)


def fits(value: object, hint: Any) -> bool:
    """Return True if a value has this type, as far as JSON can express it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in {Union, types.UnionType}:
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) for one in inner)
    if origin is tuple:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(inner)
            and all(map(fits, value, inner))
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _is_key(key, inner[0]) and fits(one, inner[1]) for key, one in value.items()
        )
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(one, inner[0]) for one in value)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _is_key(key: object, hint: Any) -> bool:
    is_number = isinstance(key, str) and key.removeprefix("-").isdecimal()
    return fits(key, hint) or (hint is int and is_number)


def said(hint: Any) -> str:
    """Return the type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return " or ".join(said(one) for one in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a list of {' and '.join(said(one) for one in inner)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"an object of {said(inner[0])} to {said(inner[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {said(inner[0])}"
    return _WORDS.get(hint, "any value")


def _shown(value: object) -> str:
    shown = f"a table of {value.num_rows} rows" if isinstance(value, pa.Table) else repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
