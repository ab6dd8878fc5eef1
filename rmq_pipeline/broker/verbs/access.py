"""Verbs: users and policies."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.access.policy import ACTIONS, TYPES, Policy, Resource
from rmq_pipeline.access.rights import SUPER
from rmq_pipeline.access.source import networks
from rmq_pipeline.access.users import new_password
from rmq_pipeline.broker.decide.transaction import TargetsOf
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work.settle import receipts_of
from rmq_pipeline.errors import NotFoundError, RequestError
from rmq_pipeline.verb import Receipts

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
    """Verbs for users and policies."""

    @verb(rights=SUPER)
    def create_user(
        self, name: str, *, password: str | None = None, type: str = "normal"
    ) -> dict[str, Any]:
        """Create a user; with the first user access control is on.

        Args:
            name: name of the user.
            password: None: the broker makes one and returns it this once.
            type: normal (policies allow things), or super (allowed everything).

        Returns:
            The user's fields, and ``password`` if the broker made it.

        Raises:
            AlreadyExistsError: a user of this name exists.
        """
        secret = new_password() if password is None else password
        user = self._engine.access.create_user(name, secret=secret, type=type)
        return _described(user.describe(), secret if password is None else None)

    @verb(rights=SUPER)
    def alter_user(
        self,
        name: str,
        *,
        password: str | None = None,
        renew_password: bool = False,
        type: str | None = None,
        disabled: bool | None = None,
    ) -> dict[str, Any]:
        """Change the given fields of a user; tokens issued for an older password end.

        Args:
            name: name of the user.
            password: new password.
            renew_password: let the broker make a password and return it this once.
            type: normal or super.
            disabled: True refuses the user.

        Returns:
            The user's fields, and ``password`` if the broker made it.

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

    @verb(rights=SUPER)
    def delete_user(self, name: str) -> dict[str, Any]:
        """Delete a user and its policies; without users everything is allowed.

        Returns:
            {"policies": number of deleted policies}.

        Raises:
            NotFoundError: there is no such user.
            InUseError: it is the last user, and an endpoint listens beyond loopback.
        """
        return {"policies": self._engine.access.delete_user(name)}

    @verb(rights=SUPER, repeatable=True, on_standby=True)
    def list_users(self) -> pa.Table:
        """Return name, type, disabled, created_at_ms and altered_at_ms of all users."""
        users = self._engine.access.rules.users
        return pa.Table.from_pylist([users[name].describe() for name in sorted(users)], USERS)

    @verb(rights=SUPER, repeatable=True)
    def put_policy(
        self,
        user: str,
        *,
        resource: str,
        actions: str | Sequence[str],
        effect: str = "allow",
        sources: str | Sequence[str] = (),
        tier: str = "custom",
    ) -> dict[str, Any]:
        """Allow or deny a user something; replaces its policy of this resource, effect and tier.

        Args:
            user: name of the user.
            resource: topic:NAME, group:NAME, namespace:NAME or cluster:NAME; NAME may end with a
                star or be one; * alone is everything.
            actions: some of pub, sub, create, update, delete, get, list; or all.
            effect: allow or deny.
            sources: addresses and CIDR blocks of callers that the policy applies to; none: all
                callers.
            tier: custom, or default, which applies only where no custom policy matches.

        Returns:
            The policy's fields.

        Raises:
            NotFoundError: there is no such user.
        """
        policy = Policy.make(
            user, resource=resource, effect=effect, actions=actions, sources=sources, tier=tier
        )
        self._engine.access.put_policy(policy)
        return policy.describe()

    @verb(rights=SUPER)
    def delete_policy(
        self, user: str, *, resource: str, effect: str | None = None, tier: str | None = None
    ) -> dict[str, Any]:
        """Delete a user's policies of a resource, all or those of one effect or tier.

        Returns:
            {"deleted": number of policies}.

        Raises:
            NotFoundError: there is no such policy, or no such user.
        """
        gone = self._engine.access.delete_policies(
            user,
            where=lambda policy: (
                str(policy.resource) == resource
                and effect in {None, policy.effect}
                and tier in {None, policy.tier}
            ),
        )
        if not gone:
            raise NotFoundError(f"User {user} has no such policy for {resource}.")
        return {"deleted": len(gone)}

    @verb(rights=SUPER, repeatable=True, on_standby=True)
    def list_policies(self, user: str | None = None) -> pa.Table:
        """Return policies (user, resource, effect, actions, sources, tier) of a user, or all."""
        rows = [each.describe() for each in self._engine.access.rules.listed()]
        return pa.Table.from_pylist([r for r in rows if user in {None, r["user"]}], POLICIES)

    @verb(rights=SUPER, repeatable=True, on_standby=True)
    def explain_access(
        self, user: str, *, resource: str, action: str, source: str = ""
    ) -> dict[str, Any]:
        """Explain which policy allows or denies an action.

        Args:
            user: name of the user.
            resource: TYPE:NAME of one thing.
            action: the action that the user would do.
            source: IP address of the call.

        Returns:
            {"allowed", "because", "policy"}: the policy's fields, or None.

        Raises:
            NotFoundError: there is no such user.
        """
        type_, _, name = resource.partition(":")
        if type_ not in TYPES or not name:
            raise RequestError(f"{resource!r} is not TYPE:NAME with one of {', '.join(TYPES)}.")
        if action not in ACTIONS:
            raise RequestError(f"{action!r} is not one of {', '.join(ACTIONS)}.")
        address = str(networks([source])[0].network_address) if source else ""
        asked = Resource(type_, name)
        decision = self._engine.access.explain(user, resource=asked, action=action, address=address)
        policy = decision.policy.describe() if decision.policy else None
        return {"allowed": decision.allowed, "because": decision.because, "policy": policy}

    def deliveries_of(self, receipts: Receipts) -> set[tuple[str, str]]:
        """Return consumer group and topic of these deliveries, for an endpoint that checks rights.

        Deliveries that no longer exist are left out: settling them is refused in any case.
        """
        found = receipts_of(receipts)
        state = self._engine.state
        pairs = set(zip(found.group_id.tolist(), found.topic_id.tolist(), strict=True))
        named = [(state.groups.get(group), state.topics.get(topic)) for group, topic in pairs]
        return {(group.name, topic.topic.name) for group, topic in named if group and topic}

    def transactions_of(self, resolutions: pa.Table) -> set[str]:
        """Return the topics of these transactions' half messages, without those that have ended."""
        topics: set[str] = self._engine.submit(TargetsOf(resolutions))
        return topics


def _described(fields: dict[str, Any], password: str | None) -> dict[str, Any]:
    return fields if password is None else {**fields, "password": password}
