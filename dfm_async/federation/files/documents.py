"""The files of a federation: reads each once, and follows what they refer to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from dfm_async.errors import FederationError, FileProblem
from dfm_async.federation.files.tree import TreeError, TreeNode, read_tree, tree_of
from dfm_async.federation.files.values import Document, FileValue, Ledger, TooMuch

REF: Final = "$ref"
_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_FILES: Final = 256
_LONGEST_CHAIN: Final = 32


class Documents:
    """All files that belong together, beginning with one.

    ``data`` is its content, if it is not a file; paths are then relative to the working directory. If they are
    ``confined``, references may lead only to files below the folder of the first one.
    """

    def __init__(
        self, path: str | os.PathLike[str], data: Mapping[str, Any] | None = None, *, confined: bool = False
    ) -> None:
        self.ledger = Ledger()
        self._folder = os.path.dirname(os.path.realpath(path)) if confined else None
        self.files: list[str] = []
        self._read: dict[str, Document | None] = {}
        self._tables: dict[int, dict[str, FileValue]] = {}  # merged mappings, for references into them
        self._strays: dict[str, dict[str, tuple[FileValue, str]]] = {}
        self._name = name = os.fspath(path)
        self.root = self._open(name, name, None) if data is None else self._take(name, data)

    # files

    def _take(self, name: str, data: Mapping[str, Any]) -> Document | None:
        try:
            return Document(name, os.getcwd(), tree_of(data), self.ledger)
        except TreeError as error:
            self._failed(name, None, error.message)
            return None

    def _open(self, name: str, path: str, asked: FileValue | None) -> Document | None:
        key = os.path.realpath(path) if "\0" not in path else path
        if key in self._read:
            return self._read[key]
        if len(self._read) >= _MOST_FILES:
            self._failed(name, asked, f"more than {_MOST_FILES} files belong together; that is not allowed")
            return None
        self._read[key] = None
        try:
            node, twice = read_tree(_text(name, path, asked))
        except _Unreadable as error:
            self._failed(name, asked, str(error))
            return None
        except TreeError as error:
            self.ledger.add(FileProblem(name, error.line, error.column, "", error.message))
            return None
        for found in twice:
            self.ledger.add(FileProblem(name, found.line, found.column, found.key, found.message))
        self.files.append(os.path.abspath(path))
        document = self._read[key] = Document(name, os.path.dirname(key), node or TreeNode(None, 0), self.ledger)
        return document

    def _failed(self, name: str, asked: FileValue | None, message: str) -> None:
        if asked is None:
            self.ledger.add(FileProblem(name, 0, 0, "", message))
        else:
            asked.problem(message)

    @contextmanager
    def reading(self) -> Iterator[FileValue]:
        """Give the content of the first file. At the end, raise a FederationError that lists all problems."""
        if self.root is not None:
            try:
                yield FileValue(self.root.root, self.root)
            except TooMuch as error:
                error.at.problem("the files and their references are together larger than allowed")
        self._report_strays()
        if self.ledger.problems:
            problems = sorted(self.ledger.problems, key=lambda found: (found.file, found.line, found.column))
            raise FederationError(self._name, problems)

    # references

    def follow(self, value: FileValue, *, alone: bool = True) -> FileValue | None:
        """Resolve the ``$ref`` of a value, if it has one; None if invalid. ``alone``: no other key may be beside it."""
        seen: set[int] = set()
        while value.has(REF):
            if id(value.node) in seen or len(seen) >= _LONGEST_CHAIN:
                value.problem("this reference refers to itself")
                return None
            seen.add(id(value.node))
            if alone and not value.only(REF):
                beside = ", ".join(repr(name) for name, _ in value.mapping("a reference") if name != REF)
                value.problem(f"$ref must be the only key; remove {beside}")
                return None
            found = self.referred(value)
            if found is None:
                return None
            value = found
        return value

    def referred(self, value: FileValue) -> FileValue | None:
        """Return the target of the ``$ref`` of a value; None if that is invalid."""
        ref = value.get(REF)
        if ref is None:
            return None
        if not isinstance(ref.node.value, str):
            ref.problem(f'$ref must name one object here, such as "parts.yaml#/sites/alpha", not {ref.kind}')
            return None
        return self._target(ref, ref.node.value, ())

    def entries(self, value: FileValue, what: str, active: tuple[int, ...] = ()) -> Iterator[tuple[str, FileValue]]:
        """Yield the items of a mapping, with everything that its ``$ref: [...]`` merges into it."""
        taken: dict[str, FileValue] = {}
        for name, part in self._merged(value, what, active):
            if name in taken:
                first = taken[name]
                part.problem(f"duplicate {name!r}, first in {first.place}")
                continue
            taken[name] = part
            yield name, part

    def _merged(self, value: FileValue, what: str, active: tuple[int, ...]) -> Iterator[tuple[str, FileValue]]:
        for name, part in value.mapping(what):
            if name != REF:
                yield name, part
        refs = value.get(REF)
        if refs is None:
            return
        if not isinstance(refs.node.value, list):
            refs.problem(f'$ref must be a list here, such as ["parts.yaml#/operations"], not {refs.kind}')
            return
        if id(value.node) in active or len(active) >= _LONGEST_CHAIN:
            refs.problem("these references refer to themselves")
            return
        for ref in refs.items("$ref"):
            text = ref.text("a reference")
            found = None if text is None else self._target(ref, text, (*active, id(value.node)))
            if found is None:
                continue
            if not isinstance(found.node.value, dict):
                ref.problem(f"{text!r} is not a mapping that could be merged, but {found.kind}")
                continue
            yield from self._merged(found, what, (*active, id(value.node)))

    def _target(self, ref: FileValue, text: str, active: tuple[int, ...]) -> FileValue | None:
        file, hash_sign, pointer = text.partition("#")
        if "://" in file:
            ref.problem(f"{text!r}: only files can be referred to, by their paths; save it next to this one")
            return None
        if not file and not hash_sign:
            ref.problem('a reference is empty; write "file#/key" or "#/key"')
            return None
        document: Document | None = ref.document
        if file:
            document = self._beside(ref, file)
        if document is None:
            return None  # problems of the file were reported when it was read
        at = FileValue(document.root, document)
        if pointer in ("", "/"):
            return at
        if not pointer.startswith("/"):
            ref.problem(f"{text!r}: a path that begins with / must follow #, such as #/operations")
            return None
        for part in unquote(pointer)[1:].split("/"):
            step = self._step(at, part.replace("~1", "/").replace("~0", "~"), active)
            if step is None:
                ref.problem(f"{text!r} does not exist: there is no {part!r} in {at.path or at.document.name}")
                return None
            at = step
        return at

    def _beside(self, ref: FileValue, file: str) -> Document | None:
        """Open a file whose path begins at the one that names it; else where the program runs, as all do in DFM."""
        path = os.path.join(ref.document.folder, file)
        if self._folder is not None:
            if "\0" not in file and not os.path.realpath(path).startswith(os.path.join(self._folder, "")):
                ref.problem(f"{file!r} leads out of the folder of the federation file, which packages= does not allow")
                return None
            return self._open(_shown(ref.document.name, file), path, ref)
        if "\0" in file or os.path.lexists(path) or not os.path.isfile(file):
            return self._open(_shown(ref.document.name, file), path, ref)
        better = Path(os.path.relpath(file, ref.document.folder)).as_posix()
        self._strays.setdefault(ref.document.name, {}).setdefault(file, (ref, better))
        return self._open(file, file, ref)

    def _report_strays(self) -> None:
        """Log references that are found only where the program runs: one warning for each file that has some."""
        strays, self._strays = self._strays, {}
        for found in strays.values():
            file, (ref, better) = next(iter(found.items()))
            others = f" {len(found) - 1} others in this file are alike." if len(found) > 1 else ""
            ref.doubt(
                f"{file} is found only in the working directory; write {better!r}, which is found everywhere.{others}"
            )

    def _step(self, at: FileValue, key: str, active: tuple[int, ...]) -> FileValue | None:
        found = at.get(key)
        if found is not None:
            return found
        node = at.node.value
        if isinstance(node, list) and key.isascii() and key.isdigit() and len(key) < 9 and int(key) < len(node):
            return at.child(key, node[int(key)])
        if not at.has(REF) or id(at.node) in active:
            return None
        table = self._tables.get(id(at.node))
        if table is None:
            table = {}
            for name, part in self._merged(at, "what is merged", active):
                table.setdefault(name, part)
            if not active:  # else it may lack what is being merged just now
                self._tables[id(at.node)] = table
        return table.get(key)


class _Unreadable(Exception):
    pass


def _text(name: str, path: str, asked: FileValue | None) -> str:
    named = "" if asked is None else f"{name} "  # what was asked for is named anyway
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _Unreadable(f"{named}is not a file" + (", but a folder" if os.path.isdir(path) else ""))
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = "the file does not exist" if isinstance(error, FileNotFoundError) else _reason(error)
        raise _Unreadable(f"{named}cannot be read: {reason}{_elsewhere(path, asked)}") from None
    if len(data) > _MOST_BYTES:
        raise _Unreadable(f"{named}is larger than {_MOST_BYTES // 1024**2} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise TreeError(line, column, "this is not UTF-8 text") from None


def _shown(beside: str, file: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(beside), file))


def _elsewhere(path: str, asked: FileValue | None) -> str:
    """Return a hint where a relative path begins: at the file that holds it, or where the program runs."""
    if asked is None:
        return "" if os.path.isabs(path) else f". The program runs in {os.getcwd()}"
    return ". Paths begin at the folder of the file that holds them"


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
