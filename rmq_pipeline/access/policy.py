"""Resources, policies that allow or deny a user's actions on them, and the decision on a call."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline.access.source import Network, networks
from rmq_pipeline.errors import RequestError
from rmq_pipeline.topic import DLQ_PREFIX, RETRY_PREFIX, is_system

ResourceType = Literal["topic", "group", "namespace", "cluster"]
Action = Literal["pub", "sub", "create", "update", "delete", "get", "list"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
TYPES: Final[tuple[ResourceType, ...]] = get_args(ResourceType)
#: Name of the broker's only cluster.
CLUSTER: Final = "DefaultCluster"
_ANY: Final = "any"
_STAR: Final = "*"
_NAME_LENGTH: Final = 255


@dataclass(frozen=True, slots=True)
class Resource:
    """Object of a call. The name is the stored one, ``<namespace>%<name>``."""

    type: ResourceType
    name: str

    @property
    def owner(self) -> "Resource":
        """Resource whose policies apply.

        For a dead-letter or retry topic this is its consumer group. For a system topic it is the
        cluster, because system topics contain messages of all topics.
        """
        if self.type == "topic":
            if is_system(self.name):
                return CLUSTER_ITSELF
            for prefix in (DLQ_PREFIX, RETRY_PREFIX):
                if self.name.startswith(prefix):
                    return Resource("group", self.name.removeprefix(prefix))
        return self

    @property
    def namespace(self) -> str | None:
        """Namespace of the resource; "" outside any namespace, None for a cluster."""
        if self.type == "namespace":
            return self.name
        if self.type == "cluster":
            return None
        namespace, separator, _ = self.name.partition("%")
        return namespace if separator else ""

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


CLUSTER_ITSELF: Final = Resource("cluster", CLUSTER)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Pattern of resources, such as ``topic:orders``, ``group:bill*``, ``topic:*`` or ``*``."""

    #: A ResourceType, or "any" for all types.
    type: str
    kind: Literal["literal", "prefixed", "any"]
    #: Name or prefix, without the star; empty for kind "any".
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a pattern; a star at the end makes the name a prefix.

        Raises:
            RequestError: the pattern is malformed.
        """
        if text == _STAR:
            return cls(_ANY, "any")
        type_, colon, name = text.partition(":")
        type_ = type_.lower()
        if not colon or type_ not in TYPES:
            raise RequestError(
                f"{text!r} is not a resource pattern.",
                remedy="Write TYPE:NAME, TYPE:PREFIX*, TYPE:* or *, with one of the types "
                f"{', '.join(TYPES)}.",
            )
        if name == _STAR:
            return cls(type_, "any")
        prefix = name.removesuffix(_STAR)
        # Resources outside any namespace are in the namespace with the empty name.
        is_blank = not name and type_ != "namespace"
        if is_blank or _STAR in prefix or len(name) > _NAME_LENGTH or not name.isprintable():
            raise RequestError(
                f"{name!r} is not a name of a {type_}.",
                remedy=f"Use 1 to {_NAME_LENGTH} printable characters; a star may end the name.",
            )
        return cls(type_, "prefixed" if name != prefix else "literal", prefix)

    def __str__(self) -> str:
        if self.type == _ANY:
            return _STAR
        return f"{self.type}:{self.name}{'' if self.kind == 'literal' else _STAR}"

    def fits(self, resource: Resource) -> bool:
        """Return True if the pattern matches; a namespace matches its topics and groups too."""
        if self.type == _ANY:
            return True
        if self.type == resource.type:
            return self._fits_name(resource.name)
        if self.type != "namespace" or resource.namespace is None:
            return False
        return self._fits_name(resource.namespace)

    def _fits_name(self, name: str) -> bool:
        if self.kind == "any":
            return True
        return name == self.name if self.kind == "literal" else name.startswith(self.name)

    def rank(self, resource: Resource) -> tuple[int, int, int]:
        """Return the specificity for a matching resource; the smallest is the most specific.

        The resource's own type precedes its namespace, and the namespace precedes any type. Then
        a literal name precedes a prefix, and a prefix precedes any name. Longer prefixes precede
        shorter ones.
        """
        of_type = 0 if self.type == resource.type else 2 if self.type == _ANY else 1
        return of_type, ("literal", "prefixed", "any").index(self.kind), -len(self.name)


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


@dataclass(frozen=True, slots=True)
class Decision:
    """Access decision, with its reason."""

    allowed: bool
    because: str
    #: Deciding policy; None if no policy applied.
    policy: Policy | None = None


def decide(
    policies: Iterable[Policy], *, resource: Resource, action: Action, address: str
) -> Decision:
    """Decide whether a user's policies allow an action on a resource.

    Access is denied unless a policy allows it. The most specific policy wins (``Pattern.rank``);
    on a tie, deny wins. Default policies count only if no custom policy applies.

    Args:
        policies: the policies of one user.
        resource: the object of the call.
        action: the requested action.
        address: the caller's IP address; "" if unknown.

    Source: semantics §11.
    """
    fitting = [
        each for each in policies if each.resource.fits(resource) and each.covers(action, address)
    ]
    for tier in TIERS:
        of_tier = [each for each in fitting if each.tier == tier]
        if not of_tier:
            continue
        nearest = min(of_tier, key=lambda p: (p.resource.rank(resource), p.effect == "allow"))
        verb = "allows" if nearest.effect == "allow" else "denies"
        because = f"the policy on {nearest.resource} {verb} it"
        return Decision(nearest.effect == "allow", because, nearest)
    return Decision(False, "no policy allows it")
