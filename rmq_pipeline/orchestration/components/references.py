"""Attributes that name Python objects or columns, resolved while a defs.yaml is loaded."""

import importlib
from collections.abc import Mapping
from typing import Any, Final

import dagster as dg
import pyarrow as pa

REFERENCE: Final = "a.module.name, or .module.name from the folder of the defs.yaml"
#: Arrow's names of types that an error lists.
_TYPES: Final = "string, int64, float64, bool, binary, timestamp[ms]"


def load_object(context: dg.ResolutionContext, reference: str) -> Any:
    """Return what a module calls by this name.

    Raises:
        ValueError: contains the reference, what is missing, and how to write one.
    """
    module, _, name = reference.rpartition(".")
    if module in ("", "."):
        raise ValueError(f"{reference!r} names no object of a module. Give {REFERENCE}.")
    if module.startswith("."):
        place = dg.ComponentLoadContext.from_resolution_context(context)
        module = f"{place.defs_relative_module_name(_folder(place))}{module}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise ValueError(
            f"{reference!r} names the module {module}, which does not exist. Give {REFERENCE}."
        ) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise ValueError(
            f"{reference!r} names {name}, which the module {module} does not have. Define it there,"
            " or correct the name."
        ) from error


def _folder(place: Any) -> Any:
    """Return the folder of a defs.yaml, also while it is named itself."""
    return place.path.parent if place.path.is_file() else place.path


def load_optional(context: dg.ResolutionContext, reference: str | None) -> Any:
    """Return what a module calls by this name; None for none."""
    return None if reference is None else load_object(context, reference)


def load_objects(context: dg.ResolutionContext, references: Any) -> Any:
    """Return what these references name; what is no reference is returned as it is."""
    listed = context.resolve_value(references)
    return [
        load_object(context, each) if isinstance(each, str) else each
        for each in (listed if isinstance(listed, list | tuple) else [listed])
    ]


def load_schema(
    context: dg.ResolutionContext, columns: Mapping[str, str] | str | None
) -> pa.Schema | None:
    """Return the columns that a mapping lists, or the schema that a reference names.

    Raises:
        ValueError: contains the column and its unknown type, or the reference.
    """
    if columns is None:
        return None
    said = context.resolve_value(columns)
    if isinstance(said, str):
        return load_object(context, said)
    if not isinstance(said, Mapping):
        return said
    fields = []
    for name, named in said.items():
        try:
            fields.append(pa.field(name, pa.type_for_alias(str(named))))
        except ValueError as error:
            raise ValueError(
                f"Column {name} has the type {named!r}, which Arrow does not know by this name."
                f" Give one such as {_TYPES}, or name a pyarrow.Schema of a module."
            ) from error
    return pa.schema(fields)


def load_key(context: dg.ResolutionContext, key: str | None) -> Any:
    """Return the name of a column or property, or the function that a reference names."""
    return load_object(context, key) if key is not None and "." in key else key


def said(text: str, *, examples: list[Any] | None = None) -> dg.Resolver:
    """Describe an attribute that has the value that is written."""
    made: dg.Resolver = dg.Resolver.default(description=text, examples=examples)
    return made


def function(text: str, *, examples: list[Any]) -> dg.Resolver:
    """Describe an attribute that names a function."""
    return dg.Resolver(load_object, model_field_type=str, description=text, examples=examples)


def some_object(text: str, *, examples: list[Any]) -> dg.Resolver:
    """Describe an attribute that may name an object."""
    return dg.Resolver(
        load_optional, model_field_type=str | None, description=text, examples=examples
    )


def objects(text: str, *, examples: list[Any]) -> dg.Resolver:
    """Describe an attribute that lists names of objects."""
    return dg.Resolver(
        load_objects, model_field_type=list[str], description=text, examples=examples
    )


def columns(text: str, *, examples: list[Any] | None = None) -> dg.Resolver:
    """Describe an attribute that lists columns, or names a schema."""
    return dg.Resolver(
        load_schema,
        model_field_type=dict[str, str] | str | None,
        description=text,
        examples=examples,
    )


def key_source(text: str) -> dg.Resolver:
    """Describe an attribute that names a column, a property or a function."""
    return dg.Resolver(load_key, model_field_type=str | None, description=text)
