"""YAML as a tree that knows where each of its parts stands. Nothing is built but text, numbers, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

__all__ = ["DEEPEST", "LARGEST", "Node", "Scalar", "TreeError", "read_tree"]

DEEPEST: Final = 64
"""How deep a file may be nested."""
LARGEST: Final = 400_000
"""How many parts a file may have, with everything that its aliases repeat."""

Scalar: TypeAlias = str | int | float | bool | None

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = {_TAG + kind: kind for kind in ("str", "int", "float", "bool", "null")}
_GROUPS: Final = {_TAG + "map", _TAG + "seq"}
_MERGE: Final = "<<"


class Node:
    """A part of a file.

    Attributes:
        value: text, a number, a boolean, None, a list of nodes, or nodes by their keys.
        line: where it begins, from 1.
        column: where it begins, from 1.
        size: of how many parts it consists, with what aliases repeat.
        keys: where each key stands, for a mapping.
    """

    __slots__ = ("column", "keys", "line", "size", "value")

    def __init__(self, value: Scalar | list[Node] | dict[str, Node], line: int, column: int) -> None:
        self.value = value
        self.line = line
        self.column = column
        self.size = 1
        self.keys: Mapping[str, tuple[int, int]] = {}


class TreeError(Exception):
    """Something that cannot be read: where, and why."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(line, column, message)
        self.line = line
        self.column = column
        self.message = message


