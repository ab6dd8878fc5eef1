"""What the tree is like to work in: its size, its seams, its words, and what a call passes through.

Counts, not times: two runs on one tree give the same. ``python -m benchmarks.structure [--json]``.
"""

import argparse
import ast
import io
import json
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import grpc
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.settings import Settings

ROOT: Final = Path(__file__).resolve().parents[1]
LIBRARY: Final = "rmq_pipeline"
#: In the library's folder, because `rmq demo` runs from the wheel. They are code of a user, and
#: count as such.
EXAMPLES: Final = "rmq_pipeline/examples"
APPLICATION: Final = ("assets", "resources", "sensors", EXAMPLES)
SMALL_LINES: Final = 45
#: Threads of the broker that work beside calls, by how their names begin.
BACKGROUND: Final = ("dispatch", "rmq-upkeep", "rmq-house", "rmq-timers", "rmq-connections")
#: Calls of each kind that are traced.
_CALLS: Final = 5
#: Words that the field does not use, or that no docstring begins with.
_ODD_WORDS: Final = re.compile(
    r"\b(?:doomed|hopeless|bury|buries|buried|burying|unburied|condemned|pardon\w*|redriven"
    r"|redrives|g[ia]ven? back|giv(?:e|es|ing) back|sieves?"
    r"|verdicts?|arrivals|elders?|ripe|tending|outlook"
    r"|harvests?|tenures?|parcels?|surroundings|onward|nobody|anew|whoever|so many|so much|so long"
    r"|for good|is to be|are to be|was to be|of whom|at whose|door|doors|none is|that of which"
    r"|who asks|of theirs|kept apart)\b",
    re.IGNORECASE,
)
_ODD_OPENINGS: Final = re.compile(r"^(?:What|Whether|Who|Whom|Whose|Which|How|It is|That)\b")
#: Openings of sentences on pages. "That" may point at a noun there, and a question is none of them.
_ODD_SENTENCES: Final = re.compile(
    r"^(?:What|Whether|Who|Whom|Whose|Which|How|It is|That (?:a|an|the|all|each|no|it))\b(?!.*\?$)"
)
#: A block of code, a name in backquotes, and the address of a link: no prose.
_CODE: Final = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
#: Between paragraphs, headings, items, rows and cells.
_BLOCKS: Final = re.compile(r"\n\s*\n|\n(?=\s*(?:[*#|-]|\d+\.))|\|")


@dataclass(frozen=True)
class Module:
    """A Python file of the tree."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def imports(self, known: frozenset[str]) -> set[str]:
        """The modules among ``known`` that it imports."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return {name for name in found if name in known and name != self.name}

    def prose(self) -> Iterator[str]:
        """Its docstrings, and its comments."""
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(self.tree):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("#: ")


def modules(*folders: str) -> list[Module]:
    """The Python files below folders of the project, without those of examples within them."""
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if folder == EXAMPLES or not path.is_relative_to(ROOT / EXAMPLES)
    ]
    return [
        Module(
            str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"),
            path.read_text("utf-8"),
        )
        for path in found
    ]


def seams(library: list[Module], application: list[Module]) -> dict[str, int]:
    """How the library is cut: sizes, and who imports whom."""
    known = frozenset(module.name for module in library)
    importers: dict[str, set[str]] = defaultdict(set)
    for module in (*library, *application):
        for name in module.imports(known):
            importers[name].add(module.name)
    # A package stands for itself only: what imports its modules does not import it.
    single = [module for module in library if len(importers[module.name]) == 1]
    small = [module for module in library if 1 < module.lines < SMALL_LINES]
    classes: dict[str, set[str]] = defaultdict(set)
    for module in library:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(module.name)
    return {
        "modules": len(library),
        "lines": sum(module.lines for module in library),
        "modules with one importer": len(single),
        f"modules under {SMALL_LINES} lines": len(small),
        "class names that mean several things": sum(len(names) > 1 for names in classes.values()),
        "pairs of folders of broker/ that import each other": _mutual(importers),
    }


def _mutual(importers: dict[str, set[str]]) -> int:
    prefix = f"{LIBRARY}.broker."
    packages = {path.parent.name for path in (ROOT / LIBRARY / "broker").glob("*/__init__.py")}
    packages = {prefix + name for name in packages}

    def folder(name: str) -> str | None:
        if not name.startswith(prefix):
            return None
        rest = name.removeprefix(prefix).split(".")
        # Files that lie in broker/ itself are one more folder; a package is not one of them.
        return rest[0] if len(rest) > 1 or name in packages else "."

    arrows = {
        (folder(user), folder(used))
        for used, users in importers.items()
        for user in users
        if folder(user) and folder(used) and folder(user) != folder(used)
    }
    folders = {one for arrow in arrows for one in arrow if one}
    return sum((a, b) in arrows and (b, a) in arrows for a, b in combinations(sorted(folders), 2))


def odd_words(library: list[Module]) -> dict[str, float]:
    """How many in 10,000 words of comments and docstrings are odd."""
    words, odd = 0, Counter[str]()
    for module in library:
        for text in module.prose():
            words += len(text.split())
            odd.update(found.group().lower() for found in _ODD_WORDS.finditer(text))
            odd.update(found.group() for found in _ODD_OPENINGS.finditer(text))
    return {
        "words of comments and docstrings": words,
        "odd words in 10,000": round(odd.total() * 10_000 / words, 1),
    }


