"""Decision of a user's policies on a call."""

from collections.abc import Iterable
from dataclasses import dataclass

from rmq_pipeline.access.policy import TIERS, Policy
from rmq_pipeline.access.resource import Action, Resource


@dataclass(frozen=True, slots=True)
class Verdict:
    """Access decision, with its reason."""

    allowed: bool
    because: str
    #: Deciding policy; None if no policy applied.
    policy: Policy | None = None


def decide(
    policies: Iterable[Policy], *, resource: Resource, action: Action, address: str
) -> Verdict:
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
        return Verdict(nearest.effect == "allow", because, nearest)
    return Verdict(False, "no policy allows it")
