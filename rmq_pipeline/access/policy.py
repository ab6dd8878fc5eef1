"""Policies: what a user may do with some resources, or may not."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline.access.resource import ACTIONS, Action, Pattern
from rmq_pipeline.access.source import Network, networks
from rmq_pipeline.errors import RequestError

Effect = Literal["allow", "deny"]
EFFECTS: Final[tuple[Effect, ...]] = get_args(Effect)
#: Where a policy of one tier fits, those of the next do not count.
Tier = Literal["custom", "default"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Policy:
    """One rule; a user has one for each resource, effect and tier."""

    user: str
    resource: Pattern
    effect: Effect
    #: Some of ACTIONS, in their order.
    actions: tuple[Action, ...]
    #: Where the call must come from; none: from anywhere.
    sources: tuple[Network, ...] = ()
    tier: Tier = "custom"

    @property
    def key(self) -> tuple[str, str, Effect, Tier]:
        """What a policy replaces when it is put."""
        return self.user, str(self.resource), self.effect, self.tier

    def covers(self, action: Action, address: str) -> bool:
        """Whether it speaks of this action from there; "" is an address nobody knows."""
        if action not in self.actions:
            return False
        if not self.sources:
            return True
        if not address:
            # In doubt a rule that forbids counts, and one that allows does not.
            return self.effect == "deny"
        source = ip_address(address)
        return any(source in network for network in self.sources)

    def describe(self) -> dict[str, Any]:
        """Its fields as text and lists of text; also what the file has."""
        return {
            "user": self.user,
            "resource": str(self.resource),
            "effect": self.effect,
            "actions": list(self.actions),
            "sources": [str(network) for network in self.sources],
            "tier": self.tier,
        }

    @classmethod
    def make(
        cls,
        user: str,
        *,
        resource: str,
        effect: str,
        actions: Iterable[str],
        sources: Iterable[str] = (),
        tier: str = "custom",
    ) -> Self:
        """A policy of what people write, and of what ``describe`` gave.

        Raises:
            RequestError: a part of it is not what it must be.
        """
        if effect not in EFFECTS:
            raise RequestError(f"An effect is one of {', '.join(EFFECTS)}, not {effect!r}.")
        if tier not in TIERS:
            raise RequestError(f"A tier is one of {', '.join(TIERS)}, not {tier!r}.")
        pattern = Pattern.parse(resource)
        return cls(user, pattern, effect, _actions(actions), networks(_several(sources)), tier)


def _several(given: Iterable[str]) -> Iterable[str]:
    """One text is taken for a list of it, as people write it."""
    return [given] if isinstance(given, str) else given


def _actions(given: Iterable[str]) -> tuple[Action, ...]:
    names = {name.strip().lower() for name in _several(given)}
    known = {ALL, "any", *ACTIONS}
    if not names or names - known:
        odd = ", ".join(sorted(names - known)) or "nothing"
        raise RequestError(f"Actions are all, or some of {', '.join(ACTIONS)}; {odd} is not.")
    return tuple(a for a in ACTIONS if a in names or names & {ALL, "any"})
