"""YAML as a tree with the position of each part. It contains only text, numbers, lists and mappings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

DEEPEST: Final = 64
"""How deep a file may be nested."""
LARGEST: Final = 400_000
"""How many parts a file may have, with everything that its aliases repeat."""

Scalar: TypeAlias = str | int | float | bool | None

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = {_TAG + kind: kind for kind in ("str", "int", "float", "bool", "null")}
_GROUPS: Final = {_TAG + "map", _TAG + "seq"}
_MERGE: Final = "<<"


class TreeNode:
    """A part of a file.

    Attributes:
        value: text, a number, a boolean, None, a list of nodes, or nodes by their keys.
        at: where it begins; :func:`place` returns the line and the column.
        size: of how many parts it consists, with what aliases repeat.
        keys: where each key begins, for a mapping.
    """

    __slots__ = ("at", "keys", "size", "value")

    def __init__(self, value: Scalar | list[TreeNode] | dict[str, TreeNode], at: int) -> None:
        self.value = value
        self.at = at
        self.size = 1
        self.keys = _NO_KEYS


_NO_KEYS: Final[dict[str, int]] = {}
_LINE: Final = 32  # a place is one number, the line in its upper bits: there are as many of them as parts of a file


def place(at: int) -> tuple[int, int]:
    """Return the line and the column, both from 1; line 0 means unknown."""
    return (at >> _LINE) + 1, (at & (1 << _LINE) - 1) + 1


def path_text(steps: Iterable[str | int]) -> str:
    """Return the keys and indices that lead to a part, as Python writes them."""
    found = ""
    for step in steps:
        plain = isinstance(step, str) and (step.replace("-", "_").isidentifier() or step == "$ref")
        found += f".{step}" if plain else f"[{step!r}]"
    return found.removeprefix(".")


class TreeError(Exception):
    """Something that cannot be read: where, and why. Line and column are 0 if that is not known."""

    def __init__(self, line: int, column: int, message: str, key: str = "") -> None:
        super().__init__(line, column, message, key)
        self.line = line
        self.column = column
        self.message = message
        self.key = key


class _Frame:
    """A list or mapping that is being read."""

    __slots__ = ("keys", "mapping", "merged", "name", "node")

    def __init__(self, node: TreeNode) -> None:
        self.node = node
        self.mapping = isinstance(node.value, dict)
        self.keys: dict[str, int] = {}
        self.merged: list[TreeNode] | None = None
        self.name: str | None = None  # the key whose value comes next


def read_tree(text: str) -> tuple[TreeNode | None, list[TreeError]]:
    """Read one YAML document: its root, None if it is empty, and the duplicate keys.

    JSON that is not YAML is read, too: with tabs, or escapes of surrogates. A TreeError reports what cannot be read.
    """
    try:
        return _read_yaml(text)
    except TreeError as error:
        if not text.lstrip().startswith("{"):
            raise
        try:
            return tree_of(json.loads(text)), []
        except (ValueError, RecursionError):
            raise error from None


def _read_yaml(text: str) -> tuple[TreeNode | None, list[TreeError]]:
    import yaml  # only needed for files

    composer = _Composer()
    takers: dict[type, Callable[[Any, int], None] | None] = {
        yaml.ScalarEvent: composer.scalar,
        yaml.MappingStartEvent: lambda event, at: composer.begin(event, TreeNode({}, at)),
        yaml.SequenceStartEvent: lambda event, at: composer.begin(event, TreeNode([], at)),
        yaml.MappingEndEvent: composer.end,
        yaml.SequenceEndEvent: composer.end,
        yaml.AliasEvent: composer.alias,
        yaml.DocumentStartEvent: composer.document,
        yaml.DocumentEndEvent: None,
        yaml.StreamStartEvent: None,
        yaml.StreamEndEvent: None,
    }
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        try:
            while (event := loader.get_event()) is not None:
                take = takers[type(event)]
                if take is not None:
                    mark = event.start_mark
                    take(event, mark.line << _LINE | mark.column)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (0, 0) if mark is None else (mark.line + 1, mark.column + 1)
        raise TreeError(line, column, f"this is not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise TreeError(line, column, f"this is not YAML: {error.reason}") from None
    return composer.root, composer.twice


def tree_of(data: Any) -> TreeNode:
    """Make a tree of data without lines; TreeError if it is too deep or large, or not plain data."""
    # All of them are in line 0, each at its own column.
    return _tree_of(data, itertools.count(-1 << _LINE), 0)


def _is_broken(text: str) -> bool:
    """Return whether a text has an unpaired surrogate, which cannot be written."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _tree_of(data: Any, places: Iterator[int], depth: int) -> TreeNode:
    at = next(places)
    if depth > DEEPEST:
        raise TreeError(0, 0, f"this is nested deeper than {DEEPEST} levels")
    if at + (1 << _LINE) > LARGEST:
        raise TreeError(0, 0, f"it has more than {LARGEST:,} parts")
    if isinstance(data, Mapping):
        named = {str(name): _tree_of(part, places, depth + 1) for name, part in data.items()}
        node, parts = TreeNode(named, at), list(named.values())
        node.keys = {name: part.at for name, part in named.items()}
    elif isinstance(data, (list, tuple)):
        parts = [_tree_of(part, places, depth + 1) for part in data]
        node = TreeNode(parts, at)
    elif data is None or isinstance(data, (str, int, float)):
        if isinstance(data, str) and _is_broken(data):
            raise TreeError(0, 0, f"unpaired surrogate in {data!r}")
        return TreeNode(data, at)
    else:
        raise TreeError(0, 0, f"a value of type {type(data).__name__} is neither text, a number, a list nor a mapping")
    node.size += sum(part.size for part in parts)
    return node