class _Frame:
    """A list or mapping that is being read."""

    __slots__ = ("at", "keys", "merged", "name", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.keys: dict[str, tuple[int, int]] = {}
        self.merged: list[Node] = []
        self.name: str | None = None  # the key whose value comes next
        self.at = (0, 0)


def read_tree(text: str) -> tuple[Node | None, list[TreeError]]:
    """Reads one YAML document.

    Returns:
        its root, None if it is empty, and the keys that stand there twice.

    Raises:
        TreeError: it is no YAML, or larger or deeper than allowed, or has tags.
    """
    import yaml  # here, because whoever has no files does not need it

    composer = _Composer()
    takers = {
        yaml.ScalarEvent: composer.scalar,
        yaml.MappingStartEvent: composer.begin_mapping,
        yaml.SequenceStartEvent: composer.begin_list,
        yaml.MappingEndEvent: composer.end,
        yaml.SequenceEndEvent: composer.end,
        yaml.AliasEvent: composer.alias,
        yaml.DocumentStartEvent: composer.document,
    }
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            take = takers.get(type(event))
            if take is not None:
                mark = event.start_mark
                take(event, mark.line + 1, mark.column + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (0, 0) if mark is None else (mark.line + 1, mark.column + 1)
        raise TreeError(line, column, f"this is not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise TreeError(line, column, f"this is not YAML: {error.reason}") from None
    return composer.root, composer.twice


class _Composer:
    """Puts events together, without recursion: what is nested too deep must not end the process."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self.twice: list[TreeError] = []
        self._stack: list[_Frame] = []
        self._anchors: dict[str, Node | None] = {}
        self._open: dict[int, str] = {}
        self._documents = 0
        self._resolvers, self._constructors = _safe_scalars()

    def document(self, _event: Any, line: int, column: int) -> None:
        self._documents += 1
        if self._documents > 1:
            raise TreeError(line, column, "a second document begins here; a file holds one")

    def scalar(self, event: Any, line: int, column: int) -> None:
        frame = self._stack[-1] if self._stack else None
        text: str = event.value
        if frame is not None and frame.name is None and isinstance(frame.node.value, dict):
            if event.tag is not None and event.tag not in _PLAIN_TAGS and event.tag != "!":
                raise _bad_tag(event.tag, line, column)
            self._key(frame, text, line, column, merges=event.implicit[0] and text == _MERGE)
            if event.anchor is not None:
                self._anchors[event.anchor] = Node(text, line, column)
            return
        node = Node(self._value(event, text, line, column), line, column)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._add(node, line, column)

    def _value(self, event: Any, text: str, line: int, column: int) -> Scalar:
        if event.tag is None or event.tag == "!":
            if not event.implicit[0]:
                return text
            kind = "str"
            for tag, pattern in self._resolvers.get(text[:1], ()):
                if pattern.match(text):
                    kind = _PLAIN_TAGS.get(tag, "str")  # dates stay text, as in JSON
                    break
        elif event.tag in _PLAIN_TAGS:
            kind = _PLAIN_TAGS[event.tag]
        else:
            raise _bad_tag(event.tag, line, column)
        if kind == "str":
            return text
        try:
            return self._constructors[kind](text)
        except (ValueError, KeyError, IndexError, OverflowError):
            raise TreeError(line, column, f"{text[:40]!r} is no {kind} that can be read") from None

    def _key(self, frame: _Frame, text: str, line: int, column: int, *, merges: bool) -> None:
        frame.name, frame.at = text, (line, column)
        if merges:
            return
        if text in frame.keys:
            first = frame.keys[text][0]
            self.twice.append(TreeError(line, column, f"the key {text!r} stands here twice, first in line {first}"))
        else:
            frame.keys[text] = frame.at

    def begin_mapping(self, event: Any, line: int, column: int) -> None:
        self._begin(event, Node({}, line, column))

    def begin_list(self, event: Any, line: int, column: int) -> None:
        self._begin(event, Node([], line, column))

    def _begin(self, event: Any, node: Node) -> None:
        line, column = node.line, node.column
        if event.tag is not None and event.tag not in _GROUPS and event.tag != "!":
            raise _bad_tag(event.tag, line, column)
        if len(self._stack) >= DEEPEST:
            raise TreeError(line, column, f"this is nested deeper than {DEEPEST} levels")
        if self._stack and self._stack[-1].name is None and isinstance(self._stack[-1].node.value, dict):
            raise TreeError(line, column, "a key must be text, not a list or a mapping")
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # an alias to it from inside would make it contain itself
            self._open[id(node)] = event.anchor
        self._stack.append(_Frame(node))

    def end(self, _event: Any, _line: int, _column: int) -> None:
        frame = self._stack.pop()
        node = frame.node
        if isinstance(node.value, dict):
            for merged in frame.merged:
                for name, value in merged.value.items():  # type: ignore[union-attr] # only mappings are kept there
                    if name not in node.value:
                        node.value[name] = value
                        node.size += value.size
                        frame.keys[name] = merged.keys[name]
            node.keys = frame.keys
        anchor = self._open.pop(id(node), None)
        if anchor is not None:
            self._anchors[anchor] = node
        self._add(node, node.line, node.column)

    def alias(self, event: Any, line: int, column: int) -> None:
        name = event.anchor
        if name not in self._anchors:
            raise TreeError(line, column, f"there is no anchor &{name} before this alias")
        node = self._anchors[name]
        if node is None:
            raise TreeError(line, column, f"the alias *{name} would make a part of the file contain itself")
        if self._stack and self._stack[-1].name is None and isinstance(self._stack[-1].node.value, dict):
            raise TreeError(line, column, "a key must be text, not an alias")
        self._add(node, line, column)

    def _add(self, node: Node, line: int, column: int) -> None:
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        into = frame.node
        if isinstance(into.value, list):
            into.value.append(node)
        elif isinstance(into.value, dict) and frame.name is not None:
            name, frame.name = frame.name, None
            if name == _MERGE and name not in frame.keys:
                frame.merged += _merged(node, line, column)
                return
            into.value.setdefault(name, node)
        into.size += node.size
        if into.size > LARGEST:
            raise TreeError(line, column, f"the file has more than {LARGEST:,} parts, with what its aliases repeat")


def _merged(node: Node, line: int, column: int) -> list[Node]:
    found = node.value if isinstance(node.value, list) else [node]
    if not all(isinstance(part.value, dict) for part in found):
        raise TreeError(line, column, "<<: takes an alias of a mapping, or a list of them")
    return found


def _safe_scalars() -> tuple[Mapping[str, Any], Mapping[str, Callable[[str], Scalar]]]:
    """How PyYAML tells what a plain scalar is, by its first character, and how it reads one."""
    import yaml

    constructor = yaml.constructor.SafeConstructor()

    def reading(construct: Callable[[yaml.ScalarNode], Scalar]) -> Callable[[str], Scalar]:
        return lambda text: construct(yaml.ScalarNode(_TAG, text))

    return yaml.SafeLoader.yaml_implicit_resolvers, {
        "null": lambda _: None,
        "bool": reading(constructor.construct_yaml_bool),
        "int": reading(constructor.construct_yaml_int),
        "float": reading(constructor.construct_yaml_float),
    }


def _bad_tag(tag: str, line: int, column: int) -> TreeError:
    shown = tag.replace(_TAG, "!!")
    return TreeError(
        line, column, f"the tag {shown[:60]} is not allowed: a file holds text, numbers, lists and mappings"
    )
