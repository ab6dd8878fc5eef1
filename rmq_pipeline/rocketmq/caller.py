"""The caller of an RPC, as the call's metadata describe it."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rmq_pipeline.access.users import Principal
from rmq_pipeline.errors import ClientIdRequiredError
from rmq_pipeline.topic import DLQ_PREFIX, RETRY_PREFIX


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call."""

    #: The client id, which stays the same while the client runs.
    client_id: str
    #: The x-mq-language header. Node sends HTTP there; its settings name the real language.
    language: str
    #: The namespace of resources that name none.
    namespace: str
    #: None: access control is off.
    user: Principal | None
    #: gRPC's context of the call.
    call: Any

    @property
    def peer(self) -> str:
        """The caller's address without the port."""
        kind, _, rest = unquote(self.call.peer()).partition(":")
        return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else rest

    def remaining_ms(self) -> int | None:
        """Return the time until the call's deadline, in ms; None without a deadline."""
        remaining = self.call.time_remaining()
        return None if remaining is None else int(remaining * 1000)

    def named(self, resource: Any) -> str:
        """Return the broker's name of a topic or a group: ``namespace%name`` in a namespace.

        A group's own topics carry the group's whole name: ``%DLQ%namespace%group``. An empty name
        stays empty.
        """
        name = str(resource.name)
        namespace = resource.resource_namespace or self.namespace
        if not (namespace and name):  # an empty name stays empty in a namespace, too
            return name
        for prefix in (DLQ_PREFIX, RETRY_PREFIX):
            if name.startswith(prefix):
                return f"{prefix}{namespace}%{name.removeprefix(prefix)}"
        return f"{namespace}%{name}"


def metadata_of(call: Any) -> dict[str, str]:
    """Return the text metadata of a call; of a repeated key, the last value."""
    return {key: value for key, value in call.invocation_metadata() if isinstance(value, str)}


def caller_of(call: Any, metadata: dict[str, str], *, user: Principal | None) -> Caller:
    """Return the caller of a call.

    Raises:
        ClientIdRequiredError: the metadata have no x-mq-client-id.
    """
    client_id = metadata.get("x-mq-client-id", "").strip()
    if not client_id:
        raise ClientIdRequiredError("The call has no x-mq-client-id.")
    return Caller(
        client_id=client_id,
        language=metadata.get("x-mq-language", ""),
        namespace=metadata.get("x-mq-namespace", ""),
        user=user,
        call=call,
    )
