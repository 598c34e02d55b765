"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WITHOUT_CODE = {"api.md", "benchmarks.md", "contributing.md", "promises.md", "scaling.md", "when-to-use.md"}
"""Pages without code that runs."""

FILE = re.compile(r"^# (?P<name>[\w.-]+\.(?:py|yaml))(?P<continued>, continued)?\n")
"""How a block begins that is a file, or what is added to one."""

_OPEN = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[^`\s]*)[^`]*$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    line: int
    """The line of the page that its first line stands on, counted from 1."""
    text: str
    follows: bool
    """Whether nothing stands between it and the block before, but empty lines and what only arranges them."""


def pages() -> list[Path]:
    """Those with code: the guide, and the README."""
    return [*(path for path in sorted(DOCS.glob("*.md")) if path.name not in WITHOUT_CODE), ROOT / "README.md"]


def blocks(text: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    lines = text.splitlines()
    number = 0
    follows = False
    while number < len(lines):
        opened = _OPEN.match(lines[number])
        if opened is None:
            follows = follows and (not lines[number].strip() or lines[number].startswith(":::"))
            number += 1
            continue
        indent, fence = len(opened["indent"]), opened["fence"]
        first = number = number + 1
        while number < len(lines) and lines[number].strip() != fence:
            number += 1
        if number == len(lines):
            raise ValueError(f"the block that begins on line {first} never ends")
        body = "".join(f"{line[indent:]}\n" for line in lines[first:number])
        yield Block(opened["language"], first + 1, body, follows)
        follows = True
        number += 1


def examples_of(page: Path) -> list[tuple[Block, Block | None]]:
    """The blocks of a page that run, each with what it prints."""
    return list(examples(page.read_text(encoding="utf-8")))


def examples(text: str) -> Iterator[tuple[Block, Block | None]]:
    """Gives each block that runs, with the text block directly behind it if there is one."""
    found = list(blocks(text))
    for index, block in enumerate(found):
        if block.language in ("python", "console") or (block.language == "yaml" and FILE.match(block.text)):
            behind = found[index + 1] if index + 1 < len(found) else None
            shown = behind if behind is not None and behind.language == "text" and behind.follows else None
            yield block, shown
