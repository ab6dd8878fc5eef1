"""Policies: allow or deny a user's actions on resources."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline.access.resource import ACTIONS, Action, Pattern
from rmq_pipeline.access.source import Network, networks
from rmq_pipeline.errors import RequestError

Effect = Literal["allow", "deny"]
EFFECTS: Final[tuple[Effect, ...]] = get_args(Effect)
#: Default policies count only if no custom policy applies.
Tier = Literal["custom", "default"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rule for a user; at most one per resource pattern, effect and tier."""

    user: str
    resource: Pattern
    effect: Effect
    #: Subset of ACTIONS, in the order of ACTIONS.
    actions: tuple[Action, ...]
    #: Networks of the caller; empty: any address.
    sources: tuple[Network, ...] = ()
    tier: Tier = "custom"

    @property
    def key(self) -> tuple[str, str, Effect, Tier]:
        """Identity of the policy: a new policy replaces the one with the same key."""
        return self.user, str(self.resource), self.effect, self.tier

    def covers(self, action: Action, address: str) -> bool:
        """Return True if the policy applies to the action from an address; "" if unknown."""
        if action not in self.actions:
            return False
        if not self.sources:
            return True
        if not address:
            # For an unknown address, deny policies apply and allow policies do not.
            return self.effect == "deny"
        source = ip_address(address)
        return any(source in network for network in self.sources)

    def describe(self) -> dict[str, Any]:
        """Return the fields as strings and lists of strings, as the access file stores them."""
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
        """Build a policy from user input or from the result of ``describe``.

        Args:
            user: the name of the user.
            resource: a pattern, see ``Pattern.parse``.
            effect: "allow" or "deny".
            actions: names of ACTIONS, or "all"; a single string is one name.
            sources: IP addresses and CIDR blocks; empty: any address.
            tier: "custom" or "default".

        Raises:
            RequestError: a value is invalid.
        """
        if effect not in EFFECTS:
            raise RequestError(
                f"The effect {effect!r} is unknown.", remedy=f"Use one of {', '.join(EFFECTS)}."
            )
        if tier not in TIERS:
            raise RequestError(
                f"The tier {tier!r} is unknown.", remedy=f"Use one of {', '.join(TIERS)}."
            )
        pattern = Pattern.parse(resource)
        return cls(user, pattern, effect, _actions(actions), networks(_several(sources)), tier)


def _several(given: Iterable[str]) -> Iterable[str]:
    """Return the items; a single string is one item."""
    return [given] if isinstance(given, str) else given


def _actions(given: Iterable[str]) -> tuple[Action, ...]:
    names = {name.strip().lower() for name in _several(given)}
    known = {ALL, "any", *ACTIONS}
    if not names or names - known:
        unknown = ", ".join(sorted(names - known))
        raise RequestError(
            f"Unknown actions: {unknown}." if unknown else "The policy has no actions.",
            remedy=f"Use all, or some of {', '.join(ACTIONS)}.",
        )
    return tuple(a for a in ACTIONS if a in names or names & {ALL, "any"})
