"""Access control of a home: authentication, authorization, and changes of users and policies."""

import dataclasses
import hmac
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

from rmq_pipeline.access import credentials, source
from rmq_pipeline.access.credentials import Claim
from rmq_pipeline.access.policy import Action, Decision, Policy, Resource
from rmq_pipeline.access.users import Principal, Rules, User, read_rules, write_rules
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.errors import (
    AlreadyExistsError,
    ForbiddenError,
    InUseError,
    NotFoundError,
    UnauthorizedError,
)

log = logging.getLogger(__name__)

#: Validity of a bearer token.
TOKEN_MS: Final = 12 * 3600 * 1000
_WRONG: Final = "No enabled user has this name and password."
_ANONYMOUS: Final = "The call has no credentials."


class Access:
    """Users and policies in force; thread-safe and shared by both endpoints.

    Access control is off while the home has no users: every call is then allowed.
    """

    def __init__(
        self, home: Path, rules: Rules, *, clock: Clock, utc_offsets_min: tuple[int, ...]
    ) -> None:
        self._home = home
        self._rules = rules
        self._clock = clock
        self._utc_offsets_min = utc_offsets_min
        self._changing = threading.Lock()
        self._unknown_user = User("nobody", secrets.token_hex(16))
        #: Called with changed rules before they are stored; if it raises, nothing changes.
        self.share: Callable[[dict[str, Any]], None] = lambda _: None
        #: True while an endpoint listens beyond loopback; the last user cannot be deleted then.
        self.is_required = False

    @classmethod
    def open(
        cls,
        home: Path,
        *,
        clock: Clock | None = None,
        utc_offsets_min: tuple[int, ...] | None = None,
    ) -> Self:
        """Load the access control of a home that this process has open.

        Args:
            home: the directory of the broker's files.
            clock: measures the age of signatures and tokens; the system clock by default.
            utc_offsets_min: UTC offsets, in minutes, at which RocketMQ clients may sign their
                local time; None: every offset in use.

        Raises:
            AccessFileError: the access file is damaged.
        """
        offsets = credentials.UTC_OFFSETS_MIN if utc_offsets_min is None else utc_offsets_min
        rules = read_rules(home)
        return cls(home, rules, clock=clock or SystemClock(), utc_offsets_min=offsets)

    def reload(self) -> None:
        """Read the rules again, after the file was replaced.

        Rules without a user would turn access control off: beyond loopback the old ones stay.

        Raises:
            AccessFileError: the access file is damaged; the rules stay.
        """
        with self._changing:
            rules = read_rules(self._home)
            if self.is_required and not rules.users:
                log.error("The leader has no users any more; the users of before stay in force.")
                return
            self._rules = rules

    @property
    def enabled(self) -> bool:
        """True if calls must have credentials."""
        return bool(self._rules.users)

    @property
    def rules(self) -> Rules:
        """Users and policies in force."""
        return self._rules

    # ---------------------------------------------------------------------------- authentication

    def authenticate_mq(self, authorization: str | None, date_time: str | None) -> Principal | None:
        """Return the user who signed a RocketMQ call; None while access control is off.

        Args:
            authorization: the ``authorization`` header.
            date_time: the ``x-mq-date-time`` header, the only signed part of the call.

        Raises:
            UnauthorizedError: the call has no valid signature of an enabled user, or the signed
                time is not the present.
        """
        if not self._rules.users:
            return None
        claim = credentials.read_signature(authorization)
        if claim is None or date_time is None:
            raise UnauthorizedError(
                "The call is not signed.", remedy="Set access key and secret key in the client."
            )
        principal = self._proven(
            claim,
            lambda user: hmac.compare_digest(credentials.sign(user.secret, date_time), claim.proof),
        )
        credentials.check_signed_at(
            date_time, self._clock.now_ms(), utc_offsets_min=self._utc_offsets_min
        )
        return principal

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Return the user of a Basic or Bearer header; None while access control is off.

        Raises:
            UnauthorizedError: the header is missing or malformed, the password is wrong, the user
                is disabled, or the token has expired.
        """
        if not self._rules.users:
            return None
        scheme, _, value = (authorization or "").strip().partition(" ")
        if scheme.lower() == "basic":
            claim = credentials.read_basic(value)
            return self._proven(claim, lambda user: credentials.is_password(claim, user.secret))
        if scheme.lower() == "bearer":
            claim, until_ms = credentials.read_bearer(value)
            if until_ms <= self._clock.now_ms():
                raise UnauthorizedError(
                    "The token has expired.", remedy="Sign in again with user and password."
                )
            return self._proven(
                claim, lambda user: credentials.seals(claim, user.secret, until_ms=until_ms)
            )
        raise UnauthorizedError(_ANONYMOUS)

    def sign_in(self, authorization: str | None) -> Principal | None:
        """Authenticate a call that requests a token; it must send a password, not a token.

        Raises:
            UnauthorizedError: the call has no Basic header, or the password is wrong.
        """
        scheme = (authorization or "").strip().partition(" ")[0].lower()
        if self._rules.users and scheme != "basic":
            raise UnauthorizedError(
                "The sign-in has no user and password.",
                remedy="Send them in a Basic authorization header.",
            )
        return self.authenticate(authorization)

    def _proven(self, claim: Claim, proves: Callable[[User], bool]) -> Principal:
        user = self._rules.users.get(claim.user)
        # An unknown name is checked against a random secret: the response time must not reveal
        # which users exist.
        is_proven = proves(user or self._unknown_user)
        if user is None or not is_proven or user.disabled:
            raise UnauthorizedError(_WRONG)
        return Principal(user.name)

    def token(self, principal: Principal) -> str:
        """Issue a bearer token to a user who has just sent the password.

        Raises:
            UnauthorizedError: the user was deleted meanwhile.
        """
        user = self._rules.users.get(principal.name)
        if user is None:
            raise UnauthorizedError(_WRONG)
        until_ms = self._clock.now_ms() + TOKEN_MS
        return credentials.bearer(user.name, user.secret, until_ms=until_ms)

    # ----------------------------------------------------------------------------- authorization

    def authorize(
        self, principal: Principal | None, *, resource: Resource, action: Action, peer: str = ""
    ) -> None:
        """Check that a caller may do an action on a resource.

        Args:
            principal: the result of the authentication.
            resource: the object of the call.
            action: the requested action.
            peer: the caller's address, as gRPC names it, or an IP address; "" if unknown.

        Raises:
            UnauthorizedError: the call is anonymous, and access control was turned on meanwhile.
            ForbiddenError: the policies do not allow it.
        """
        if not self._rules.users:
            return
        if principal is None:
            raise UnauthorizedError(_ANONYMOUS)
        if principal.is_owner:
            return
        decision = self._rules.decision(
            principal.name, resource=resource.owner, action=action, address=source.address_of(peer)
        )
        if not decision.allowed:
            raise ForbiddenError(
                f"User {principal.name} may not {action} {resource}: {decision.because}."
            )

    def authorize_super(self, principal: Principal | None) -> None:
        """Check that the caller is a super user or the owner of the home.

        Raises:
            UnauthorizedError: the call is anonymous, and access control was turned on meanwhile.
            ForbiddenError: the caller is a normal user.
        """
        if self.is_unbounded(principal):
            return
        if principal is None:
            raise UnauthorizedError(_ANONYMOUS)
        raise ForbiddenError(
            f"User {principal.name} is not a super user, as this call requires.",
            remedy="Call as a super user: `rmq user alter USER --super`.",
        )

    def is_unbounded(self, principal: Principal | None) -> bool:
        """Return True if the caller may do everything: access control is off, owner or super."""
        rules = self._rules
        if not rules.users:
            return True
        if principal is None or principal.is_owner:
            return principal is not None
        user = rules.users.get(principal.name)
        return user is not None and user.is_super and not user.disabled

    def explain(self, user: str, *, resource: Resource, action: Action, address: str) -> Decision:
        """Return the decision that a call of this user would get, with the reason.

        Args:
            user: the name of the user.
            resource: the object of the call.
            action: the requested action.
            address: the caller's IP address; "" if unknown.

        Raises:
            NotFoundError: the user does not exist.
        """
        self._user(user)
        return self._rules.decision(user, resource=resource.owner, action=action, address=address)

    # ------------------------------------------------------------------------------------ changes

    def create_user(self, name: str, *, secret: str, type: str) -> User:
        """Create a user.

        Raises:
            AlreadyExistsError: a user of this name exists.
            RequestError: the name, the password or the type is invalid.
            StorageError: the access file could not be written; the user was not created.
        """
        now_ms = self._clock.now_ms()
        made = User(name, secret, type, False, now_ms, now_ms)  # type: ignore[arg-type]
        with self._changing:
            if name in self._rules.users:
                raise AlreadyExistsError(
                    f"The user {name} exists already.",
                    remedy="Change it with `rmq user alter`, or choose another name.",
                )
            self._put(self._rules.with_user(made))
        return made

    def alter_user(self, name: str, **changes: Any) -> User:
        """Change fields of a user and return the changed user.

        Raises:
            NotFoundError: the user does not exist.
            RequestError: a new value is invalid.
            StorageError: the access file could not be written; the user is unchanged.
        """
        with self._changing:
            now_ms = self._clock.now_ms()
            user = dataclasses.replace(self._user(name), **changes, altered_at_ms=now_ms)
            self._put(self._rules.with_user(user))
        return user

    def delete_user(self, name: str) -> int:
        """Delete a user and the user's policies; return the number of deleted policies.

        Raises:
            NotFoundError: the user does not exist.
            InUseError: this is the last user, and an endpoint listens beyond loopback.
            StorageError: the access file could not be written; nothing was deleted.
        """
        with self._changing:
            self._user(name)
            if self.is_required and len(self._rules.users) == 1:
                raise InUseError(
                    f"{name} is the last user, and an endpoint listens beyond loopback: without "
                    "users, every caller could do everything.",
                    remedy="Start the broker on loopback first.",
                )
            count = len(self._rules.policies[name])
            self._put(self._rules.without_user(name))
        return count

    def put_policy(self, policy: Policy) -> None:
        """Add a policy; it replaces the policy with the same key.

        Raises:
            NotFoundError: the policy's user does not exist.
            StorageError: the access file could not be written; the policies are unchanged.
        """
        with self._changing:
            self._user(policy.user)
            kept = [p for p in self._rules.policies[policy.user] if p.key != policy.key]
            self._put(self._rules.with_policies(policy.user, [*kept, policy]))

    def delete_policies(self, user: str, *, where: Callable[[Policy], bool]) -> list[Policy]:
        """Delete the user's policies for which ``where`` is true, and return them.

        Raises:
            NotFoundError: the user does not exist.
            StorageError: the access file could not be written; nothing was deleted.
        """
        with self._changing:
            self._user(user)
            gone = [p for p in self._rules.policies[user] if where(p)]
            kept: Iterable[Policy] = [p for p in self._rules.policies[user] if p not in gone]
            if gone:
                self._put(self._rules.with_policies(user, kept))
        return gone

    def _put(self, rules: Rules) -> None:
        # The file comes first, so that an answered change survives a crash.
        self.share(rules.to_json())
        write_rules(self._home, rules)
        self._rules = rules

    def _user(self, name: str) -> User:
        found = self._rules.users.get(name)
        if found is None:
            raise NotFoundError(
                f"The user {name} does not exist.",
                remedy="Create it with `rmq user create`, or check the name with `rmq user list`.",
            )
        return found
