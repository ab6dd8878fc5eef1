"""Address, flags and settings with which a home is served; stored in it for the next start."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rmq_pipeline import durable_files
from rmq_pipeline.errors import RequestError

if TYPE_CHECKING:
    from rmq_pipeline.settings import Settings

Upkeep = Literal["self", "dagster", "none"]
Flush = Literal["sync", "async"]
#: Values by the names of settings.py; DEFAULT resets a setting.
Values = Mapping[str, Any]
DEFAULT: Final = "default"
#: Written for None in a file or on a command line.
_NONE: Final = "none"

DEFAULT_ADDRESS: Final = "127.0.0.1:8082"
#: Address at which RocketMQ's clients look for a broker by default.
DEFAULT_GRPC: Final = "127.0.0.1:8081"
#: In place of an address: do not listen.
NO_ENDPOINT: Final = "none"
#: In place of a certificate: connections are not encrypted.
NO_TLS: Final = "none"
#: In place of a certificate: the home's own certificate, which the broker creates.
SELF_MADE: Final = "self-made"
#: NO_TLS, SELF_MADE, or the files of a certificate and its key.
Tls = str | Sequence[str]
#: File with address, flags and settings of the last start.
SETTINGS_FILE: Final = "settings.json"
#: Environment variable: path of a TOML file with settings for brokers that are started without one.
VARIABLE: Final = "RMQ_SETTINGS"


@dataclass(frozen=True)
class Listening:
    """Requested addresses of a start; None: same as the last time."""

    flight: str | None = None
    grpc: str | None = None
    grpc_tls: str | None = None
    tls: Tls | None = None
    #: HTTP address for scrapes of the metrics.
    metrics: str | None = None
    #: Allow addresses beyond loopback without users. Not stored.
    insecure: bool = False


AS_LAST_TIME: Final = Listening()


@dataclass(frozen=True)
class Flags:
    """Address, flags and settings of a home; stored in it, and reused by the next start."""

    flight: str = DEFAULT_ADDRESS
    grpc: str = DEFAULT_GRPC
    #: Address of an encrypted gRPC endpoint for RocketMQ's clients.
    grpc_tls: str = NO_ENDPOINT
    tls: Tls = NO_TLS
    #: HTTP address for scrapes of the metrics; with TLS it is encrypted, too.
    metrics: str = NO_ENDPOINT
    upkeep: Upkeep = "self"
    flush: Flush = "sync"
    #: Only the settings that were given; the others have the defaults of the running version.
    settings: Values = field(default_factory=dict)

    @classmethod
    def remembered(cls, home: Path, *, settings: Values | None = None, **given: Any) -> "Flags":
        """Return the given flags (not None), else those of the last start, else the defaults."""
        path = home / SETTINGS_FILE
        found = _kept(path)
        kept = {name: found[name] for name in cls.__dataclass_fields__ if name in found}
        merged = {**kept.get("settings", {}), **(settings or {})}
        kept["settings"] = _own(merged)
        return cls(**{**kept, **{name: v for name, v in given.items() if v is not None}})

    def keep(self, home: Path) -> None:
        """Store the flags for the next start; an identical file is not rewritten.

        Raises:
            OSError: the file cannot be written, for example on a full disk; the old file remains
                valid.
        """
        path = home / SETTINGS_FILE
        # JSON turns tuples into lists, so convert before comparing.
        said = json.loads(json.dumps(asdict(self)))
        if not path.exists() or _kept(path) != said:
            durable_files.write_json(path, said)


def _kept(path: Path) -> dict[str, Any]:
    """Return the stored flags; empty if there are none.

    Raises:
        DamagedFileError: the file is damaged.
    """
    try:
        return durable_files.load_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise durable_files.DamagedFileError(f"{path} is damaged: {error}.") from error


def _own(values: Values) -> dict[str, Any]:
    """Return the values that are not reset to their defaults."""
    return {name: value for name, value in values.items() if value != DEFAULT}


def checked(values: Values) -> "Settings":
    """Return the settings: these values, and defaults for all others.

    Raises:
        RequestError: names each invalid setting, and why it is invalid.
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
                wrong.append(f"There is no setting {name}. The settings are {known}.")
            else:
                wrong.append(f"Setting {name} is {found['input']!r}: {found['msg'].lower()}.")
        raise RequestError(" ".join(wrong)) from error


def given(file: Path | None = None, pairs: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the settings of a TOML file (default: RMQ_SETTINGS), then of ``name=value`` pairs.

    A file replaces all settings; omitted settings return to their defaults. ``name=default`` resets
    one setting. Returns None without a file and pairs: the home's stored settings apply.

    Raises:
        RequestError: a setting is unknown or invalid, or the file is not TOML.
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
            raise RequestError(f"{file} is not valid TOML: {error}.") from error
        values = {**dict.fromkeys(Settings.model_fields, DEFAULT), **named}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise RequestError(f"A setting must be given as name=value, not {pair!r}.")
        values[name.strip()] = _value(text.strip())
    values = {name: None if value == _NONE else value for name, value in values.items()}
    checked(values)
    return values


def _value(text: str) -> Any:
    """Parse a number, or a list with or without brackets; anything else is text."""
    listed = f"[{text}]" if "," in text and not text.startswith("[") else text
    try:
        return tomllib.loads(f"value = {listed}")["value"]
    except tomllib.TOMLDecodeError:
        return text
