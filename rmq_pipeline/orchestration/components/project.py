"""The components of one defs folder, joined to pipelines, and ``BrokerComponent``, which has them.

Dagster merges the definitions of all components of a defs folder, and refuses two resources of one
name. So one component brings what a code location has once; each other one brings its own assets
and checks.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import dagster as dg
from pydantic import ConfigDict, Field, PrivateAttr

from rmq_pipeline.orchestration.components.references import objects, said, some_object
from rmq_pipeline.orchestration.components.scaffolding import BrokerScaffolder
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.declarations import DeclaredGroup, DeclaredTopic, identifier
from rmq_pipeline.orchestration.definitions import deployment
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import resources_of
from rmq_pipeline.orchestration.transaction_checker import TransactionChecker

Made = DeclaredTopic | DeclaredGroup | Consumer | TransactionChecker
_SCAFFOLD: Final = "`dg scaffold defs rmq_pipeline.dagster"
_TREE: Final = "`dg list component-tree` shows them"


class Part(dg.Component, dg.Model, dg.Resolvable):
    """A component that declares one part of a pipeline."""

    # Templates turn a text such as "2026" into a number.
    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, coerce_numbers_to_str=True
    )
    #: True for the component that other components name as their topic.
    is_topic: ClassVar[bool] = False
    #: The attribute with the name of what it declares.
    named_by: ClassVar[str] = "name"

    pipeline: Annotated[
        str | None,
        said("Pipeline that it belongs to: its asset group. Default: that of the BrokerComponent."),
    ] = None

    @abstractmethod
    def make(self, project: "Project") -> Made:
        """Return what the Python counterpart of this component makes.

        Raises:
            ValueError: the declaration is wrong.
        """

    @property
    def said_name(self) -> str:
        """Name of what it declares."""
        return str(getattr(self, self.named_by))

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return its own assets and checks; the BrokerComponent brings the rest."""
        return project_of(context).of(self)


