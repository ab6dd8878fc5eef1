"""`dg scaffold defs`: components that load as they are written."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Final, Literal

import dagster as dg
from pydantic import BaseModel, Field

from rmq_pipeline.orchestration.declarations import identifier

DEFS: Final = "defs.yaml"
_BROKER: Final = "rmq_pipeline.dagster.BrokerComponent"
_PACKAGE: Final = "rmq_pipeline.dagster"
_TOPIC: Final = f"""\
type: {_PACKAGE}.TopicComponent

attributes:
  name: $topic
  type: $type
  queues: 4
  description: Messages of $name.
"""
_GROUP: Final = f"""\
type: {_PACKAGE}.GroupComponent

attributes:
  name: $name
  topic: $topic
  max_attempts: 16
  description: Consumers of $topic outside Dagster.
"""
_CONSUMER: Final = f"""\
type: {_PACKAGE}.ConsumerComponent

attributes:
  group: $name
  topic: $topic
  engine: $engine
  handler: .handler.handle
  sink: $name
  sink_schema:
    message_id: string
    text: string
    born_at_ms: int64
"""
_HANDLER: Final = '''\
"""Handler of consumer ``$name``."""

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.dagster import Outcome


def handle(messages: pa.Table, state: pa.Table) -> Outcome:
    """Write a row for each message of $topic.

    A call must have no other effects: it is repeated if its process dies.
    """
    rows = {
        "message_id": messages["message_id"],
        "text": pc.cast(messages["body"], pa.string()),
        "born_at_ms": messages["born_at_ms"],
    }
    return Outcome(rows=pa.table(rows))
'''
_CHECKER: Final = f"""\
type: {_PACKAGE}.TransactionCheckerComponent

attributes:
  topic: $topic
  checker: .checker.check
"""
_CHECK: Final = '''\
"""Checker of topic ``$topic``: it decides half messages whose producer has not ended them."""

import pyarrow as pa


def check(checks: pa.Table) -> list[str]:
    """Return commit, rollback or unknown for each row; here all are asked again later."""
    return ["unknown"] * checks.num_rows
'''
_BROKER_TEXT: Final = f"""\
type: {_BROKER}

attributes:
  # False in every code location of a broker but one.
  upkeep: true
"""


class _Texts(dg.Scaffolder[Any]):
    """Writes templates, and a BrokerComponent if the project has none."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write defs.yaml, or add to it, and the Python file that it names.

        Raises:
            ValueError: the component was asked for in Python.
        """
        if request.scaffold_format != "yaml":
            raise ValueError(
                "Components of rmq_pipeline are scaffolded in YAML. In Python, use Pipeline(...)"
                " and definitions(...): docs/projects.md."
            )
        folder = request.target_path.parent if request.append else request.target_path
        params = request.params if isinstance(request.params, BaseModel) else None
        given = {} if params is None else params.model_dump()
        values = self.values(identifier(folder.name), given)
        written = [Template(text).substitute(values) for text in self.documents(given)]
        file = folder / DEFS
        before = f"{file.read_text(encoding='utf-8').rstrip()}\n---\n" if request.append else ""
        file.write_text(before + "\n---\n".join(each.rstrip() for each in written) + "\n", "utf-8")
        for name, text in self.files().items():
            if not (folder / name).exists():
                (folder / name).write_text(Template(text).substitute(values), encoding="utf-8")
        _ensure_broker(folder, request.project_root)

    def values(self, name: str, given: Mapping[str, Any]) -> dict[str, str]:
        """Return what the texts contain."""
        topic = given.get("topic") or f"{name}_topic"
        return {"name": name, "type": "normal", "engine": "python", **given, "topic": topic}

    @abstractmethod
    def documents(self, given: Mapping[str, Any]) -> list[str]:
        """Return the templates of defs.yaml."""

    def files(self) -> Mapping[str, str]:
        """Return the templates of the Python files, by name."""
        return {}


def _ensure_broker(folder: Path, project_root: Path | None) -> None:
    """Write a BrokerComponent beside the component if the project has none."""
    inside = [
        parent
        for parent in folder.parents
        if parent.name == "defs" and (project_root is None or parent.is_relative_to(project_root))
    ]
    defs = inside[-1] if inside else folder.parent
    if any(_BROKER in file.read_text(encoding="utf-8") for file in defs.rglob("*.y*ml")):
        return
    file = defs / "broker" / DEFS
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(_BROKER_TEXT, encoding="utf-8")


class BrokerScaffolder(_Texts):
    """Writes the BrokerComponent."""

    def documents(self, given: Mapping[str, Any]) -> list[str]:  # noqa: ARG002
        """Return the template of the component."""
        return [_BROKER_TEXT]


class TopicParams(BaseModel):
    """Options of a new topic."""

    type: Literal["normal", "fifo", "delay", "transaction", "mixed"] = Field(
        default="normal", description="Type of the messages."
    )


class TopicScaffolder(_Texts):
    """Writes a topic that has the name of its folder."""

    @classmethod
    def get_scaffold_params(cls) -> type[Any]:
        """Return the options of the command."""
        return TopicParams

    def values(self, name: str, given: Mapping[str, Any]) -> dict[str, str]:
        """Return what the texts contain."""
        return super().values(name, {**given, "topic": name})

    def documents(self, given: Mapping[str, Any]) -> list[str]:  # noqa: ARG002
        """Return the template of the component."""
        return [_TOPIC]


class ReadingParams(BaseModel):
    """Options of what reads a topic."""

    topic: str = Field(
        default="",
        description="A topic that the project declares. Default: a new one, in the same file.",
    )


class GroupScaffolder(_Texts):
    """Writes a consumer group, and a topic if none is given."""

    @classmethod
    def get_scaffold_params(cls) -> type[Any]:
        """Return the options of the command."""
        return ReadingParams

    def documents(self, given: Mapping[str, Any]) -> list[str]:
        """Return the templates of the components."""
        return [_GROUP] if given.get("topic") else [_TOPIC, _GROUP]


class ConsumerParams(ReadingParams):
    """Options of a new consumer."""

    engine: Literal["python", "spark"] = Field(
        default="python", description="Threads of the run's own process, or Spark."
    )


class ConsumerScaffolder(_Texts):
    """Writes a consumer and its handler, and a topic if none is given."""

    @classmethod
    def get_scaffold_params(cls) -> type[Any]:
        """Return the options of the command."""
        return ConsumerParams

    def documents(self, given: Mapping[str, Any]) -> list[str]:
        """Return the templates of the components."""
        return [_CONSUMER] if given.get("topic") else [_TOPIC, _CONSUMER]

    def files(self) -> Mapping[str, str]:
        """Return the template of the handler."""
        return {"handler.py": _HANDLER}


class CheckerScaffolder(_Texts):
    """Writes a checker, and a topic of type transaction if none is given."""

    @classmethod
    def get_scaffold_params(cls) -> type[Any]:
        """Return the options of the command."""
        return ReadingParams

    def values(self, name: str, given: Mapping[str, Any]) -> dict[str, str]:
        """Return what the texts contain."""
        return super().values(name, {**given, "type": "transaction"})

    def documents(self, given: Mapping[str, Any]) -> list[str]:
        """Return the templates of the components."""
        return [_CHECKER] if given.get("topic") else [_TOPIC, _CHECKER]

    def files(self) -> Mapping[str, str]:
        """Return the template of the checker."""
        return {"checker.py": _CHECK}
