"""Immutable set of all users and policies of a home."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from rmq_pipeline.access.decision import Verdict, decide
from rmq_pipeline.access.policy import Policy
from rmq_pipeline.access.resource import Action, Resource
from rmq_pipeline.access.user import User

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
    _verdicts: dict[_Question, Verdict] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, version: int, users: Iterable[User], *, policies: Iterable[Policy]) -> Self:
        """Build rules from lists of users and policies; later entries replace earlier ones."""
        named = {user.name: user for user in users}
        single = {policy.key: policy for policy in policies if policy.user in named}
        owned: dict[str, list[Policy]] = {name: [] for name in named}
        for policy in single.values():
            owned[policy.user].append(policy)
        return cls(version, named, {name: tuple(each) for name, each in owned.items()})

    def verdict(self, name: str, *, resource: Resource, action: Action, address: str) -> Verdict:
        """Decide whether a user may do an action on a resource from an address."""
        user = self.users.get(name)
        if user is None:
            return Verdict(False, "the user does not exist")
        if user.disabled:
            return Verdict(False, "the user is disabled")
        if user.is_super:
            return Verdict(True, "the user is a super user")
        question = (name, resource, action, address)
        if found := self._verdicts.get(question):
            return found
        if len(self._verdicts) >= _REMEMBERED:
            self._verdicts.clear()
        made = decide(self.policies[name], resource=resource, action=action, address=address)
        if len(resource.name) <= _NAME_LENGTH:
            self._verdicts[question] = made
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
        return replace(self, version=self.version + 1, users=users, policies=policies, _verdicts={})

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
