"""Who may do what: every rule of the nearest policy, and ties."""

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.access.policy import (
    ACTIONS,
    CLUSTER_ITSELF,
    Action,
    Pattern,
    Policy,
    Resource,
    decide,
)
from rmq_pipeline.errors import RequestError
from rmq_pipeline.topic import GIVEN_UP_TOPIC, HALF_TOPIC

ORDERS = Resource("topic", "orders")


def policy(
    resource: str, effect: str = "allow", actions: str = "all", *sources: str, tier: str = "custom"
) -> Policy:
    return Policy.make(
        "ann",
        resource=resource,
        effect=effect,
        actions=actions.split(","),
        sources=sources,
        tier=tier,
    )


def allowed(
    *policies: Policy, resource: Resource = ORDERS, action: Action = "pub", address: str = ""
) -> bool:
    """What they decide, in whatever order they were made."""
    decisions = {
        decide(order, resource=resource, action=action, address=address).allowed
        for order in permutations(policies)
    }
    assert len(decisions) == 1, "the order of the policies decides"
    return decisions.pop()


def test_what_no_policy_allows_is_refused() -> None:
    assert not allowed()
    assert not allowed(policy("topic:others"), policy("group:orders"))


@pytest.mark.parametrize(
    ("written", "resource", "fits"),
    [
        ("*", ORDERS, True),
        ("*", Resource("group", "g"), True),
        ("*", CLUSTER_ITSELF, True),
        ("topic:*", ORDERS, True),
        ("topic:*", Resource("group", "orders"), False),
        ("topic:orders", ORDERS, True),
        ("TOPIC:orders", ORDERS, True),
        ("topic:order", ORDERS, False),
        ("topic:ord*", ORDERS, True),
        ("topic:orders*", ORDERS, True),
        ("topic:ordersx*", ORDERS, False),
        ("group:*", Resource("group", "billing"), True),
        ("cluster:DefaultCluster", CLUSTER_ITSELF, True),
        ("cluster:Other", CLUSTER_ITSELF, False),
        # A namespace: all topics and groups in it.
        ("namespace:shop", Resource("topic", "shop%orders"), True),
        ("namespace:shop", Resource("group", "shop%billing"), True),
        ("namespace:shop", Resource("namespace", "shop"), True),
        ("namespace:shop", Resource("topic", "shop-orders"), False),
        ("namespace:shop", Resource("topic", "shopping%orders"), False),
        ("namespace:sh*", Resource("topic", "shop%orders"), True),
        ("namespace:*", Resource("topic", "shop%orders"), True),
        ("namespace:*", CLUSTER_ITSELF, False),
        ("namespace:", ORDERS, True),
        ("namespace:", Resource("topic", "shop%orders"), False),
        # The stored name has the namespace in front.
        ("topic:orders", Resource("topic", "shop%orders"), False),
        ("topic:shop%*", Resource("topic", "shop%orders"), True),
    ],
)
def test_which_resources_a_policy_speaks_of(written: str, resource: Resource, fits: bool) -> None:
    assert Pattern.parse(written).fits(resource) is fits
    assert allowed(policy(written), resource=resource) is fits


#: From the nearest to the farthest, for topic shop%orders.
NEAREST = [
    "topic:shop%orders",
    "topic:shop%ord*",
    "topic:shop%*",
    "topic:s*",
    "topic:*",
    "namespace:shop",
    "namespace:sh*",
    "namespace:s*",
    "namespace:*",
    "*",
]


@pytest.mark.parametrize("near", range(len(NEAREST)))
def test_the_nearest_policy_decides(near: int) -> None:
    resource = Resource("topic", "shop%orders")
    for far in range(near + 1, len(NEAREST)):
        for effect, other in (("allow", "deny"), ("deny", "allow")):
            ours, theirs = policy(NEAREST[near], effect), policy(NEAREST[far], other)

            assert allowed(ours, theirs, resource=resource) is (effect == "allow")


@pytest.mark.parametrize("written", NEAREST)
def test_of_two_as_near_the_one_that_denies_wins(written: str) -> None:
    resource = Resource("topic", "shop%orders")

    assert not allowed(policy(written), policy(written, "deny"), resource=resource)


def test_a_policy_speaks_of_its_actions_only() -> None:
    near_deny, far_allow = policy("topic:orders", "deny", "sub"), policy("topic:*", "allow", "pub")

    assert allowed(near_deny, far_allow, action="pub")
    assert not allowed(near_deny, far_allow, action="sub")
    assert not allowed(near_deny, far_allow, action="delete")


def test_default_policies_count_where_no_custom_one_fits() -> None:
    default = policy("topic:orders", "allow", tier="default")

    assert allowed(default)
    assert not allowed(default, policy("*", "deny"))
    assert allowed(default, policy("*", "deny", "sub"))
    assert allowed(policy("topic:orders", "deny", tier="default"), policy("*"))


