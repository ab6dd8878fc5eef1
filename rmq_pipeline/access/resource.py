"""What a policy speaks of, and which things a pattern of it fits."""

from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from rmq_pipeline.errors import RequestError
from rmq_pipeline.topic import DLQ_PREFIX, RETRY_PREFIX, is_system

ResourceType = Literal["topic", "group", "namespace", "cluster"]
Action = Literal["pub", "sub", "create", "update", "delete", "get", "list"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
TYPES: Final[tuple[ResourceType, ...]] = get_args(ResourceType)
#: What the only cluster of a broker is called.
CLUSTER: Final = "DefaultCluster"
_ANY: Final = "any"
_STAR: Final = "*"
_NAME_LENGTH: Final = 255


@dataclass(frozen=True, slots=True)
class Resource:
    """One thing that a call touches; the name is the stored one, ``<namespace>%<name>``."""

    type: ResourceType
    name: str

    @property
    def owner(self) -> "Resource":
        """Itself; of a topic of dead letters or retries, the consumer group that it belongs to.

        Of a system topic, the broker: messages of every topic lie there.
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
        """The namespace it is or lies in, "" for none; None: it is nothing that has one."""
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
    """Resources by type and name, written ``topic:orders``, ``group:bill*``, ``topic:*``, ``*``."""

    #: "any" is every type.
    type: str
    kind: Literal["literal", "prefixed", "any"]
    #: Of a prefix, without its star; empty for any.
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The pattern of its notation; a star at the end makes it a prefix.

        Raises:
            RequestError: it is none.
        """
        if text == _STAR:
            return cls(_ANY, "any")
        type_, colon, name = text.partition(":")
        type_ = type_.lower()
        if not colon or type_ not in TYPES:
            raise RequestError(
                f"{text!r} is no resource: write TYPE:NAME, TYPE:PREFIX*, TYPE:* or *, "
                f"with one of {', '.join(TYPES)}."
            )
        if name == _STAR:
            return cls(type_, "any")
        prefix = name.removesuffix(_STAR)
        # The namespace of what is in none has the empty name.
        is_blank = not name and type_ != "namespace"
        if is_blank or _STAR in prefix or len(name) > _NAME_LENGTH or not name.isprintable():
            raise RequestError(f"{name!r} is no name of a {type_}; a star may only end it.")
        return cls(type_, "prefixed" if name != prefix else "literal", prefix)

    def __str__(self) -> str:
        if self.type == _ANY:
            return _STAR
        return f"{self.type}:{self.name}{'' if self.kind == 'literal' else _STAR}"

    def fits(self, resource: Resource) -> bool:
        """Whether it speaks of this; that of a namespace speaks of all topics and groups in it."""
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
        """How near it comes to this resource that it fits; the smallest is the nearest.

        The resource's own type goes before its namespace, and that before any type; then a whole
        name before a prefix, a longer prefix before a shorter one, and that before all names.
        """
        of_type = 0 if self.type == resource.type else 2 if self.type == _ANY else 1
        return of_type, ("literal", "prefixed", "any").index(self.kind), -len(self.name)
