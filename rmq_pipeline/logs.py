"""Logging of the library's processes: lines for people or JSON objects, with ``extra`` fields."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

from rmq_pipeline.errors import RequestError

Format = Literal["human", "json"]
Level = Literal["debug", "info", "warning", "error"]

#: Environment variables that pass the configuration on to child processes.
LEVEL_VARIABLE: Final = "RMQ_LOG_LEVEL"
FORMAT_VARIABLE: Final = "RMQ_LOG_FORMAT"
#: Root logger of the library. Dagster's processes have their own handlers for other loggers.
LIBRARY: Final = "rmq_pipeline"
#: Attributes that every record has; all others come from ``extra``.
_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def set_up(
    level: str | None = None,
    format: str | None = None,
    *,
    default: Level = "warning",
    file: Path | None = None,
) -> None:
    """Log to stderr or a file, in this process and in its child processes.

    Loggers that were configured elsewhere keep their handlers and levels.

    Args:
        level: lowest level to log: debug, info, warning, error; None: RMQ_LOG_LEVEL, then
            ``default``.
        format: human or json; None: RMQ_LOG_FORMAT, then human.
        default: level of this process only.
        file: for this process, instead of stderr.

    Raises:
        RequestError: level or format is none of these.
    """
    for variable, value in ((LEVEL_VARIABLE, level), (FORMAT_VARIABLE, format)):
        if value is not None:
            os.environ[variable] = value
    logging.basicConfig(level=_level(default), handlers=[_handler(file)], force=True)


def set_up_library() -> None:
    """Log the library's records in a process that others configure, such as a Dagster run.

    The records go to stderr, which Dagster stores with the run.
    """
    logger = logging.getLogger(LIBRARY)
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(_handler())
        logger.setLevel(_level("info"))


def _handler(file: Path | None = None) -> logging.Handler:
    chosen = _chosen(FORMAT_VARIABLE, get_args(Format), default="human")
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        handler = logging.FileHandler(file)
    handler.setFormatter(JsonFormatter() if chosen == "json" else HumanFormatter())
    return handler


def _level(default: Level) -> str:
    return _chosen(LEVEL_VARIABLE, get_args(Level), default=default).upper()


def _chosen(variable: str, allowed: tuple[str, ...], *, default: str) -> str:
    chosen = os.environ.get(variable, "").lower() or default
    if chosen not in allowed:
        raise RequestError(f"{variable} is {chosen!r}; it is one of {', '.join(allowed)}.")
    return chosen


class HumanFormatter(logging.Formatter):
    """Formatter of one line: time, level, logger, message, and the fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(  # noqa: N802 - logging's name
        self,
        record: logging.LogRecord,
        datefmt: str | None = None,  # noqa: ARG002
    ) -> str:
        """Return the time in UTC, as in JSON."""
        return _moment(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without the traceback, which follows it."""
        named = [f"{name}={_shown(value)}" for name, value in fields(record).items()]
        return " ".join([super().formatMessage(record), *named])


class JsonFormatter(logging.Formatter):
    """Formatter of a JSON object: at, level, logger, message, the fields, and ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line; ``error`` is the traceback."""
        said: dict[str, Any] = {
            "at": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said = {**fields(record), **said}
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str, ensure_ascii=False)


def fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the fields that were passed with ``extra``."""
    return {name: value for name, value in record.__dict__.items() if name not in _OWN}


def _moment(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or " " in text or "\n" in text else text