@dg.scaffold_with(BrokerScaffolder)
class BrokerComponent(dg.Component, dg.Model, dg.Resolvable):
    """What a code location has once: resources, sensors, and the broker's background work.

    A project with other components of rmq_pipeline has exactly one.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    upkeep: Annotated[
        bool,
        said(
            "Bring the broker's background work. False in every code location of a broker but one."
        ),
    ] = True
    deployment: Annotated[
        Literal["local", "production"] | None,
        said(
            "Whose resources broker, sinks and spark are used. Default: RMQ_DEPLOYMENT, else local."
        ),
    ] = None
    pipeline: Annotated[
        str | None,
        said(
            "Pipeline, and so the asset group, of components that name none. Default: the package"
            " of the project."
        ),
    ] = None
    pipelines: Annotated[
        list[Any],
        objects(
            "Pipelines of this code location that are written in Python, such as"
            " shop.pipeline.PIPELINE.",
            examples=[["shop.pipeline.PIPELINE"]],
        ),
    ] = Field(default_factory=list)
    resources: Annotated[
        Any,
        some_object(
            "A dict of a module with resources that replace or add to broker, sinks and spark,"
            " such as shop.resources.RESOURCES.",
            examples=["shop.resources.RESOURCES"],
        ),
    ] = None
    _project: "Project | None" = PrivateAttr(default=None)

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """Return its tags and what it produces, for Dagster's lists."""
        return spec_of("resource", "asset", "asset_check", "job", "schedule", "sensor")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return resources, executor, sensors, background work, and the pipelines in Python."""
        project = project_of(context)
        return dg.Definitions.merge(
            deployment(
                [*project.pipelines.values(), *self.pipelines],
                resources={**resources_of(self.deployment), **self._own_resources()},
                upkeep=self.upkeep,
            ),
            *(each.shared() for each in project.pipelines.values()),
            *(each.definitions() for each in self.pipelines),
        )

    def project(self, context: dg.ComponentLoadContext) -> "Project":
        """Return the pipelines of the components, made once for all of them."""
        if self._project is None:
            package = context.defs_module_name.partition(".")[0]
            parts = context.component_tree.get_all_components(
                of_type=Part  # type: ignore[type-abstract]  # only compared with
            )
            self._project = Project(
                parts, written=self.pipelines, default=self.pipeline or identifier(package)
            )
        return self._project

    def _own_resources(self) -> Mapping[str, Any]:
        own = self.resources
        if own is None:
            return {}
        if not isinstance(own, Mapping):
            raise ValueError(  # noqa: TRY004 - as other checks
                f"resources of the BrokerComponent are {own!r}. Name a dict of resources by name."
            )
        return own


class Project:
    """The pipelines that the components of a defs folder declare together."""

    def __init__(self, parts: Sequence[Part], *, written: Sequence[Pipeline], default: str) -> None:
        """Make all parts, and join them to pipelines.

        Args:
            parts: all components of the defs folder but the BrokerComponent.
            written: pipelines in Python; their topics may be named, too.
            default: pipeline of the parts that name none.

        Raises:
            ValueError: a declaration is wrong, or two of them do not agree.
        """
        self._default = default
        self._topics = {each.name: each for pipeline in written for each in _topics_of(pipeline)}
        topics = [part for part in parts if part.is_topic]
        names = [*self._topics, *(part.said_name for part in topics)]
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise ValueError(f"Topic {twice[0]} is declared twice in this project. Keep one.")
        self._made: dict[int, tuple[Part, Made]] = {}
        for part in (*topics, *(part for part in parts if not part.is_topic)):
            made = part.make(self)
            self._made[id(part)] = part, made
            if isinstance(made, DeclaredTopic):
                self._topics[made.name] = made
        self.pipelines = {name: self._pipeline(name) for name in self._names()}

    def topic(self, name: str, *, of: str) -> DeclaredTopic:
        """Return a declared topic.

        Args:
            name: name of the topic.
            of: what names it, for the error.

        Raises:
            ValueError: no component and no pipeline declares the topic.
        """
        if name in self._topics:
            return self._topics[name]
        known = ", ".join(sorted(self._topics)) or "none"
        raise ValueError(
            f"{of} names topic {name!r}, which this project does not declare (it declares:"
            f" {known}). Correct the name, or declare the topic: {_SCAFFOLD}.TopicComponent"
            f" {identifier(name)}` (with external: true if it belongs to another code location)."
        )

    def of(self, part: Part) -> dg.Definitions:
        """Return the definitions that belong to one part alone.

        Raises:
            ValueError: Dagster does not list the part among its components.
        """
        if id(part) not in self._made:
            raise ValueError(
                f"{type(part).__name__} {part.said_name} is made by a function without a return"
                f" type. Annotate it: `def load(context) -> {type(part).__name__}`."
            )
        _, made = self._made[id(part)]
        pipeline = self.pipelines[self._name_of(part)]
        if isinstance(made, DeclaredTopic):
            return pipeline.of_topic(made) if made in pipeline.topics else dg.Definitions()
        if isinstance(made, DeclaredGroup):
            return pipeline.of_group(made)
        if isinstance(made, Consumer):
            return pipeline.of_consumer(made)
        # The asset of a checker belongs to a window, which the BrokerComponent brings.
        return dg.Definitions()

    def _name_of(self, part: Part) -> str:
        return part.pipeline or self._default

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(self._name_of(part) for part, _ in self._made.values())

    def _pipeline(self, name: str) -> Pipeline:
        mine = [made for part, made in self._made.values() if self._name_of(part) == name]
        external = {
            part.said_name
            for part, _ in self._made.values()
            if part.is_topic and getattr(part, "external", False)
        }
        return Pipeline(
            name,
            topics=[
                each
                for each in mine
                if isinstance(each, DeclaredTopic) and each.name not in external
            ],
            consumers=[each for each in mine if isinstance(each, Consumer)],
            checkers=[each for each in mine if isinstance(each, TransactionChecker)],
            groups=[each for each in mine if isinstance(each, DeclaredGroup)],
        )


def _topics_of(pipeline: Any) -> Iterable[DeclaredTopic]:
    if not isinstance(pipeline, Pipeline):
        raise ValueError(  # noqa: TRY004 - as other checks
            f"pipelines of the BrokerComponent name {pipeline!r}. Name what Pipeline(...) returns."
        )
    return pipeline.all_topics


def project_of(context: dg.ComponentLoadContext) -> Project:
    """Return the pipelines of the defs folder that is being loaded.

    Raises:
        ValueError: it has no BrokerComponent, or several.
    """
    brokers = context.component_tree.get_all_components(of_type=BrokerComponent)
    if not brokers:
        raise ValueError(
            "This project has no BrokerComponent, which brings the resources, the sensors and the"
            f" background work. Write it: {_SCAFFOLD}.BrokerComponent broker`."
        )
    if len(brokers) > 1:
        raise ValueError(
            f"This project has {len(brokers)} BrokerComponents. Keep one: {_TREE}. Each would bring"
            " the same resources and background work."
        )
    return brokers[0].project(context)


def spec_of(*produces: str) -> dg.ComponentTypeSpec:
    """Return the tags of a component, and the kinds of definitions that it makes."""
    return dg.ComponentTypeSpec(tags=["rocketmq", "messaging"], produces=list(produces))