@pytest.mark.parametrize(
    ("sources", "address", "counts"),
    [
        (["10.1.0.0/16"], "10.1.2.3", True),
        (["10.1.0.0/16"], "10.2.2.3", False),
        (["10.1.2.3"], "10.1.2.3", True),
        (["10.1.2.3"], "10.1.2.4", False),
        (["10.0.0.0/8", "::1"], "::1", True),
        (["fd00::/8"], "fd12::1", True),
        (["fd00::/8"], "10.1.2.3", False),
        (["0.0.0.0/0"], "10.1.2.3", True),
        (["0.0.0.0/0"], "::1", False),
        # Host bits may be set, as people write it.
        (["10.1.2.3/16"], "10.1.99.99", True),
    ],
)
def test_source_addresses(sources: list[str], address: str, counts: bool) -> None:
    assert allowed(policy("topic:orders", "allow", "pub", *sources), address=address) is counts

    denied = policy("topic:orders", "deny", "pub", *sources)
    assert allowed(denied, policy("topic:*"), address=address) is not counts


def test_one_source_as_a_text_is_a_source() -> None:
    found = Policy.make(
        "ann", resource="topic:orders", effect="allow", actions="pub", sources="10.1.0.0/16"
    )

    assert allowed(found, address="10.1.2.3")
    assert not allowed(found, address="8.8.8.8")


def test_from_an_unknown_address_only_deny_policies_count() -> None:
    allowing = policy("topic:orders", "allow", "pub", "10.0.0.0/8")
    denying = policy("topic:orders", "deny", "pub", "10.0.0.0/8")

    assert not allowed(allowing, address="")
    assert not allowed(denying, policy("*"), address="")


@pytest.mark.parametrize(
    "written",
    ["", "orders", "topic", "topic:", "queue:a", "topic:a*b", "topic:**", "topic:a\n", ":a"],
)
def test_what_is_no_resource_is_refused(written: str) -> None:
    with pytest.raises(RequestError):
        Pattern.parse(written)


@pytest.mark.parametrize(
    "wrong",
    [
        {"actions": ["fly"]},
        {"actions": []},
        {"effect": "maybe"},
        {"tier": "third"},
        {"sources": ["10.0.0.0/33"]},
        {"sources": ["example.org"]},
    ],
    ids=str,
)
def test_what_is_no_policy_is_refused(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"resource": "topic:a", "effect": "allow", "actions": ["pub"]}

    with pytest.raises(RequestError):
        Policy.make("ann", **(right | wrong))  # type: ignore[arg-type]


def test_all_actions_are_each_of_them() -> None:
    assert policy("*", "allow", "all").actions == ACTIONS
    assert policy("*", "allow", "Any").actions == ACTIONS
    assert policy("*", "allow", "sub, Pub").actions == ("pub", "sub")


def test_dead_letters_and_retries_are_their_groups() -> None:
    assert Resource("topic", "%DLQ%billing").owner == Resource("group", "billing")
    assert Resource("topic", "%RETRY%shop%billing").owner == Resource("group", "shop%billing")
    assert Resource("topic", "%DLQ%shop%billing").owner.namespace == "shop"
    assert ORDERS.owner == ORDERS


def test_what_lies_in_system_topics_is_of_every_topic() -> None:
    halves = Resource("topic", HALF_TOPIC).owner

    assert halves == Resource("topic", GIVEN_UP_TOPIC).owner == CLUSTER_ITSELF
    assert not allowed(policy("topic:*"), resource=halves, action="sub")
    assert allowed(policy("cluster:*"), resource=halves, action="sub")


RESOURCES = ["*", "topic:*", "topic:a*", "topic:ab", "topic:ab*", "namespace:*", "namespace:"]
POLICIES = [
    policy(resource, effect, actions, tier=tier)
    for resource, effect, actions, tier in product(
        RESOURCES, ("allow", "deny"), ("pub", "all"), ("custom", "default")
    )
]


def of(policies: list[Policy], kind: str) -> list[Policy]:
    return [policy for policy in policies if policy.resource.type == kind]


def by(policies: list[Policy], kind: str) -> list[Policy]:
    return [policy for policy in policies if policy.resource.kind == kind]


def plainly(policies: list[Policy], name: str, action: Action) -> bool:
    """The rules of the specification, said once more: one question after the other."""
    resource = Resource("topic", name)
    for tier in ("custom", "default"):
        left = [p for p in policies if p.tier == tier and action in p.actions]
        left = [p for p in left if p.resource.fits(resource)]
        if not left:
            continue
        near = next(found for kind in ("topic", "namespace", "any") if (found := of(left, kind)))
        nearer = next(found for kind in ("literal", "prefixed", "any") if (found := by(near, kind)))
        longest = max(len(p.resource.name) for p in nearer)
        nearest = [p for p in nearer if len(p.resource.name) == longest]
        return all(p.effect == "allow" for p in nearest)
    return False


@given(
    policies=st.lists(st.sampled_from(POLICIES), max_size=6),
    name=st.sampled_from(["ab", "abc", "b", "n%ab"]),
    action=st.sampled_from(["pub", "sub"]),
)
def test_decides_as_the_specification_says(
    policies: list[Policy], name: str, action: Action
) -> None:
    decision = decide(policies, resource=Resource("topic", name), action=action, address="")

    assert decision.allowed is plainly(policies, name, action)
    assert (decision.policy is None) == (not decision.allowed and "no policy" in decision.because)