def pages() -> dict[str, str]:
    """The texts of README and of all pages below docs/, by path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found}


def odd_words_of_page(text: str) -> Counter[str]:
    """The odd words of a page, and the odd openings of its sentences, outside code."""
    prose = _CODE.sub(" ` ", text)
    odd = Counter(found.group().lower() for found in _ODD_WORDS.finditer(prose))
    for block in _BLOCKS.split(prose):
        for sentence in re.split(r"(?<=[.:?!])\s", " ".join(block.split())):
            if found := _ODD_SENTENCES.match(sentence.lstrip("*#-`0123456789. ")):
                odd[found.group()] += 1
    return odd


@dataclass
class Trace:
    """The files and functions of the library that calls enter, in all threads but background."""

    entered: set[tuple[str, str, int]] = field(default_factory=set)
    on: bool = False

    def hook(self, *event: Any) -> None:
        """Note a call; a profile function of threads, given (frame, event, argument)."""
        frame, name, _ = event
        code = frame.f_code
        if not self.on or name != "call" or f"/{LIBRARY}/" not in code.co_filename:
            return
        if not threading.current_thread().name.startswith(BACKGROUND):
            self.entered.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def of(self, call: Callable[[], object]) -> str:
        """Return "files/functions" that a call enters once it is warm: the fewest of some calls.

        Upkeep of the store may fall into a call, because the writer's thread does both.
        """
        call()
        found = []
        for _ in range(_CALLS):
            self.entered.clear()
            self.on = True
            try:
                call()
            finally:
                self.on = False
            found.append((len({file for file, *_ in self.entered}), len(self.entered)))
        return "{}/{}".format(*min(found))


@contextmanager
def _served(trace: Trace) -> Iterator[tuple[Client, Any]]:
    """A client of each endpoint; everything is in this process, and traced."""
    threading.setprofile(trace.hook)
    small = Settings(reserve_bytes=1 << 20, log_file_bytes=8 << 20)
    with ExitStack() as stack:
        stack.callback(threading.setprofile, None)
        stack.callback(sys.setprofile, None)
        home = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "home"
        broker = stack.enter_context(Broker.open(home, upkeep="none", settings=small))
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        server = FlightServer(broker)
        stack.callback(server.shutdown)
        door = GrpcEndpoint(broker, "127.0.0.1:0")
        stack.callback(door.shutdown)
        channel = stack.enter_context(grpc.insecure_channel(door.address))
        client = stack.enter_context(Client(server.address))
        sys.setprofile(trace.hook)
        yield client, pb.MessagingServiceStub(channel)


def flows() -> dict[str, str]:
    """Files and functions entered by one call of each kind, through each endpoint."""
    trace = Trace()
    with _served(trace) as (client, stub):
        message = pa.table({"body": [b"x"]})
        received: list[pa.Table] = []

        def receive() -> None:
            client.send("t", message)
            trace.entered.clear()
            received.append(client.receive("g", "t", limit=1))

        def ack() -> None:
            receive()
            trace.entered.clear()
            client.ack(received[-1].select(["receipt_handle"]))

        def settle() -> None:
            receive()
            trace.entered.clear()
            handles = received[-1]["receipt_handle"]
            client.settle("g", pa.table({"receipt_handle": handles, "outcome": ["ack"]}))

        found = {
            "Flight send": trace.of(lambda: client.send("t", message)),
            "Flight receive": trace.of(receive),
            "Flight ack": trace.of(ack),
            "Flight settle": trace.of(settle),
        }
        return found | _grpc_flows(trace, stub)


def _grpc_flows(trace: Trace, stub: Any) -> dict[str, str]:
    metadata = [("x-mq-client-id", "structure"), ("x-mq-language", "PYTHON")]
    topic, group = pb.Resource(name="t"), pb.Resource(name="g")
    queue = pb.MessageQueue(topic=topic, id=0)
    numbers = iter(range(1000))
    handles: list[Any] = []

    def send() -> None:
        own = pb.SystemProperties(
            message_id=f"{next(numbers):034X}", message_type=pb.MessageType.NORMAL
        )
        one = pb.Message(topic=topic, body=b"x", system_properties=own)
        stub.SendMessage(pb.SendMessageRequest(messages=[one]), metadata=metadata)

    def receive() -> None:
        send()
        trace.entered.clear()
        request = pb.ReceiveMessageRequest(group=group, message_queue=queue, batch_size=1)
        request.filter_expression.expression = "*"
        request.invisible_duration.seconds = 60
        frames = list(stub.ReceiveMessage(request, metadata=metadata))
        handles.extend(f.message.system_properties for f in frames if f.HasField("message"))

    def ack() -> None:
        receive()
        trace.entered.clear()
        entry = pb.AckMessageEntry(
            message_id=handles[-1].message_id, receipt_handle=handles[-1].receipt_handle
        )
        stub.AckMessage(
            pb.AckMessageRequest(topic=topic, group=group, entries=[entry]), metadata=metadata
        )

    return {
        "gRPC send": trace.of(send),
        "gRPC receive": trace.of(receive),
        "gRPC ack": trace.of(ack),
    }


def measure() -> dict[str, Any]:
    """All figures, by what they count."""
    library = modules(LIBRARY)
    return {
        **seams(library, modules(*APPLICATION)),
        "lines of tests": sum(module.lines for module in modules("tests")),
        **odd_words(library),
        **{f"files/functions of a {name}": figure for name, figure in flows().items()},
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print an object instead of a table")
    chosen = parser.parse_args()
    figures = measure()
    if chosen.json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("figure", "value")
    for name, figure in figures.items():
        table.add_row(name, str(figure))
    Console().print(table)


if __name__ == "__main__":
    main()
