"""How a home is served: address, flags and settings, kept in it for the next start."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rmq_pipeline.endpoint import write_json
from rmq_pipeline.errors import RequestError

if TYPE_CHECKING:
    from rmq_pipeline.settings import Settings

Upkeep = Literal["self", "dagster", "none"]
Flush = Literal["sync", "async"]
#: Settings by name, of those in settings.py, or DEFAULT.
Values = Mapping[str, Any]
DEFAULT: Final = "default"
#: What a setting that may be None is called in a file or on a command line.
_NONE: Final = "none"

DEFAULT_ADDRESS: Final = "127.0.0.1:8082"
#: Where RocketMQ's clients look for a broker.
DEFAULT_GRPC: Final = "127.0.0.1:8081"
#: In place of an address: this door stays shut.
NO_DOOR: Final = "none"
#: In place of a certificate: connections are not encrypted.
NO_TLS: Final = "none"
#: In place of a certificate: the home's own, which the broker makes.
SELF_MADE: Final = "self-made"
#: NO_TLS, SELF_MADE, or the files of a certificate and its key.
Tls = str | Sequence[str]
#: Address, flags and settings of the last start.
SETTINGS_FILE: Final = "settings.json"
#: Names a TOML file of settings for every broker that is started without one.
VARIABLE: Final = "RMQ_SETTINGS"


@dataclass(frozen=True)
class Listening:
    """How a start is asked to listen; None: as the last time."""

    flight: str | None = None
    grpc: str | None = None
    grpc_tls: str | None = None
    tls: Tls | None = None
    #: Beyond loopback without users, too. Never remembered.
    insecure: bool = False


AS_LAST_TIME: Final = Listening()


@dataclass(frozen=True)
class Flags:
    """How a home is served; kept in it, and used again by the next start."""

    flight: str = DEFAULT_ADDRESS
    grpc: str = DEFAULT_GRPC
    #: Where RocketMQ's clients find the same door encrypted.
    grpc_tls: str = NO_DOOR
    tls: Tls = NO_TLS
    upkeep: Upkeep = "self"
    flush: Flush = "sync"
    #: Only those that were given: the others have the defaults of the version that runs.
    settings: Values = field(default_factory=dict)

    @classmethod
    def remembered(cls, home: Path, *, settings: Values | None = None, **given: Any) -> "Flags":
        """What is given (not None), else what the last start had, else the defaults."""
        path = home / SETTINGS_FILE
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept = {name: found[name] for name in cls.__dataclass_fields__ if name in found}
        merged = {**kept.get("settings", {}), **(settings or {})}
        kept["settings"] = _own(merged)
        return cls(**{**kept, **{name: v for name, v in given.items() if v is not None}})

    def keep(self, home: Path) -> None:
        """Have the next start find them; a file that says the same is left as it is.

        Raises:
            OSError: it cannot be written, as on a full disk; what it said before counts.
        """
        path = home / SETTINGS_FILE
        # What a list or a tuple becomes in JSON is the same.
        said = json.loads(json.dumps(asdict(self)))
        if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != said:
            write_json(path, said)


def _own(values: Values) -> dict[str, Any]:
    """Those that are not to have their defaults."""
    return {name: value for name, value in values.items() if value != DEFAULT}


def checked(values: Values) -> "Settings":
    """The settings that these values and the defaults make.

    Raises:
        RequestError: names each setting that is wrong, and why.
    """
    from pydantic import ValidationError

    from rmq_pipeline.settings import Settings

    try:
        return Settings(**_own(values))
    except ValidationError as error:
        wrong = []
        for found in error.errors(include_url=False):
            name = ".".join(map(str, found["loc"]))
            if found["type"] == "extra_forbidden":
                known = ", ".join(Settings.model_fields)
                wrong.append(f"There is no setting {name}; there are {known}.")
            else:
                wrong.append(f"Setting {name} is {found['input']!r}: {found['msg'].lower()}.")
        raise RequestError(" ".join(wrong)) from error


def given(file: Path | None = None, pairs: Sequence[str] = ()) -> dict[str, Any] | None:
    """What a TOML file, else that of RMQ_SETTINGS, and ``name=value`` pairs on top of it say.

    A file stands for all settings: those it does not name get their defaults. ``name=default``
    gives one its default. None when nothing is said: the home's own count.

    Raises:
        RequestError: a setting is unknown or wrong, or the file is no TOML.
        OSError: the file cannot be read.
    """
    from rmq_pipeline.settings import Settings

    if file is None and os.environ.get(VARIABLE):
        file = Path(os.environ[VARIABLE])
    if file is None and not pairs:
        return None
    values: dict[str, Any] = {}
    if file is not None:
        try:
            named = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RequestError(f"{file} is no TOML: {error}.") from error
        values = {**dict.fromkeys(Settings.model_fields, DEFAULT), **named}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise RequestError(f"A setting is given as name=value, not {pair!r}.")
        values[name.strip()] = _value(text.strip())
    values = {name: None if value == _NONE else value for name, value in values.items()}
    checked(values)
    return values


def _value(text: str) -> Any:
    """A number or a list, with or without its brackets; what is neither is text."""
    if "," in text and not text.startswith("["):
        text = f"[{text}]"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
