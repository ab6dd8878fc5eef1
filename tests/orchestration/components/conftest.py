"""A Dagster project with a defs folder, as `create-dagster` and `dg scaffold` write it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import dagster as dg
import pytest

_NUMBERS = itertools.count()

BROKER = "type: rmq_pipeline.dagster.BrokerComponent"
ORDERS = """
type: rmq_pipeline.dagster.TopicComponent
attributes: {name: orders, type: fifo, queues: 2}
"""
BILLS = """
type: rmq_pipeline.dagster.TopicComponent
attributes: {name: bills, type: transaction}
"""
BILLING = """
type: rmq_pipeline.dagster.ConsumerComponent
attributes:
  group: billing
  topic: orders
  handler: .handler.handle
  sink: billing
  sink_schema: {text: string, born_at_ms: int64}
"""
HANDLER = '''
"""A handler."""

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.dagster import Outcome

ROW = pa.schema([("text", pa.string()), ("born_at_ms", pa.int64())])


def handle(messages: pa.Table, state: pa.Table) -> Outcome:
    """Write the text of each message."""
    text = pc.cast(messages["body"], pa.string())
    return Outcome(rows=pa.table({"text": text, "born_at_ms": messages["born_at_ms"]}, schema=ROW))


def check(checks: pa.Table) -> list[str]:
    """Commit all."""
    return ["commit"] * checks.num_rows
'''


@dataclass
class Project:
    """A project folder; its package has a name of its own, since each is imported once."""

    root: Path
    package: str

    @property
    def defs(self) -> Path:
        """The defs folder."""
        return self.root / self.package / "defs"

    def write(self, place: str, *documents: str) -> None:
        """Write a defs.yaml of these components, and a handler beside it."""
        folder = self.defs / place
        folder.mkdir(parents=True, exist_ok=True)
        yaml = "\n---\n".join(dedent(each).strip() for each in documents)
        (folder / "defs.yaml").write_text(yaml)
        (folder / "handler.py").write_text(HANDLER)

    def module(self, name: str, text: str) -> None:
        """Write a module of the package."""
        (self.root / self.package / f"{name}.py").write_text(dedent(text))

    def load(self) -> dg.Definitions:
        """Load the defs folder as Dagster does."""
        return dg.load_from_defs_folder(path_within_project=self.root)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = Project(tmp_path, f"shop{next(_NUMBERS)}")
    made.defs.mkdir(parents=True)
    (made.root / "pyproject.toml").write_text(
        f'[project]\nname = "{made.package}"\nversion = "0.1.0"\n'
        '[tool.dg]\ndirectory_type = "project"\n'
        f'[tool.dg.project]\nroot_module = "{made.package}"\n'
        f'code_location_target_module = "{made.package}.definitions"\n'
        'registry_modules = ["rmq_pipeline.dagster"]\n'
    )
    (made.defs / "__init__.py").touch()
    made.module("__init__", "")
    made.module(
        "definitions",
        """
        from pathlib import Path

        import dagster as dg


        @dg.definitions
        def defs() -> dg.Definitions:
            return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
        """,
    )
    monkeypatch.syspath_prepend(str(made.root))
    yield made
    for name in [name for name in sys.modules if name.split(".")[0] == made.package]:
        del sys.modules[name]


Refused = Callable[[], str]


@pytest.fixture
def refused(project: Project) -> Refused:
    """Load the project, which fails, and return why."""

    def refused() -> str:
        with pytest.raises(Exception) as found:  # noqa: PT011 - Dagster's own, with the cause
            project.load()
        causes: list[str] = []
        error: BaseException | None = found.value
        while error is not None:
            causes.append(str(error))
            error = error.__cause__
        return "\n".join(causes)

    return refused
