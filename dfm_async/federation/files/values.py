"""The values of a file, with their positions: each is read as an expected type, and reports what is wrong."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dfm_async.base.text import shortened
from dfm_async.errors import FileProblem
from dfm_async.federation.files.tree import LARGEST, TreeNode, path_text, place

_log = logging.getLogger(__name__)

MOST_PROBLEMS: Final = 1000
_MOST: Final = 10**15
_WITH_DASHES: Final = frozenset(
    {"from_param", "from_secrets", "from_site", "from_provider", "expose_as", "is_async", "in_process"}
)
"""Keys that DFM writes with ``-``: messages do, too. Others have ``_`` there."""


class TooMuch(Exception):
    """What files refer to, taken together, is larger than allowed."""

    def __init__(self, at: FileValue) -> None:
        super().__init__(at)
        self.at = at


class Ledger:
    """The problems that were found, and how much may still be read."""

    def __init__(self) -> None:
        self.problems: list[FileProblem] = []
        self._left = LARGEST
        self._known: set[tuple[str, int, int, str]] = set()

    def add(self, problem: FileProblem) -> None:
        """Record a problem; the same one that several places refer to counts once."""
        same = (problem.file, problem.line, problem.column, problem.message)
        if same not in self._known and len(self.problems) < MOST_PROBLEMS:
            self._known.add(same)
            self.problems.append(problem)

    def doubt(self, problem: FileProblem) -> None:
        """Log what is unusual about this value but harmless."""
        same = (problem.file, problem.line, problem.column, problem.message)
        if same not in self._known and len(self._known) < MOST_PROBLEMS:
            self._known.add(same)
            _log.warning("%s", problem)

    def spend(self, parts: int, at: FileValue) -> None:
        """Count what is read, each time that it is referred to; raise TooMuch beyond the limit."""
        self._left -= parts
        if self._left < 0:
            raise TooMuch(at)


@dataclass(slots=True, eq=False)
class Document:
    """A file that was read: its name in messages, the folder that its paths are relative to, and its content."""

    name: str
    folder: str
    root: TreeNode
    ledger: Ledger


@dataclass(slots=True, eq=False, repr=False)
class FileValue:
    """A part of a file, and the keys that lead to it."""

    node: TreeNode
    document: Document
    parent: FileValue | None = None
    key: str = ""

    # where it is

    @property
    def path(self) -> str:
        """The keys that lead to it, as they are written in Python."""
        steps: list[str | int] = []
        at = self
        while at.parent is not None:
            steps.append(int(at.key) if isinstance(at.parent.node.value, list) else at.key)
            at = at.parent
        return path_text(reversed(steps))

    def problem(self, message: str) -> None:
        """Report what is wrong with this value."""
        self._report(self.node.at, self.path, message)

    def doubt(self, message: str) -> None:
        """Log what is unusual about this value but harmless."""
        self.document.ledger.doubt(FileProblem(self.document.name, *place(self.node.at), self.path, message))

    def problem_at_key(self, name: str, message: str) -> None:
        """Report what is wrong with a key of this mapping."""
        self._report(self.node.keys.get(name, self.node.at), self.child(name, self.node).path, message)

    def _report(self, at: int, path: str, message: str) -> None:
        self.document.ledger.add(FileProblem(self.document.name, *place(at), path, message))

    @property
    def place(self) -> str:
        """The file and line, for messages about something else."""
        return f"{self.document.name}:{place(self.node.at)[0]}"

    # what it is

    @property
    def kind(self) -> str:
        """The value for messages."""
        value = self.node.value
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list):
            return "a list"
        return "nothing" if value is None else shortened(value)

    @property
    def missing(self) -> bool:
        """Whether the key has no value."""
        return self.node.value is None

    def child(self, key: str, node: TreeNode) -> FileValue:
        """Return a part of it."""
        return FileValue(node, self.document, self, key)

    def has(self, name: str) -> bool:
        """Return whether it is a mapping with such a key."""
        return isinstance(self.node.value, dict) and name in self.node.value

    def only(self, name: str) -> bool:
        """Return whether it is a mapping with such a key, and no other."""
        return isinstance(self.node.value, dict) and len(self.node.value) == 1 and name in self.node.value

    def get(self, name: str) -> FileValue | None:
        """Return the value of a key, if this is a mapping that has it."""
        if isinstance(self.node.value, dict) and name in self.node.value:
            return self.child(name, self.node.value[name])
        return None

    def part(self, name: str) -> FileValue:
        """Return the value of a key; without it, one that is missing."""
        return self.get(name) or self.child(name, TreeNode(None, self.node.at))

    def text_of(self, name: str) -> str:
        """Return the text of a key; empty if it has none."""
        found = self.part(name).node.value
        return found if isinstance(found, str) else ""

    def mapping(self, what: str) -> Iterator[tuple[str, FileValue]]:
        """Yield its keys and values; nothing counts as an empty mapping."""
        value = self.node.value
        if isinstance(value, dict):
            self.document.ledger.spend(len(value), self)
            document = self.document
            return iter([(name, FileValue(node, document, self, name)) for name, node in value.items()])
        if value is not None:
            self.problem(f"{what} must be a mapping, not {self.kind}")
        return iter(())

    def fields(self, what: str, known: Collection[str]) -> dict[str, FileValue]:
        """Return the values of a mapping whose keys are fixed; they may be written with ``-`` or ``_``."""
        found: dict[str, FileValue] = {}
        for name, value in self.mapping(what):
            if name in known and name not in found:
                found[name] = value
                continue
            plain = name.replace("-", "_")
            if plain not in known:
                alike = known if "-" not in name else [key.replace("_", "-") for key in known]
                allowed = ", ".join(map(_spelt, known))
                self.problem_at_key(name, f"{what} has no key {name!r}{close_to(name, alike)}. Allowed are: {allowed}")
            elif plain in found:
                self.problem_at_key(name, f"duplicate key, also written as {found[plain].key!r}")
            else:
                found[plain] = value
        return found

    def read(self, what: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
        """Read the values of a mapping whose keys are fixed; those that are None, or invalid, are left out."""
        found = {}
        for name, part in self.fields(what, readers).items():
            value = readers[name](part, _spelt(name))
            if value is not None:
                found[name] = value
        return found

    def items(self, what: str) -> list[FileValue]:
        """Return the parts of a list."""
        value = self.node.value
        if isinstance(value, list):
            self.document.ledger.spend(len(value), self)
            return [self.child(str(index), node) for index, node in enumerate(value)]
        if value is not None:
            self.problem(f"{what} must be a list, not {self.kind}")
        return []

    def text(self, what: str) -> str | None:
        """Return the text that it is."""
        if isinstance(self.node.value, str):
            return self.node.value
        quotes = "; put it in quotes" if isinstance(self.node.value, (bool, int, float)) else ""
        self.problem(f"{what} must be text, not {self.kind}{quotes}")
        return None

    def identifier(self, what: str) -> str | None:
        """Return the identifier that it is."""
        found = self.text(what)
        if found is not None and not found.isidentifier():
            self.problem(f"{what} must be an identifier, such as 'rain_2m', not {found!r}")
            return None
        return found

    def flag(self, what: str) -> bool | None:
        """Return whether it is true."""
        if isinstance(self.node.value, bool):
            return self.node.value
        self.problem(f"{what} must be true or false, not {self.kind}")
        return None

    def number(self, what: str, *, positive: bool = False, whole: bool = False, signed: bool = False) -> float | None:
        """Return the number that it is: not negative unless ``signed``, and not zero if ``positive``."""
        value = self.node.value
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not -_MOST <= value <= _MOST:
            self.problem(f"{what} must be a {'whole ' * whole}number, not {self.kind}")
            return None
        if (value < 0 and not signed) or (positive and value <= 0):
            self.problem(f"{what} must {'be positive' if positive else 'not be negative'}, not {value}")
            return None
        return value

    def plain(self) -> Any:
        """Return the value as Python has it: text, numbers, lists and dicts."""
        self.document.ledger.spend(self.node.size, self)
        return _plain(self.node)

    def plain_mapping(self, what: str) -> dict[str, Any]:
        """Return the dict that it is."""
        if isinstance(self.node.value, dict):
            found: dict[str, Any] = self.plain()
            return found
        if not self.missing:  # its text is not shown: it may be a secret in the wrong place
            self.problem(f"{what} must be a mapping, not {'text' if isinstance(self.node.value, str) else self.kind}")
        return {}


Reader: TypeAlias = Callable[[FileValue, str], Any]
"""Reads a value, whose name in messages is given; None if it is invalid, which is reported."""


def if_given(reader: Reader) -> Reader:
    """Return a reader that accepts a key without a value, as None."""
    return lambda value, what: None if value.missing else reader(value, what)


def number(value: FileValue, what: str) -> float | None:
    """Read a number that is not negative."""
    return value.number(what)


def positive(value: FileValue, what: str) -> float | None:
    """Read a number above zero."""
    return value.number(what, positive=True)


def _spelt(key: str) -> str:
    return key.replace("_", "-") if key in _WITH_DASHES else key


def _plain(node: TreeNode) -> Any:  # as deep as a file may be
    value = node.value
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value


def close_to(name: str, known: Iterable[str]) -> str:
    """Return a hint which known name may have been meant."""
    found = difflib.get_close_matches(name, list(known)[:1000], n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def one_of(name: str, known: Sequence[str]) -> str:
    """Return a hint which names there are instead of one that does not exist."""
    if not known:
        return "none exists"
    shown = ", ".join(known[:10]) + (f", and {len(known) - 10} more" if len(known) > 10 else "")
    found = difflib.get_close_matches(name, known[:1000], n=1)
    return f"did you mean {found[0]!r}? Known: {shown}" if found else f"known: {shown}"
