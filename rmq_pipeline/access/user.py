"""Users and their secrets."""

import re
import secrets
import string
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline.errors import RequestError

UserType = Literal["normal", "super"]
TYPES: Final[tuple[UserType, ...]] = get_args(UserType)
#: Excludes the separators in the headers of both endpoints.
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_SECRET: Final = re.compile(r"[!-~]{8,128}")
_ALPHABET: Final = string.ascii_letters + string.digits
_GENERATED_LENGTH: Final = 32


@dataclass(frozen=True, slots=True)
class Principal:
    """Authenticated caller; rights are looked up at each call."""

    name: str
    #: The call has the token of the endpoint file, which only the owner of the home can read.
    is_owner: bool = False


#: A caller that can read the endpoint file of the home.
OWNER: Final = Principal("(owner of the home)", is_owner=True)


@dataclass(frozen=True, slots=True)
class User:
    """User with a password; RocketMQ clients call name and password access key and secret key."""

    name: str
    #: In plain text: without it the broker cannot verify the signatures of RocketMQ clients.
    secret: str = field(repr=False)
    type: UserType = "normal"
    disabled: bool = False
    created_at_ms: int = 0
    altered_at_ms: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        check_password(self.secret)
        if self.type not in TYPES:
            raise RequestError(
                f"The user type {self.type!r} is unknown.",
                remedy=f"Use one of {', '.join(TYPES)}.",
            )
        if not isinstance(self.disabled, bool):
            raise RequestError(
                f"disabled is {self.disabled!r}, not a boolean.", remedy="Use true or false."
            )

    @property
    def is_super(self) -> bool:
        """True if the user may do everything, without policies."""
        return self.type == "super"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as the access file stores them, with the secret."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Build a user from the result of ``to_json``."""
        return cls(**found)

    def describe(self) -> dict[str, Any]:
        """Return the fields without the secret."""
        fields = asdict(self)
        del fields["secret"]
        return fields


def check_name(name: object) -> None:
    """Refuse an invalid user name.

    Raises:
        RequestError: the name is not 1 to 64 of A-Z a-z 0-9 _ . @ -.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} is not a user name.", remedy="Use 1 to 64 of A-Z a-z 0-9 _ . @ -."
        )


def check_password(password: object) -> None:
    """Refuse an invalid password; the error does not quote it.

    Raises:
        RequestError: the password is not 8 to 128 visible ASCII characters.
    """
    if not isinstance(password, str) or not _SECRET.fullmatch(password):
        raise RequestError(
            "The password has an invalid length or character.",
            remedy="Use 8 to 128 visible ASCII characters, without spaces.",
        )


def new_password() -> str:
    """Generate a random password of 32 letters and digits (190 bits)."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_GENERATED_LENGTH))
