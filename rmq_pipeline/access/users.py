"""Users with their secrets, the rules of a home, and the file ``access.json`` that stores them."""

import logging
import re
import secrets
import stat
import string
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline import durable_files
from rmq_pipeline.access.policy import Action, Decision, Policy, Resource, decide
from rmq_pipeline.errors import AccessFileError, RequestError, RocketMQError, StorageError

log = logging.getLogger(__name__)

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


_Question = tuple[str, Resource, Action, str]
#: Cached decisions; a full cache is cleared. Longer names are not cached: no resource has one.
_REMEMBERED: Final = 10_000
_NAME_LENGTH: Final = 512


@dataclass(frozen=True)
class Rules:
    """Users and policies at one version; immutable, so that a call sees one consistent set."""

    #: Number of changes since the home was created.
    version: int = 0
    users: Mapping[str, User] = field(default_factory=dict)
    policies: Mapping[str, tuple[Policy, ...]] = field(default_factory=dict)
    _decisions: dict[_Question, Decision] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, version: int, users: Iterable[User], *, policies: Iterable[Policy]) -> Self:
        """Build rules from lists of users and policies; later entries replace earlier ones."""
        named = {user.name: user for user in users}
        single = {policy.key: policy for policy in policies if policy.user in named}
        owned: dict[str, list[Policy]] = {name: [] for name in named}
        for policy in single.values():
            owned[policy.user].append(policy)
        return cls(version, named, {name: tuple(each) for name, each in owned.items()})

    def decision(self, name: str, *, resource: Resource, action: Action, address: str) -> Decision:
        """Decide whether a user may do an action on a resource from an address."""
        user = self.users.get(name)
        if user is None:
            return Decision(False, "the user does not exist")
        if user.disabled:
            return Decision(False, "the user is disabled")
        if user.is_super:
            return Decision(True, "the user is a super user")
        question = (name, resource, action, address)
        if found := self._decisions.get(question):
            return found
        if len(self._decisions) >= _REMEMBERED:
            self._decisions.clear()
        made = decide(self.policies[name], resource=resource, action=action, address=address)
        if len(resource.name) <= _NAME_LENGTH:
            self._decisions[question] = made
        return made

    def listed(self) -> list[Policy]:
        """Return all policies, sorted by user."""
        return [policy for name in sorted(self.policies) for policy in self.policies[name]]

    def with_user(self, user: User) -> "Rules":
        """Return the next version, with this user added or replaced."""
        policies = {user.name: (), **self.policies}
        return self._next({**self.users, user.name: user}, policies)

    def without_user(self, name: str) -> "Rules":
        """Return the next version, without this user and the user's policies."""
        users = {key: user for key, user in self.users.items() if key != name}
        return self._next(users, {key: self.policies[key] for key in users})

    def with_policies(self, name: str, policies: Iterable[Policy]) -> "Rules":
        """Return the next version, in which the user has exactly these policies."""
        return self._next(self.users, {**self.policies, name: tuple(policies)})

    def _next(
        self, users: Mapping[str, User], policies: Mapping[str, tuple[Policy, ...]]
    ) -> "Rules":
        return replace(
            self, version=self.version + 1, users=users, policies=policies, _decisions={}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the rules as the access file stores them."""
        return {
            "version": self.version,
            "users": [self.users[name].to_json() for name in sorted(self.users)],
            "policies": [policy.describe() for policy in self.listed()],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Build rules from the result of ``to_json``."""
        users = [User.from_json(each) for each in found["users"]]
        policies = [Policy.make(each.pop("user"), **each) for each in found["policies"]]
        return cls.of(int(found["version"]), users, policies=policies)


FILE_NAME: Final = "access.json"
_OWNER_ONLY: Final = 0o600


def read_rules(home: Path) -> Rules:
    """Read the rules of a home; a missing file means no users.

    Raises:
        AccessFileError: the file cannot be read or parsed. A damaged file must not turn access
            control off.
    """
    path = home / FILE_NAME
    for leftover in home.glob(f".{FILE_NAME}.*"):
        # A process killed during a write leaves a temporary file with secrets.
        leftover.unlink(missing_ok=True)
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("other users could read %s; restricting it to its owner", path)
            path.chmod(_OWNER_ONLY)
        found = durable_files.load_json(path.read_bytes())
        return Rules.from_json(found)
    except FileNotFoundError:
        return Rules()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RocketMQError) as error:
        # The cause may quote secrets of the file, so it is neither shown nor chained.
        raise AccessFileError(f"{path} is damaged or unreadable: {type(error).__name__}.") from None


def has_access_file(home: Path) -> bool:
    """Return True if the home has an access file."""
    return (home / FILE_NAME).exists()


def write_rules(home: Path, rules: Rules) -> None:
    """Replace the access file atomically and sync it.

    Raises:
        StorageError: the write failed. The old rules remain, unless only the last sync failed.
    """
    try:
        durable_files.write_json(home / FILE_NAME, rules.to_json())
    except OSError as error:
        raise StorageError(f"{home / FILE_NAME} was not written: {error.strerror}.") from error
