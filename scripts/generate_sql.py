"""Writes the generated SQL: of the state tables, and of the views of delivery state.

Run it with ``make sql`` after a table or the template was changed; a test fails while a file is
stale.
"""

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from scripts import table_sql

SQL: Final = Path(__file__).resolve().parents[1] / "rmq_pipeline" / "store" / "sql"
TABLES: Final = SQL / "tables"
DELIVERY_VIEWS: Final = SQL / "delivery_views.sql"
_TEMPLATE: Final = SQL / "delivery_views.sql.template"
_HEAD: Final = """\
-- The views of delivery state, and what each showed at a moment t.
-- Generated from delivery_views.sql.template by `make sql`; do not edit.
"""
_SECTION: Final = re.compile(r"^-- (view|part): (\w+)\n", re.MULTILINE)
_NAME: Final = re.compile(r"\{(\w+)\}")
#: What a name stands for now, where that is not the table of the name.
_NOW: Final = {"leases_with_failure": "store.leases", "stored_messages": "store.consume_queue"}
#: Too many rows to be kept during a query.
_NEVER_KEPT: Final = frozenset({"stored_messages"})


class _Template(NamedTuple):
    is_view: bool
    comment: str
    body: str


def generated() -> dict[Path, str]:
    """Return the text of each generated file."""
    tables = {TABLES / name: text for name, text in table_sql.files().items()}
    return {DELIVERY_VIEWS: delivery_views(), **tables}


def delivery_views() -> str:
    """Return the text of ``delivery_views.sql``."""
    _, *parts = _SECTION.split(_TEMPLATE.read_text("utf-8"))
    templates = {}
    for kind, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        lines = text.strip().split("\n")
        comments = [line for line in lines if line.startswith("--")]
        body = "\n".join(lines[len(comments) :])
        templates[name] = _Template(kind == "view", "\n".join(comments), body)
    now = (_now(name, templates) for name in templates)
    then = (_then(name, templates) for name, each in templates.items() if each.is_view)
    return "\n".join((_HEAD, *now, *then)).rstrip("\n") + "\n"


def _now(name: str, templates: dict[str, _Template]) -> str:
    """Return a view over the tables."""
    template = templates[name]

    def source(match: re.Match[str]) -> str:
        return _NOW.get(match[1], f"store.{match[1]}")

    schema = "main" if template.is_view else "store"
    body = _NAME.sub(source, template.body)
    return f"{template.comment}\nCREATE OR REPLACE VIEW {schema}.{name} AS\n{body};\n"


def _then(name: str, templates: dict[str, _Template]) -> str:
    """Return a macro over the tables as of a moment; it keeps rows that it reads twice."""
    parts = _parts_of(templates[name], templates)
    texts = {each: templates[each].body for each in (*parts, name)}
    uses = Counter(used for text in texts.values() for used in _NAME.findall(text))
    kept = [used for used, n in uses.items() if n > 1 and used not in {*parts, *_NEVER_KEPT}]

    def source(match: re.Match[str]) -> str:
        used = match[1]
        return used if used in kept or used in parts else f"store.{used}_at(store.ms_of(t))"

    tables = [
        f"{used} AS MATERIALIZED (FROM store.{used}_at(store.ms_of(t)))" for used in sorted(kept)
    ]
    for part in parts:
        body = textwrap.indent(_NAME.sub(source, texts[part]), "    ")
        once = "" if uses[part] == 1 else "MATERIALIZED "
        tables.append(f"{part} AS {once}(\n{body}\n)")
    head = "WITH " + ",\n".join(tables) + "\n" if tables else ""
    body = _NAME.sub(source, texts[name])
    return (
        f"-- As the view {name}, at the moment t.\n"
        f"CREATE OR REPLACE MACRO main.{name}_at(t) AS TABLE\n{head}{body};\n"
    )


def _parts_of(view: _Template, templates: dict[str, _Template]) -> list[str]:
    """Return the parts that a view reads, each after those that it reads itself."""
    found: list[str] = []
    for used in _NAME.findall(view.body):
        part = templates.get(used)
        if part is not None and not part.is_view:
            found += [one for one in (*_parts_of(part, templates), used) if one not in found]
    return found


def main() -> None:
    """Write the files."""
    for path, text in generated().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
