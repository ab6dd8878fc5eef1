"""Access control of a home: who calls, what they may do, and how that is changed."""

import dataclasses
import hmac
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

from rmq_pipeline.access import credentials, file, source
from rmq_pipeline.access.credentials import Claim
from rmq_pipeline.access.decision import Verdict
from rmq_pipeline.access.policy import Policy
from rmq_pipeline.access.resource import Action, Resource
from rmq_pipeline.access.rules import Rules
from rmq_pipeline.access.user import Principal, User
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.errors import (
    AlreadyExistsError,
    ForbiddenError,
    InUseError,
    NotFoundError,
    UnauthorizedError,
)

#: How long a token stands for the password it was bought with.
TOKEN_MS: Final = 12 * 3600 * 1000
_WRONG: Final = "There is no such user with this password, or it is disabled."


class Access:
    """Users and policies in force; for any number of threads, and both doors.

    Off while there is no user: then everybody may do everything.
    """

    def __init__(self, home: Path, rules: Rules, *, clock: Clock) -> None:
        self._home = home
        self._rules = rules
        self._clock = clock
        self._changing = threading.Lock()
        self._nobody = User("nobody", secrets.token_hex(16))
        #: A door listens beyond loopback: the last user stays.
        self.is_required = False

    @classmethod
    def open(cls, home: Path, *, clock: Clock | None = None) -> Self:
        """The access control of a home that this process has open.

        Args:
            clock: for how old signatures and tokens are; the machine's when left out.

        Raises:
            AccessFileError: its file is damaged.
        """
        return cls(home, file.read(home), clock=clock or SystemClock())

    @property
    def enabled(self) -> bool:
        """Whether callers have to say who they are."""
        return bool(self._rules.users)

    @property
    def rules(self) -> Rules:
        """Those in force."""
        return self._rules

    # --------------------------------------------------------------------------------- who calls

    def authenticate_mq(self, authorization: str | None, date_time: str | None) -> Principal | None:
        """Who makes a call of RocketMQ's protocol; None: anonymous, while access control is off.

        Args:
            authorization: the header of that name.
            date_time: the header x-mq-date-time, which is all that is signed.

        Raises:
            UnauthorizedError: no user has signed it.
        """
        if not self._rules.users:
            return None
        claim = credentials.read_signature(authorization)
        if claim is None or date_time is None:
            raise UnauthorizedError("The call is not signed.")
        principal = self._proven(
            claim,
            lambda user: hmac.compare_digest(credentials.sign(user.secret, date_time), claim.proof),
        )
        credentials.check_signed_at(date_time, self._clock.now_ms())
        return principal

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Who sends this HTTP authorization header, Basic or Bearer; None: as above.

        Raises:
            UnauthorizedError: there is none, or it proves nothing.
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
                raise UnauthorizedError("The token has ended.")
            return self._proven(
                claim, lambda user: credentials.seals(claim, user.secret, until_ms=until_ms)
            )
        raise UnauthorizedError("The call says not who makes it.")

    def sign_in(self, authorization: str | None) -> Principal | None:
        """As ``authenticate``, of somebody who buys a token: for a password, not for another token.

        Raises:
            UnauthorizedError: there is no password, or not the right one.
        """
        scheme = (authorization or "").strip().partition(" ")[0].lower()
        if self._rules.users and scheme != "basic":
            raise UnauthorizedError("A token is given for a user and a password: send Basic.")
        return self.authenticate(authorization)

    def _proven(self, claim: Claim, proves: Callable[[User], bool]) -> Principal:
        user = self._rules.users.get(claim.user)
        # A name that nobody has costs as much time as one that somebody has.
        is_proven = proves(user or self._nobody)
        if user is None or not is_proven or user.disabled:
            raise UnauthorizedError(_WRONG)
        return Principal(user.name)

    def token(self, principal: Principal) -> str:
        """A bearer token for a user who has just shown its password.

        Raises:
            UnauthorizedError: it is none any more.
        """
        user = self._rules.users.get(principal.name)
        if user is None:
            raise UnauthorizedError(_WRONG)
        until_ms = self._clock.now_ms() + TOKEN_MS
        return credentials.bearer(user.name, user.secret, until_ms=until_ms)

    # ------------------------------------------------------------------------------ what they may

    def authorize(
        self, principal: Principal | None, *, resource: Resource, action: Action, peer: str = ""
    ) -> None:
        """Let a call go on, or refuse it.

        Args:
            peer: where it comes from, as gRPC names it, or an IP address.

        Raises:
            UnauthorizedError: nobody has said who calls, and access control is on by now.
            ForbiddenError: the caller may not.
        """
        if not self._rules.users:
            return
        if principal is None:
            raise UnauthorizedError("The call says not who makes it.")
        if principal.is_owner:
            return
        verdict = self._rules.verdict(
            principal.name, resource=resource.owner, action=action, address=source.address_of(peer)
        )
        if not verdict.allowed:
            raise ForbiddenError(
                f"User {principal.name} may not {action} {resource}: {verdict.because}."
            )

    def authorize_super(self, principal: Principal | None) -> None:
        """Let only super users and the owner of the home go on.

        Raises:
            UnauthorizedError: nobody has said who calls, and access control is on by now.
            ForbiddenError: it is a normal user.
        """
        if self.is_unbounded(principal):
            return
        if principal is None:
            raise UnauthorizedError("The call says not who makes it.")
        raise ForbiddenError(f"User {principal.name} is no super user.")

    def is_unbounded(self, principal: Principal | None) -> bool:
        """Whether policies do not count for this caller."""
        rules = self._rules
        if not rules.users:
            return True
        if principal is None or principal.is_owner:
            return principal is not None
        user = rules.users.get(principal.name)
        return user is not None and user.is_super and not user.disabled

    def explain(self, user: str, *, resource: Resource, action: Action, address: str) -> Verdict:
        """What a user would be told, and why.

        Raises:
            NotFoundError: there is no such user.
        """
        self._user(user)
        return self._rules.verdict(user, resource=resource.owner, action=action, address=address)

    # ------------------------------------------------------------------------------------ changes

    def create_user(self, name: str, *, secret: str, type: str) -> User:
        """A new user.

        Raises:
            AlreadyExistsError: there is one of this name.
            StorageError: it could not be written down; there is none.
        """
        now_ms = self._clock.now_ms()
        made = User(name, secret, type, False, now_ms, now_ms)  # type: ignore[arg-type]
        with self._changing:
            if name in self._rules.users:
                raise AlreadyExistsError(f"There is a user {name}.")
            self._put(self._rules.with_user(made))
        return made

    def alter_user(self, name: str, **changes: Any) -> User:
        """A user with these fields changed.

        Raises:
            NotFoundError: there is none.
        """
        with self._changing:
            now_ms = self._clock.now_ms()
            user = dataclasses.replace(self._user(name), **changes, altered_at_ms=now_ms)
            self._put(self._rules.with_user(user))
        return user

    def delete_user(self, name: str) -> int:
        """Delete a user; how many policies went with it.

        Raises:
            NotFoundError: there is none.
            InUseError: it is the last one, and a door listens beyond loopback.
        """
        with self._changing:
            self._user(name)
            if self.is_required and len(self._rules.users) == 1:
                raise InUseError(
                    f"Without {name} there is no access control, and a door listens beyond "
                    "loopback: start the broker on loopback first."
                )
            count = len(self._rules.policies[name])
            self._put(self._rules.without_user(name))
        return count

    def put_policy(self, policy: Policy) -> None:
        """Add a policy, or put it in the place of that of the same key.

        Raises:
            NotFoundError: there is no such user.
        """
        with self._changing:
            self._user(policy.user)
            kept = [p for p in self._rules.policies[policy.user] if p.key != policy.key]
            self._put(self._rules.with_policies(policy.user, [*kept, policy]))

    def delete_policies(self, user: str, *, doomed: Callable[[Policy], bool]) -> list[Policy]:
        """Delete those of a user's policies; they.

        Raises:
            NotFoundError: there is no such user.
        """
        with self._changing:
            self._user(user)
            gone = [p for p in self._rules.policies[user] if doomed(p)]
            kept: Iterable[Policy] = [p for p in self._rules.policies[user] if p not in gone]
            if gone:
                self._put(self._rules.with_policies(user, kept))
        return gone

    def _put(self, rules: Rules) -> None:
        # Written first: what was answered holds after a crash.
        file.write(self._home, rules)
        self._rules = rules

    def _user(self, name: str) -> User:
        found = self._rules.users.get(name)
        if found is None:
            raise NotFoundError(f"There is no user {name}.")
        return found
