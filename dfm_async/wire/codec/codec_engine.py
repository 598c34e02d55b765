"""The engine of the codec: snapshots of values, bytes, and values again, by a table of kinds."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec.msgpack import Ext

from dfm_async.errors import EncodingError
from dfm_async.wire.codec.untrusted import KnownClasses, check_keys, may_have_large_maps
from dfm_async.wire.memory import LARGE, Allocator, Payload, SharedBlock, WritablePart

_SCALARS: Final = frozenset({type(None), bool, float})
_KEYS: Final = frozenset({type(None), bool, float, bytes})
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
_BULK_FROM: Final = 8
_HEAVY: Final = 4096
"""The number of bytes from which a part counts for the weight of its value."""
_NUMBER: Final = 8
"""The weight of a number."""
_MANY: Final = 64
_SAMPLE: Final = 8
BIG_INT: Final = 4
"""The codes of the extensions that the engine itself makes."""
ITEMS: Final = 20
SURROGATES: Final = 24
BYTES_BLOCK: Final = 26


class Broken:
    """Stands for a part of a value that could not be rebuilt."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Packed:
    """The snapshot of a value that is heavy, or has parts in shared memory, which it keeps."""

    __slots__ = ("blocks", "size", "tree")

    def __init__(self, tree: Any, size: int, blocks: Sequence[WritablePart]) -> None:
        self.tree = tree
        self.size = size
        self.blocks = blocks


def weight(*snapshots: Any) -> int:
    """Return the approximate size of snapshots in bytes; small ones do not count."""
    size = 0
    for packed in snapshots:
        if type(packed) is Packed:
            size += packed.size
        elif type(packed) is msgspec.Raw and len(packed) >= _HEAVY:  # an opaque value
            size += len(packed)
    return size


def type_name(cls: type) -> str:
    """Return the name of a type as people write it: builtins bare, everything else with its module."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


Packer: TypeAlias = "Callable[[CodecEngine, Any], Any]"
Unpacker: TypeAlias = "Callable[[CodecEngine, memoryview], Any]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How the values of one type, or of one family of types, become an extension, and values again.

    Attributes:
        code: the number of the extension. It is part of the format: never change one, only add.
        of: the type, exactly; None for a family, or for what the engine itself packs.
        matches: for a family: whether a type belongs to it.
        pack: makes the extension.
        unpack: rebuilds the value.
        parts: for error messages: the parts that the extension is made of, each with the step that leads to it.
    """

    code: int
    of: type | None = None
    matches: Callable[[CodecEngine, type], bool] | None = None
    pack: Packer | None = None
    unpack: Unpacker
    parts: Callable[[Any], list[tuple[str, Any]]] | None = None


class Kinds:
    """The table of kinds, and how the values that no kind knows are packed."""

    def __init__(self, rows: Sequence[Kind], otherwise: Packer) -> None:
        self.packers: dict[type, Packer] = {row.of: row.pack for row in rows if row.of and row.pack}
        self.unpackers: dict[int, Unpacker] = {row.code: row.unpack for row in rows}
        self._families = [row for row in rows if row.matches is not None]
        self._otherwise = otherwise
        self._engines: weakref.WeakSet[CodecEngine] = weakref.WeakSet()

    def packer(self, engine: CodecEngine, kind: type) -> Packer:
        """Return the packer for a type that has no row of its own."""
        for row in self._families:
            if row.matches is not None and row.pack is not None and row.matches(engine, kind):
                return row.pack
        return self._otherwise

    def parts(self, engine: CodecEngine, value: Any) -> list[tuple[str, Any]]:
        """Return the parts of a value, each with the step that leads to it."""
        kind = type(value)
        for row in self._families:
            if row.parts is not None and row.matches is not None and row.matches(engine, kind):
                return row.parts(value)
        return _children(value)

    def used_by(self, engine: CodecEngine) -> None:
        """Add an engine that is notified when a family has changed."""
        self._engines.add(engine)

    def changed(self) -> None:
        """Notify the engines that a family has changed: they look up packers again."""
        for engine in list(self._engines):
            engine.forget()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """What a codec may do.

    Attributes:
        trusted: allows pickle for what no kind knows, and the import of the modules of classes. Without it, classes
            are looked up only among modules that are loaded already, and nothing is unpickled.
        canonical: equal dicts and sets give equal bytes, whatever their order.
        stored: nothing is pickled, and classes of the main script are found by their names.
        writable: arrays that it rebuilds can be written to.
        known: the classes that rebuilt values may be of; None means any that are found. With it, only declared fields
            are accepted.
    """

    trusted: bool = False
    canonical: bool = False
    stored: bool = False
    writable: bool = False
    known: KnownClasses | None = None


