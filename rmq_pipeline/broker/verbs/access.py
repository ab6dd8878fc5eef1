"""Users and policies: who may do what at the doors."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.access.policy import Policy
from rmq_pipeline.access.resource import ACTIONS, TYPES, Resource
from rmq_pipeline.access.source import networks
from rmq_pipeline.access.user import new_password
from rmq_pipeline.broker.settling.settling import receipts_of
from rmq_pipeline.broker.transactions.targets import TargetsOf
from rmq_pipeline.broker.verbs.opened import Opened
from rmq_pipeline.errors import NotFoundError, RequestError

USERS = pa.schema(
    [
        ("name", pa.string()),
        ("type", pa.string()),
        ("disabled", pa.bool_()),
        ("created_at_ms", pa.int64()),
        ("altered_at_ms", pa.int64()),
    ]
)
POLICIES = pa.schema(
    [
        ("user", pa.string()),
        ("resource", pa.string()),
        ("effect", pa.string()),
        ("actions", pa.list_(pa.string())),
        ("sources", pa.list_(pa.string())),
        ("tier", pa.string()),
    ]
)


class AccessControl(Opened):
    """Who may do what; the doors ask ``access``, callers in this process may do everything."""

    def create_user(
        self, name: str, *, password: str | None = None, type: str = "normal"
    ) -> dict[str, Any]:
        """Create a user; with the first one, access control is on.

        Args:
            password: made when left out, and told this once.
            type: normal, whom policies let do things, or super, who may do everything.

        Returns:
            its fields, and ``password`` if it was made here.

        Raises:
            AlreadyExistsError: there is one of this name.
        """
        secret = new_password() if password is None else password
        user = self._engine.access.create_user(name, secret=secret, type=type)
        return _described(user.describe(), secret if password is None else None)

    def alter_user(
        self,
        name: str,
        *,
        password: str | None = None,
        renew_password: bool = False,
        type: str | None = None,
        disabled: bool | None = None,
    ) -> dict[str, Any]:
        """Change what is given of a user; tokens bought with an older password end.

        Args:
            renew_password: make a new one, and tell it this once.

        Raises:
            NotFoundError: there is no such user.
        """
        if renew_password and password is not None:
            raise RequestError("Give a password, or have one made.")
        made = new_password() if renew_password else None
        changes = {"secret": made or password, "type": type, "disabled": disabled}
        given = {field: value for field, value in changes.items() if value is not None}
        user = self._engine.access.alter_user(name, **given)
        return _described(user.describe(), made)

    def delete_user(self, name: str) -> dict[str, Any]:
        """Delete a user and its policies; {"policies": how many}. Without users all is open.

        Raises:
            NotFoundError: there is no such user.
            InUseError: it is the last one, and a door listens beyond loopback.
        """
        return {"policies": self._engine.access.delete_user(name)}

    def list_users(self) -> pa.Table:
        """name, type, disabled, created_at_ms, altered_at_ms; never a password."""
        users = self._engine.access.rules.users
        return pa.Table.from_pylist([users[name].describe() for name in sorted(users)], USERS)

    def put_policy(
        self,
        user: str,
        *,
        resource: str,
        actions: Sequence[str],
        effect: str = "allow",
        sources: Sequence[str] = (),
        tier: str = "custom",
    ) -> dict[str, Any]:
        """Allow or deny a user something; replaces its policy of this resource, effect and tier.

        Args:
            resource: topic:NAME, group:NAME, namespace:NAME or cluster:NAME; NAME may end with a
                star, or be one; * alone is everything.
            actions: some of pub, sub, create, update, delete, get, list; or all.
            sources: addresses and CIDR blocks that it counts for; none: it counts for all.
            tier: custom, or default: counts only where no custom one fits.

        Raises:
            NotFoundError: there is no such user.
        """
        policy = Policy.make(
            user, resource=resource, effect=effect, actions=actions, sources=sources, tier=tier
        )
        self._engine.access.put_policy(policy)
        return policy.describe()

    def delete_policy(
        self, user: str, *, resource: str, effect: str | None = None, tier: str | None = None
    ) -> dict[str, Any]:
        """Delete a user's policies of a resource, all of them or those of one effect or tier.

        Returns:
            {"deleted": how many}.

        Raises:
            NotFoundError: there is none, or no such user.
        """
        gone = self._engine.access.delete_policies(
            user,
            doomed=lambda policy: (
                str(policy.resource) == resource
                and effect in {None, policy.effect}
                and tier in {None, policy.tier}
            ),
        )
        if not gone:
            raise NotFoundError(f"User {user} has no such policy of {resource}.")
        return {"deleted": len(gone)}

    def list_policies(self, user: str | None = None) -> pa.Table:
        """user, resource, effect, actions, sources, tier; of one user, or of all."""
        rows = [each.describe() for each in self._engine.access.rules.listed()]
        return pa.Table.from_pylist([r for r in rows if user in {None, r["user"]}], POLICIES)

    def explain_access(
        self, user: str, *, resource: str, action: str, source: str = ""
    ) -> dict[str, Any]:
        """Whether a user may do something, and which policy decides it.

        Args:
            resource: TYPE:NAME of one thing.
            source: the IP address the call comes from.

        Returns:
            {"allowed", "because", "policy"}: the policy's fields, or None.

        Raises:
            NotFoundError: there is no such user.
        """
        type_, _, name = resource.partition(":")
        if type_ not in TYPES or not name:
            raise RequestError(f"{resource!r} is not TYPE:NAME with one of {', '.join(TYPES)}.")
        if action not in ACTIONS:
            raise RequestError(f"{action!r} is none of {', '.join(ACTIONS)}.")
        address = str(networks([source])[0].network_address) if source else ""
        asked = Resource(type_, name)
        verdict = self._engine.access.explain(user, resource=asked, action=action, address=address)
        policy = verdict.policy.describe() if verdict.policy else None
        return {"allowed": verdict.allowed, "because": verdict.because, "policy": policy}

    def deliveries_of(self, receipts: pa.Table | Sequence[str]) -> set[tuple[str, str]]:
        """Consumer group and topic of these deliveries; a door asks whether both may be settled.

        Those that are no more are left out: to settle them is refused anyhow.
        """
        found = receipts_of(receipts)
        state = self._engine.state
        pairs = set(zip(found.group_id.tolist(), found.topic_id.tolist(), strict=True))
        named = [(state.groups.get(group), state.topics.get(topic)) for group, topic in pairs]
        return {(group.name, topic.topic.name) for group, topic in named if group and topic}

    def transactions_of(self, resolutions: pa.Table) -> set[str]:
        """The topics that the half messages of these transactions are for, of those still open."""
        topics: set[str] = self._engine.submit(TargetsOf(resolutions))
        return topics


def _described(fields: dict[str, Any], password: str | None) -> dict[str, Any]:
    return fields if password is None else {**fields, "password": password}
