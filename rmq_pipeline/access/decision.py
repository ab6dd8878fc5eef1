"""Whether a user's policies let it do something."""

from collections.abc import Iterable
from dataclasses import dataclass

from rmq_pipeline.access.policy import TIERS, Policy
from rmq_pipeline.access.resource import Action, Resource


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes or no, and why."""

    allowed: bool
    because: str
    #: That decided it, if one did.
    policy: Policy | None = None


def decide(
    policies: Iterable[Policy], *, resource: Resource, action: Action, address: str
) -> Verdict:
    """What these policies of one user say.

    The nearest policy that fits decides (``Pattern.rank``); of two that are as near, the one that
    forbids. Where a custom policy fits, the default ones do not count. Without one that fits: no.

    Args:
        address: where the call comes from; "" where nobody knows.

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