class _Composer:
    """Puts events together, without recursion: what is nested too deep must not end the process."""

    def __init__(self) -> None:
        self.root: TreeNode | None = None
        self.twice: list[TreeError] = []
        self._stack: list[_Frame] = []
        self._frame: _Frame | None = None
        self._anchors: dict[str, TreeNode | None] = {}
        self._open: dict[int, str] = {}
        self._documents = 0
        self._resolvers, self._constructors = _safe_scalars()

    def document(self, _event: Any, at: int) -> None:
        self._documents += 1
        if self._documents > 1:
            raise _wrong(at, "a second document begins here; a file must contain one")

    def scalar(self, event: Any, at: int) -> None:
        text: str = event.value
        if _is_broken(text):  # libyaml refuses it, PyYAML without it does not
            raise _wrong(at, "this is not YAML: unpaired surrogate")
        frame = self._frame
        if frame is not None and frame.mapping and frame.name is None:
            self._key(frame, event, text, at)
            return
        node = TreeNode(self._value(event, text, at), at)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._add(node, at)

    def _value(self, event: Any, text: str, at: int) -> Scalar:
        tag = event.tag
        if tag is None or tag == "!":
            if not event.implicit[0]:
                return text
            patterns = self._resolvers.get(text[:1])
            if patterns is None:
                return text
            kind = "str"
            for found, pattern in patterns:
                if pattern.match(text):
                    kind = _PLAIN_TAGS.get(found, "str")  # dates stay text, as in JSON
                    break
        elif tag in _PLAIN_TAGS:
            kind = _PLAIN_TAGS[tag]
        else:
            raise _bad_tag(tag, at)
        if kind == "str":
            return text
        try:
            return self._constructors[kind](text)
        except (ValueError, KeyError, IndexError, OverflowError):
            raise _wrong(at, f"invalid {kind}: {text[:40]!r}") from None

    def _key(self, frame: _Frame, event: Any, text: str, at: int) -> None:
        if event.tag is not None and event.tag not in _PLAIN_TAGS and event.tag != "!":
            raise _bad_tag(event.tag, at)
        if event.anchor is not None:
            self._anchors[event.anchor] = TreeNode(text, at)
        frame.name = text
        if text == _MERGE and event.implicit[0]:
            return
        if text in frame.keys:
            first = place(frame.keys[text])[0]
            message = f"duplicate key {text!r}, first in line {first}"
            self.twice.append(TreeError(*place(at), message, path_text(self._steps())))
        else:
            frame.keys[text] = at

    def _steps(self) -> Iterator[str | int]:
        """Yield what leads to the part that is being read."""
        for frame in self._stack:
            yield len(frame.node.value) if isinstance(frame.node.value, list) else frame.name or ""

    def begin(self, event: Any, node: TreeNode) -> None:
        if event.tag is not None and event.tag not in _GROUPS and event.tag != "!":
            raise _bad_tag(event.tag, node.at)
        if len(self._stack) >= DEEPEST:
            raise _wrong(node.at, f"this is nested deeper than {DEEPEST} levels")
        if self._frame is not None and self._frame.mapping and self._frame.name is None:
            raise _wrong(node.at, "a key must be text, not a list or a mapping")
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # an alias to it from inside would make it contain itself
            self._open[id(node)] = event.anchor
        self._frame = _Frame(node)
        self._stack.append(self._frame)

    def end(self, _event: Any, _at: int) -> None:
        frame = self._stack.pop()
        self._frame = self._stack[-1] if self._stack else None
        node = frame.node
        if isinstance(node.value, dict):
            for merged in frame.merged or ():
                for name, value in merged.value.items():  # type: ignore[union-attr] # only mappings are kept there
                    if name not in node.value:
                        node.value[name] = value
                        node.size += value.size
                        frame.keys[name] = merged.keys[name]
            node.keys = frame.keys
        if self._open:
            anchor = self._open.pop(id(node), None)
            if anchor is not None:
                self._anchors[anchor] = node
        self._add(node, node.at)

    def alias(self, event: Any, at: int) -> None:
        name = event.anchor
        if name not in self._anchors:
            # It is not named: a password may begin like this.
            raise _wrong(at, "no such anchor before this alias; put text that begins with * in quotes")
        node = self._anchors[name]
        if node is None:
            raise _wrong(at, f"the alias *{name} refers to a part of the file that contains it")
        if self._frame is not None and self._frame.mapping and self._frame.name is None:
            raise _wrong(at, "a key must be text, not an alias")
        self._add(node, at)

    def _add(self, node: TreeNode, at: int) -> None:
        frame = self._frame
        if frame is None:
            self.root = node
            return
        into = frame.node
        if isinstance(into.value, dict):
            name, frame.name = frame.name, None
            if name == _MERGE and name not in frame.keys:
                frame.merged = (frame.merged or []) + _merged(node, at)
                return
            into.value.setdefault(name, node)  # type: ignore[arg-type] # there is one: a value follows its key
        elif isinstance(into.value, list):
            into.value.append(node)
        into.size += node.size
        if into.size > LARGEST:
            raise _wrong(at, f"the file has more than {LARGEST:,} parts, with what its aliases repeat")


