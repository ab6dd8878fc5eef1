"""The site of docs/ builds without a warning, its links resolve, and it loads nothing from afar."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

import rmq_pipeline
import rmq_pipeline.dagster
import rmq_pipeline.testing

ROOT = Path(__file__).parents[1]
#: Elements whose address a browser loads by itself, and the attribute with the address.
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
#: Relations of <link> that name another page and load nothing.
NAMES_A_PAGE = {"canonical", "next", "prev"}

needs_mkdocs = pytest.mark.skipif(
    not importlib.util.find_spec("mkdocs"),
    reason="mkdocs is not installed: pip install -e '.[docs]'",
)


class Page(HTMLParser):
    """The anchors of a page, the addresses it links to, and those that a browser loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.anchors |= {of[name] for name in ("id", "name") if of.get(name)}
        address = of.get(LOADED.get(tag, "href"), "")
        if tag == "a" and address:
            self.links.add(address)
        elif tag in LOADED and address and of.get("rel") not in NAMES_A_PAGE:
            self.loaded.add(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert not built.stderr.strip()
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


def target(site: Path, page: Path, address: str) -> tuple[Path, str]:
    """Return the file that an address of a page leads to, and the anchor in it."""
    parts = urlsplit(address)
    path = unquote(parts.path)
    start = site if path.startswith("/") else page.parent
    file = page if not path else Path(os.path.normpath(start / path.lstrip("/")))
    return (file / "index.html" if file.is_dir() else file), unquote(parts.fragment)


@pytest.mark.slow
@needs_mkdocs
def test_every_link_within_the_site_resolves(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        # 404.html is served at any depth, so its links begin at the site's root.
        for address in page.links | page.loaded if file.name != "404.html" else ():
            if urlsplit(address).scheme:
                continue
            found, anchor = target(site, file, address)
            known = pages[found].anchors if found in pages else set()
            if not found.is_file() or (anchor and anchor not in known):
                broken.append(f"{file.relative_to(site)}: {address}")

    assert len(pages) > 90
    assert not broken


@pytest.mark.slow
@needs_mkdocs
def test_a_page_loads_nothing_from_other_machines(pages: dict[Path, Page]) -> None:
    remote = {
        address for page in pages.values() for address in page.loaded if urlsplit(address).netloc
    }

    assert not remote


@pytest.mark.slow
@needs_mkdocs
def test_the_reference_has_every_public_name(site: Path, pages: dict[Path, Page]) -> None:
    described: set[str] = set()
    for name in ("client", "dagster", "testing"):
        described |= pages[site / "api" / name / "index.html"].anchors
    elsewhere = {"errors"}  # docs/errors.md

    missing = [
        name
        for module in (rmq_pipeline, rmq_pipeline.dagster, rmq_pipeline.testing)
        for name in set(module.__all__) - elsewhere
        if not described & {f"{module.__name__}.{name}", f"rmq_pipeline.dagster.{name}"}
    ]

    assert not missing


def test_the_page_of_decisions_lists_them_all() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text("utf-8")
    rows = []
    for file in sorted(folder.glob("0*.md")):
        number, _, title = file.read_text("utf-8").partition("\n")[0].strip("# ").partition(": ")
        rows.append(f"| [{number}]({file.name}) | {title} |")

    assert [line for line in listed.splitlines() if line.startswith("| [")] == rows


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs does the same; this one needs no build, so `make check` can run it."""
    listed = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    pages = [file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")]

    assert [str(page) for page in pages if not _is_decision(page) and str(page) not in listed] == []


def _is_decision(page: Path) -> bool:
    return page.parts[0] == "decisions" and page.name[0] == "0"
