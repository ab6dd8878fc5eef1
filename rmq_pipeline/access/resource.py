"""Resources of policies, and the patterns that match them."""

from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

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