def _merged(node: TreeNode, at: int) -> list[TreeNode]:
    found = node.value if isinstance(node.value, list) else [node]
    if not all(isinstance(part.value, dict) for part in found):
        raise _wrong(at, "<<: takes an alias of a mapping, or a list of them")
    return found


def _safe_scalars() -> tuple[Mapping[str, Any], Mapping[str, Callable[[str], Scalar]]]:
    """Return PyYAML's resolvers of plain scalars, by first character, and its constructors."""
    import yaml

    constructor = yaml.constructor.SafeConstructor()

    def reading(construct: Callable[[yaml.ScalarNode], Scalar]) -> Callable[[str], Scalar]:
        return lambda text: construct(yaml.ScalarNode(_TAG, text))

    whole = reading(constructor.construct_yaml_int)
    return yaml.SafeLoader.yaml_implicit_resolvers, {
        "null": lambda _: None,
        "bool": reading(constructor.construct_yaml_bool),
        "int": lambda text: int(text) if text.isdigit() and text[0] != "0" else whole(text),
        "float": reading(constructor.construct_yaml_float),
    }


def _wrong(at: int, message: str) -> TreeError:
    return TreeError(*place(at), message)


def _bad_tag(tag: str, at: int) -> TreeError:
    if tag.startswith(_TAG):
        return _wrong(
            at, f"the tag {tag.replace(_TAG, '!!')[:60]} is not allowed: a file holds text, numbers, lists and mappings"
        )
    return _wrong(at, "tags are not allowed; put text that begins with ! in quotes")
