"""What the pages name exists: tests, modules, drawings, files, anchors; and what they define is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from tests.docs.pages import DOCS, FILE, ROOT, blocks, examples_of, pages

PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
HOSTS = {"keepachangelog.com", "modelcontextprotocol.io", "semver.org"}
"""Where links may lead. Nobody can look there while the tests run; so a new one is read by somebody, once."""

NOT_RUN = {
    ("testing.md", "conftest.py"): "a whole run of pytest in tests/testing",
    ("testing.md", "test_weather.py"): "a whole run of pytest in tests/testing",
    ("errors.md", "guarded"): "is refused before it could run",
    ("troubleshooting.md", "guarded"): "is refused before it could run",
    ("pipelines.md", "load_from_mirror"): "runs by the name of the operation that it implements",
    ("pipelines.md", "load_era5"): "runs by the name of the operation that it implements",
    ("placement.md", "smooth_in_the_lab"): "runs by the name of the operation that it implements",
    ("discovery.md", "forecast_south"): "runs by the name of the operation that it implements",
    ("discovery.md", "southern_cities"): "is asked by discover",
    ("discovery.md", "units"): "is asked by discover",
    ("adapters.md", "stations.py"): "is imported at the site that names its classes",
    ("deploying-sites.md", "stations.py"): "is imported at the site that names its classes",
    ("going-distributed.md", "stations.py"): "is imported at the site that names its classes",
    ("web.md", "one_square"): "runs by its route",
    ("web.md", "small"): "shows how it is made",
}
"""What a page defines and does not name again, with the reason why that is enough."""


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks("\n".join(lines)):
        if not block.language.startswith("{"):
            count = block.text.count("\n")
            lines[block.line - 1 : block.line - 1 + count] = [""] * count
    return "\n".join(lines)


def links(page: Path) -> Iterator[tuple[str, str]]:
    for found in LINK.finditer(prose(page)):
        yield found["text"], found["target"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made of their words; and those that it names itself."""
    text = prose(page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for _, target in links(page):
        if "://" in target:
            address = urlsplit(target)
            found = address.scheme == "https" and address.hostname in HOSTS
        else:
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            made = path.name == "benchmarks.md" and (ROOT / "benchmarks" / f"{anchor}.py").exists()
            found = path.exists() and (not anchor or made or anchor in anchors(path))
        if not found:
            wrong.append(target)
    assert wrong == []


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [
        line for block in blocks(index) if block.language == "{toctree}" for line in block.text.splitlines() if line
    ]
    names = [line for line in listed if not line.startswith(":")]
    assert sorted(names) == sorted(page.stem for page in DOCS.glob("*.md") if page.name != "index.md")


def definitions(page: Path) -> tuple[dict[str, int], set[str]]:
    """What the blocks of a page define on their top level, with its line; and the names that they use."""
    defined: dict[str, int] = {}
    used: set[str] = set()
    for block, _ in examples_of(page):
        file = FILE.match(block.text)
        if file is not None:
            defined[file["name"]] = block.line
        used |= set(re.findall(r"[\w.-]+\.(?:py|yaml)", block.text.partition("\n")[2] if file else block.text))
        used |= {f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE)}
        if file is not None or block.language == "console":
            continue
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        tree = compile(block.text, str(page), "exec", flags=flags)
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for node in tree.body:
            defined |= dict.fromkeys(bound(node), block.line + node.lineno - 1)
    return defined, used


def bound(node: ast.stmt) -> list[str]:
    """The names of functions, classes, values and pipelines that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.With):
        return [item.optional_vars.id for item in node.items if isinstance(item.optional_vars, ast.Name)]
    return []


def test_commands_that_pages_name_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    sessions = re.findall(r"^@nox\.session.*\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.M)
    for name in re.findall(r"noxfile\.py (\w+)|nox -s (\w+)", text):
        assert "".join(name) in sessions
    for name in re.findall(r"python3? -m benchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_a_page_defines_is_used_on_it(page: Path) -> None:
    defined, used = definitions(page)
    unused = {name for name in defined if name not in used}
    excused = {name for where, name in NOT_RUN if where == page.name}
    assert unused == excused, "only defined, never run: use it, or say in NOT_RUN who does"


def test_the_layout_of_the_code_names_every_package() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    packages = {path.parent.name for path in (ROOT / "dfm_async").glob("*/__init__.py")}
    assert sorted(rows) == sorted(packages)


# promises


def promises() -> list[tuple[str, str, str]]:
    """The rows of the tables: promise, modules, tests."""
    rows = re.findall(r"^\| (\*\*.+) \| (.+) \| (.+) \|$", (DOCS / "promises.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 15
    return rows


def test_every_test_that_a_promise_names_exists() -> None:
    for promise, _, tried in promises():
        named = [(text, target) for text, target in LINK.findall(tried) if target.startswith("../tests/")]
        for text, target in named:
            source = (DOCS / target).read_text(encoding="utf-8")
            assert f"def test_{text.replace(' ', '_')}(" in source, f"{promise}: {target} has no test of that name"
        assert named or "benchmarks.md" in tried, f"{promise}: nothing tries to break it"


def test_every_module_that_keeps_a_promise_exists() -> None:
    for promise, modules, _ in promises():
        named = re.findall(r"`([\w/]+\.py)`", modules)
        assert named or modules == "all of it", promise
        assert [name for name in named if not (ROOT / "dfm_async" / name).exists()] == []


def test_every_part_that_the_page_about_the_inside_names_exists() -> None:
    rows = re.findall(r"\| `([\w/.]+)` \|$", (DOCS / "how-it-works.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 5
    assert [name for name in rows if not (ROOT / "dfm_async" / name).exists()] == []


# drawings

DRAWINGS = sorted((DOCS / "drawings").glob("*.svg"))


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_can_be_read_by_everybody_in_any_light(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(source)
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert root.get("role") == "img"
    assert title is not None
    assert title.text
    assert root.get("aria-labelledby") == title.get("id")
    assert not re.search(r"<script|<image|href|style=|fill=|stroke=|#[0-9a-fA-F]{3,6}\b", source), "colours: pages.css"


def test_every_drawing_is_on_a_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    shown = {name for text in texts for name in re.findall(r"^```\{drawing\} (\S+)$", text, re.M)}
    assert shown == {path.stem for path in DRAWINGS}


# troubleshooting


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module, without the values that are formatted into them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.split(r"\{[^{}]*\}", node.value)


def test_messages_on_the_troubleshooting_page_are_those_of_the_library() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    rows = [row.split(" | ")[0] for table in tables if "message" in table[:12] for row in table.splitlines()[2:]]
    quoted = [text for row in rows if "from Python" not in row for text in re.findall(r"`([^`]+)`", row)]
    quoted += re.findall(r"^### \"(.+)\"$", page, re.MULTILINE)
    assert len(quoted) > 20
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "dfm_async").rglob("*.py")]
    known = "\n".join(text for tree in trees for text in strings(tree))
    fragments = {(text, part.strip(" '\"()#")) for text in quoted for part in re.split(r"…|SIG\w+|: ", text)}
    assert {part for _, part in fragments if part not in known} == set(NOT_A_CONSTANT), sorted(fragments)


NOT_A_CONSTANT = {
    "No such file or directory": "of the operating system",
    "assignment destination is read-only": "of numpy",
    "cannot be sent to another site": "composed by EncodingError",
    "is inside ForEach": "contains the label of a node",
    "is known to this session": "composed by JobNotFound",
}
"""Messages on the troubleshooting page that no string of the library contains, and why."""