class _Collected(threading.local):
    """The weight and the blocks of the value that is packed or dumped in this thread."""

    size = 0
    blocks: list[WritablePart] | None = None


class CodecEngine:
    """Encodes and decodes values by a table of kinds."""

    def __init__(self, kinds: Kinds, mode: Mode, arena: Allocator | None) -> None:
        self.mode = mode
        self.trusted = mode.trusted
        self._kinds = kinds
        self._canonical = mode.canonical
        self._arena = arena
        self._collected = _Collected()
        order: Literal["deterministic"] | None = "deterministic" if mode.canonical else None
        encoder = msgspec.msgpack.Encoder(enc_hook=self._unwrap, order=order)
        self.dumps: Callable[[Any], bytes] = encoder.encode
        """Turns a snapshot, or a list of them, into bytes. Those with parts in shared memory need a payload."""
        self._packers: dict[type, Packer] = dict(kinds.packers)
        self._unpackers = kinds.unpackers
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)
        self._broken: Broken | None = None
        self._suspect = False  # whether the value that is being read may have large maps of untrusted keys
        self._parts: dict[int, SharedBlock] = {}
        kinds.used_by(self)

    def forget(self) -> None:
        """Look up the packers of all types again."""
        self._packers = dict(self._kinds.packers)

    # encoding

    def pack(self, value: Any) -> Any:
        """Take a snapshot of a value in a form that :meth:`dumps` accepts.

        Raises:
            EncodingError: a part of the value cannot travel; names its type and the path to it.
        """
        kind = type(value)
        if kind in _SCALARS or (kind is int and _INT_MIN <= value <= _INT_MAX):
            return value
        if (kind is bytes or (kind is str and value.isascii())) and len(value) < _HEAVY:
            return value
        collected = self._collected
        try:
            packed = self.pack_part(value)
        except BaseException as error:  # noqa: BLE001 - it is raised again, as what it means
            failure = self._failure(value, error)
            collected.size, collected.blocks = 0, None
            raise failure from failure.__cause__
        if collected.size:
            packed = Packed(packed, collected.size, collected.blocks or ())
            collected.size, collected.blocks = 0, None
        return packed

    def payload(self, values: Any) -> bytes | Payload:
        """Turn a snapshot, or a list of them, into the payload of a message, which keeps the blocks it refers to."""
        if self._arena is None:
            return self.dumps(values)
        collected = self._collected
        collected.blocks = []
        try:
            data = self.dumps(values)
            found = collected.blocks
        finally:
            collected.blocks = None
        return Payload(data, list({block.offset: block for block in found}.values())) if found else data

    def _unwrap(self, value: Any) -> Any:
        """Give the encoder the contents of a snapshot; its blocks go to the payload that is being made."""
        if type(value) is not Packed:
            raise TypeError(f"a value of type {type_name(type(value))} was not packed")
        if value.blocks:
            if self._collected.blocks is None:
                raise TypeError("parts of the value are in shared memory: it can only travel in a payload")
            self._collected.blocks.extend(value.blocks)
        return value.tree

    def encode(self, value: Any) -> bytes:
        """Pack and dump one value."""
        return self.dumps(self.pack(value))

    def pack_part(self, value: Any) -> Any:
        """For kinds: take a snapshot of a part of a value."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is str:
            if len(value) >= _HEAVY:
                self.count(len(value))
            return value if _is_text(value) else Ext(SURROGATES, value.encode("utf-8", "surrogatepass"))
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else Ext(BIG_INT, _int_bytes(value))
        if kind is list:
            return self._pack_list(value)
        if kind is bytes:
            return value if len(value) < _HEAVY else self._pack_bytes(value)
        if kind is dict:
            pack = self.pack_part
            packed = {}
            for key, item in value.items():
                if not (type(key) is str and key.isascii()) and (
                    not _is_key(key) or (self._canonical and type(key) is not str)
                ):
                    return self._pack_items(value)
                kind = type(item)
                if (
                    kind in _SCALARS
                    or (kind is int and _INT_MIN <= item <= _INT_MAX)
                    or (kind is str and len(item) < _HEAVY and item.isascii())
                ):
                    packed[key] = item  # the usual cases, without a call for each
                else:
                    packed[key] = pack(item)
            if len(packed) >= _MANY:
                self._count_many(list(itertools.islice(packed.items(), _SAMPLE)), len(packed))
            return packed
        packer = self._packers.get(kind)
        if packer is None:
            packer = self._packers[kind] = self._kinds.packer(self, kind)
        return packer(self, value)

    def _pack_items(self, value: dict[Any, Any]) -> Ext:
        """Pack a dict with keys that MessagePack does not know."""
        items = [[self.pack_part(k), self.pack_part(v)] for k, v in value.items()]
        if self._canonical:
            items.sort(key=lambda entry: self.dumps(entry[0]))
        return Ext(ITEMS, self.dumps(items))

    def _pack_list(self, value: list[Any]) -> list[Any]:
        count = len(value)
        if count >= _BULK_FROM:
            kinds = set(map(type, value))
            if kinds <= _SCALARS or (kinds == {int} and min(value) >= _INT_MIN and max(value) <= _INT_MAX):
                self.count(count * _NUMBER)
                return value[:]
            if kinds == {bytes} or (kinds == {str} and all(map(str.isascii, value))):
                size = sum(map(len, value))
                if size < _HEAVY or max(map(len, value)) < _HEAVY:
                    self.count(size)
                    return value[:]
        pack = self.pack_part
        packed = [item if type(item) in _SCALARS else pack(item) for item in value]
        if count >= _MANY:
            self._count_many(packed[:_SAMPLE], count)
        return packed

    def _pack_bytes(self, value: bytes) -> Any:
        block = self.store(value)
        return value if block is None else Ext(BYTES_BLOCK, self.dumps([block.offset, block.size]))

    def count(self, size: int) -> None:
        """For kinds: add a part to the weight of the value, if it is large."""
        if size >= _HEAVY:
            self._collected.size += size

    def _count_many(self, sample: list[Any], count: int) -> None:
        """Add the small elements of a long container to the weight, estimated by the first of them."""
        size = len(self.dumps(sample))
        if size < _HEAVY:
            self.count(size * count // len(sample))

    def reserve(self, size: int) -> WritablePart | None:
        """For kinds: return a block that travels beside the message, for bytes that should not travel in it."""
        if size < _HEAVY:
            return None
        self._collected.size += size
        if size < LARGE or self._arena is None:
            return None
        return self._keep(self._arena.allocate(size))

    def adopt(self, data: memoryview) -> WritablePart | None:
        """For kinds: return the block that bytes are in already; None if they must be copied."""
        if len(data) < LARGE or self._arena is None:
            return None
        block = self._keep(self._arena.adopt(data))
        if block is not None:
            self._collected.size += len(data)
        return block

    def _keep(self, block: WritablePart | None) -> WritablePart | None:
        if block is not None:
            collected = self._collected
            if collected.blocks is None:
                collected.blocks = []
            collected.blocks.append(block)
        return block

    def store(self, data: bytes | bytearray | memoryview) -> WritablePart | None:
        """For kinds: return a block with these bytes; None if they should travel in the message."""
        block = self.adopt(memoryview(data))
        if block is None:
            block = self.reserve(len(data))
            if block is not None:
                block.buffer[:] = data
        return block

    def _failure(self, value: Any, error: BaseException) -> EncodingError:
        if isinstance(error, EncodingError):
            return error
        if isinstance(error, RecursionError):
            return self._refusal(type(value), "value", "it contains itself, or is nested too deeply")
        failure = self._explain(value, error)
        failure.__cause__ = error
        return failure

    def _explain(self, value: Any, error: BaseException) -> EncodingError:
        """Find the part of a value that cannot be encoded. Runs only after a failure."""
        path = "value"
        while True:
            for step, part in self._kinds.parts(self, value):
                try:
                    self.pack_part(part)
                except BaseException as inner:  # noqa: BLE001 - this is what is being looked for
                    value, error, path = part, inner, path + step
                    break
            else:
                reason = str(error) or type(error).__name__
                if "<locals>" in getattr(value, "__qualname__", type(value).__qualname__) and not isinstance(
                    error, EncodingError
                ):
                    reason += ". Define it at the top level of its module"
                return self._refusal(type(value), path, reason)

    def _refusal(self, kind: type, path: str, reason: str) -> EncodingError:
        return EncodingError(type_name(kind), path, reason, stored=self.mode.stored)

    # decoding

    def loads(self, data: bytes | memoryview | Payload) -> Any:
        """Rebuild one value.

        Raises:
            EncodingError: the bytes are not a value, or a part of it cannot be rebuilt here.
        """
        value = self._loads(data)
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise EncodingError("value", "value", f"it cannot be rebuilt here: {broken.error}") from broken.error
        return value

    def loads_batch(self, data: bytes | memoryview | Payload) -> list[Any]:
        """Rebuild a list of values. One that cannot be rebuilt is a :class:`Broken`; the others are not affected."""
        values = self._loads(data)
        if type(values) is not list:
            self._broken = None
            raise EncodingError("value", "value", "a batch was expected")
        if self._broken is not None:
            self._broken = None
            for index, value in enumerate(values):
                found = _find_broken(value)
                if found is not None:
                    values[index] = found
        return values

    def _loads(self, data: bytes | memoryview | Payload) -> Any:
        self._broken = None
        try:
            if type(data) is Payload:
                self._parts = {part.offset: part for part in data.blocks}
                data = data.data
            if self.trusted:
                return self._decoder.decode(data)  # type: ignore[arg-type]
            self._suspect = may_have_large_maps(data)  # type: ignore[arg-type]
            return self.decode(data)  # type: ignore[arg-type]
        except (ValueError, RecursionError, TypeError) as error:
            self._broken = None
            raise EncodingError("value", "value", f"the bytes are not a value: {error}") from error
        finally:
            if self._parts:
                self._parts = {}

    def decode(self, data: bytes | memoryview) -> Any:
        """For kinds: rebuild the contents of an extension."""
        if self._suspect:
            check_keys(data)
        return self._decoder.decode(data)

    def decode_list(self, data: memoryview) -> list[Any]:
        """For kinds: rebuild the contents of an extension, which must be a list."""
        found = self.decode(data)
        if not isinstance(found, list):
            raise TypeError("a list was expected")
        return found

    def check_whole(self, state: Any) -> None:
        """For kinds: raise the error of a part that could not be rebuilt, if there is one in a state."""
        found = None if self._broken is None else _find_broken(state)
        if found is not None:
            raise found.error

    def part(self, offset: int, size: int) -> memoryview:
        """For kinds: return the bytes of a block of the message that is being read, read-only."""
        found = self._parts.get(offset)
        if found is None or found.size != size:
            raise LookupError(f"the message has no block of {size} bytes at {offset}")
        return found.view()

    def _extension(self, code: int, data: memoryview) -> Any:
        try:
            return self._unpackers[code](self, data)
        except BaseException as error:  # noqa: BLE001 - one part must not spoil the rest of a batch
            if self._parts:
                _drop_frames(error)
            self._broken = Broken(error)
            return self._broken

    def resolve(self, ref: str) -> Any:
        """For kinds: find a class by ``module:qualname``."""
        module_name, _, qualname = ref.partition(":")
        module = sys.modules.get(module_name)
        if module is None:
            if not self.trusted:
                raise LookupError(f"module {module_name!r} is not loaded here: import it first")
            module = importlib.import_module(module_name)
        found: Any = module
        for part in qualname.split("."):  # not getattr: that can run code of the module
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if not isinstance(found, type):
            raise TypeError(f"{ref!r} is not a class")
        known = self.mode.known
        if known is not None and not known.allows(found):
            raise LookupError(f"class {ref!r} is not accepted from others: {known.why_not}")
        return found


def _drop_frames(error: BaseException) -> None:
    """Keep the traceback of an error as text only: the error may live long, and its frames hold the whole message."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _is_text(value: str) -> bool:
    """Return whether UTF-8 can hold a string. Names of files can have lone surrogates, which it cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_key(key: Any) -> bool:
    kind = type(key)
    if kind is str:
        return _is_text(key)
    if kind is int:
        return bool(_INT_MIN <= key <= _INT_MAX)
    return kind in _KEYS


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a value, each with the step that leads to it."""
    if isinstance(value, dict):
        return [(f"[{k!r}]", v) for k, v in value.items()] + [(f".key({k!r})", k) for k in value]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(f".item({v!r})", v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, msgspec.Struct):
        return [(f".{name}", getattr(value, name)) for name in value.__struct_fields__]
    if hasattr(type(value), "model_validate"):
        return [(f".{k}", v) for k, v in vars(value).items()]
    return []


def _find_broken(value: Any) -> Broken | None:
    if isinstance(value, Broken):
        return value
    if isinstance(value, dict):
        items: list[Any] = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        items = list(value)
    else:
        items = [part for _, part in _children(value)]
        if dataclasses.is_dataclass(value):
            items += getattr(value, "__dict__", {}).values()
    for item in items:
        found = _find_broken(item)
        if found is not None:
            return found
    return None
