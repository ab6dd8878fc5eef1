"""Users: who calls, and what proves it."""

import re
import secrets
import string
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline.errors import RequestError

UserType = Literal["normal", "super"]
TYPES: Final[tuple[UserType, ...]] = get_args(UserType)
#: No character that parts a header of either door.
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_SECRET: Final = re.compile(r"[!-~]{8,128}")
_ALPHABET: Final = string.ascii_letters + string.digits
_GENERATED_LENGTH: Final = 32


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call; its rights are looked up when it asks for something."""

    name: str
    #: It has shown the token of the home's endpoint, which only the owner of the home can read.
    is_owner: bool = False


#: Whoever can read the home.
OWNER: Final = Principal("(owner of the home)", is_owner=True)


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with a password; RocketMQ's clients call the two access key and secret key."""

    name: str
    #: As it is: the signature of RocketMQ's clients cannot be checked without it.
    secret: str = field(repr=False)
    type: UserType = "normal"
    disabled: bool = False
    created_at_ms: int = 0
    altered_at_ms: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        check_password(self.secret)
        if self.type not in TYPES:
            raise RequestError(f"A user is one of {', '.join(TYPES)}, not {self.type!r}.")
        if not isinstance(self.disabled, bool):
            raise RequestError("A user is disabled or not: true or false.")

    @property
    def is_super(self) -> bool:
        """Whether policies do not count for it."""
        return self.type == "super"

    def to_json(self) -> dict[str, Any]:
        """As the file has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """What ``to_json`` gave."""
        return cls(**found)

    def describe(self) -> dict[str, Any]:
        """All that anybody is told."""
        fields = asdict(self)
        del fields["secret"]
        return fields


def check_name(name: object) -> None:
    """Refuse what is no user's name.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{name!r} is no user's name: 1 to 64 of A-Z a-z 0-9 _ . @ -.")


def check_password(password: object) -> None:
    """Refuse what is no password, without repeating it.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(password, str) or not _SECRET.fullmatch(password):
        raise RequestError("A password has 8 to 128 visible ASCII characters, without spaces.")


def new_password() -> str:
    """One that nobody can guess: 190 bits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_GENERATED_LENGTH))
