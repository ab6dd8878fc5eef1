"""Users and policies, from another process."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline.flight.calls import Calls


class AccessControl(Calls):
    """Who may do what at the doors; for super users, and for whoever can read the home."""

    def create_user(
        self, name: str, *, password: str | None = None, type: str = "normal"
    ) -> dict[str, Any]:
        """Create a user; with the first one, access control is on.

        Args:
            password: made when left out, and told this once.
            type: normal, whom policies let do things, or super, who may do everything.

        Returns:
            its fields, and ``password`` if the broker made it.

        Raises:
            AlreadyExistsError: there is one of this name.
        """
        return self._facts("create_user", name=name, password=password, type=type)

    def alter_user(
        self,
        name: str,
        *,
        password: str | None = None,
        renew_password: bool = False,
        type: str | None = None,
        disabled: bool | None = None,
    ) -> dict[str, Any]:
        """Change what is given of a user; its fields, and ``password`` if the broker made one.

        Args:
            renew_password: have one made, and told this once.

        Raises:
            NotFoundError: there is no such user.
        """
        return self._facts(
            "alter_user",
            name=name,
            password=password,
            renew_password=renew_password,
            type=type,
            disabled=disabled,
        )

    def delete_user(self, name: str) -> dict[str, Any]:
        """Delete a user and its policies; {"policies": how many}. Without users all is open.

        Raises:
            NotFoundError: there is no such user.
            InUseError: it is the last one, and a door listens beyond loopback.
        """
        return self._facts("delete_user", name=name)

    def list_users(self) -> pa.Table:
        """name, type, disabled, created_at_ms, altered_at_ms; never a password."""
        return self._table("list_users")

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
        return self._facts(
            "put_policy",
            user=user,
            resource=resource,
            actions=_several(actions),
            effect=effect,
            sources=_several(sources),
            tier=tier,
        )

    def delete_policy(
        self, user: str, *, resource: str, effect: str | None = None, tier: str | None = None
    ) -> dict[str, Any]:
        """Delete a user's policies of a resource, all or those of one effect or tier.

        Returns:
            {"deleted": how many}.

        Raises:
            NotFoundError: there is none, or no such user.
        """
        return self._facts("delete_policy", user=user, resource=resource, effect=effect, tier=tier)

    def list_policies(self, user: str | None = None) -> pa.Table:
        """user, resource, effect, actions, sources, tier; of one user, or of all."""
        return self._table("list_policies", user=user)

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
        return self._facts(
            "explain_access", user=user, resource=resource, action=action, source=source
        )


def _several(texts: Sequence[str]) -> list[str]:
    """One text is a list of one, as it is for the broker itself."""
    return [texts] if isinstance(texts, str) else list(texts)
