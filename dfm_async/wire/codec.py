"""Values to bytes and back, as what they were.

Plain values (None, booleans, 64-bit integers, floats, strings, bytes, lists, dicts) are MessagePack as it is.
Everything else becomes an extension: tuples, sets, datetimes, containers of ``collections``, enums, dataclasses,
pydantic models, numpy arrays. What no rule knows is pickled, but only by a codec that was made for the processes of our
own tree (``trusted=True``).

Encoding has two steps. :meth:`Codec.pack` takes a snapshot: it walks the value, copies its containers and fails for
what cannot travel. :meth:`Codec.dumps` then turns one snapshot, or a whole batch of them, into bytes. A producer can
change or reuse its value as soon as ``pack`` has returned.

A codec with an arena puts large buffers (arrays, bytes, buffers of pickled objects) into shared memory instead; what is
packed then only tells where they are. Arrays arrive read-only, whatever way they took.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import importlib
import itertools
import pathlib
import pickle
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.msgpack import Ext

from dfm_async.errors import EncodingError
from dfm_async.wire.by_value import dumps as by_value_dumps
from dfm_async.wire.classes import KnownClasses
from dfm_async.wire.map_keys import check_keys, may_have_large_maps
from dfm_async.wire.memory import LARGE, Allocator, Part, Payload, WritablePart
from dfm_async.wire.standard import STANDARD, offset_arguments, rebuild, state_of

__all__ = ["Broken", "Codec", "Packed", "type_name", "weight"]

_SCALARS: Final = frozenset({type(None), bool, float})
_KEYS: Final = frozenset({type(None), bool, float, bytes})
_PYDANTIC_STATE: Final = {"__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__"}
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
_BULK_FROM: Final = 8
_SAME_HASH: Final = 32
_HEAVY: Final = 4096
"""From how many bytes on a part counts for the weight of its value."""
_NUMBER: Final = 8
"""What a number weighs."""
_MANY: Final = 64
_SAMPLE: Final = 8


class _Code:
    """Extension types. The numbers are part of the format: never change one, only add."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    BIG_INT = 4
    COMPLEX = 5
    DATETIME = 6
    DATE = 7
    TIME = 8
    TIMEDELTA = 9
    UUID = 10
    DECIMAL = 11
    ENUM = 12
    DATACLASS = 13
    PYDANTIC = 14
    STRUCT = 15
    NAMED_TUPLE = 16
    BYTEARRAY = 17
    PATH = 18
    RANGE = 19
    ITEMS = 20
    NDARRAY = 21
    NUMPY_SCALAR = 22
    PICKLE = 23
    SURROGATES = 24
    PICKLE_BUFFERS = 25
    BYTES_BLOCK = 26
    BYTEARRAY_BLOCK = 27
    NDARRAY_BLOCK = 28
    STANDARD = 29


class Broken:
    """Stands where a part of a value could not be rebuilt."""

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


def weight(packed: Any) -> int:
    """About how many bytes a snapshot has; 0 for those that do not matter."""
    if type(packed) is Packed:
        return packed.size
    return len(packed) if type(packed) is msgspec.Raw and len(packed) >= _HEAVY else 0  # what is not read here


class _Notes(threading.local):
    """What comes up while a value is packed, or dumped, in one thread."""

    size = 0
    blocks: list[WritablePart] | None = None


def type_name(cls: type) -> str:
    """Names a type as people write it: builtins bare, everything else with its module."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


Packer = Callable[["Codec", Any], Any]


class Codec:
    """Encodes and decodes values.

    Args:
        trusted: True only between processes of one tree that we started ourselves: allows pickle for what no rule
            knows, and the import of the modules that classes live in. Without it, classes are looked up only among
            modules that are loaded already, and nothing is unpickled.
        canonical: equal dicts and sets give equal bytes, whatever their order; for keys and fingerprints.
        arena: where large buffers go. What such a codec packs is not for keeping: it is only good for messages.
        stored: for what is written to a file, and read by the same application later: nothing is pickled, and classes
            of the main script are found by their names.
        writable: arrays that it rebuilds can be written to.
        known: the classes that what it rebuilds may be of; None means any that are found. With it, only declared fields
            are taken.
    """

    def __init__(
        self,
        *,
        trusted: bool,
        canonical: bool = False,
        arena: Allocator | None = None,
        stored: bool = False,
        writable: bool = False,
        known: KnownClasses | None = None,
    ) -> None:
        self.trusted = trusted
        self.known = known
        self.canonical = canonical
        self.stored = stored
        self.writable = writable
        self.plain: Codec = self if arena is None else Codec(trusted=trusted, canonical=canonical, known=known)
        """The same without an arena: for what is kept."""
        self.own: Codec = self.plain if known is None else Codec(trusted=trusted, canonical=canonical)
        """The same for what was encoded here, and is of whatever class."""
        self._arena = arena
        self._notes = _Notes()
        order: Literal["deterministic"] | None = "deterministic" if canonical else None
        encoder = msgspec.msgpack.Encoder(enc_hook=_Unwrap(self._notes), order=order)
        self.dumps: Callable[[Any], bytes] = encoder.encode
        """Turns a snapshot, or a list of them, into bytes. Those with parts in shared memory need a payload."""
        self._packers: dict[type, Packer] = dict(_PACKERS)
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)
        self._broken: Broken | None = None
        self._suspect = False  # whether what is being read may have large maps of untrusted keys
        self._parts: dict[int, Part] = {}

    # encoding

    def pack(self, value: Any) -> Any:
        """Takes a snapshot of a value in a form that :meth:`dumps` accepts.

        Raises:
            EncodingError: a part of the value cannot travel; names its type and the path to it.
        """
        kind = type(value)
        if kind in _SCALARS or (kind is int and _INT_MIN <= value <= _INT_MAX):
            return value
        if (kind is bytes or (kind is str and value.isascii())) and len(value) < _HEAVY:
            return value
        notes = self._notes
        try:
            packed = self._pack(value)
        except BaseException as error:  # noqa: BLE001 - it is raised again, as what it means
            failure = self._failure(value, error)
            notes.size, notes.blocks = 0, None
            raise failure from failure.__cause__
        if notes.size:
            packed = Packed(packed, notes.size, notes.blocks or ())
            notes.size, notes.blocks = 0, None
        return packed

    def _failure(self, value: Any, error: BaseException) -> EncodingError:
        if isinstance(error, EncodingError):
            return error
        if isinstance(error, RecursionError):
            return self._refusal(type(value), "value", "it contains itself, or is nested too deeply")
        failure = self._explain(value, error)
        failure.__cause__ = error
        return failure

    def payload(self, values: Any) -> bytes | Payload:
        """Turns a snapshot, or a list of them, into the payload of a message, which keeps the blocks it tells of."""
        if self._arena is None:
            return self.dumps(values)
        notes = self._notes
        notes.blocks = []
        try:
            data = self.dumps(values)
            found = notes.blocks
        finally:
            notes.blocks = None
        return Payload(data, list({block.offset: block for block in found}.values())) if found else data

    def encode(self, value: Any) -> bytes:
        """Packs and dumps one value."""
        return self.dumps(self.pack(value))

    def _pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is str:
            if len(value) >= _HEAVY:
                self.note(len(value))
            return value if _is_text(value) else Ext(_Code.SURROGATES, value.encode("utf-8", "surrogatepass"))
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else Ext(_Code.BIG_INT, _int_bytes(value))
        if kind is list:
            return self._pack_list(value)
        if kind is bytes:
            return value if len(value) < _HEAVY else self._pack_bytes(value)
        if kind is dict:
            pack = self._pack
            packed = {}
            for key, item in value.items():
                if not (type(key) is str and key.isascii()) and (
                    not _is_key(key) or (self.canonical and type(key) is not str)
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
                self._note_many(list(itertools.islice(packed.items(), _SAMPLE)), len(packed))
            return packed
        packer = self._packers.get(kind)
        if packer is None:
            packer = self._packers[kind] = self._find_packer(kind)
        return packer(self, value)

    def _pack_items(self, value: dict[Any, Any]) -> Ext:
        """A dict with keys that MessagePack does not know."""
        items = [[self._pack(k), self._pack(v)] for k, v in value.items()]
        if self.canonical:
            items.sort(key=lambda entry: self.dumps(entry[0]))
        return Ext(_Code.ITEMS, self.dumps(items))

    def _pack_list(self, value: list[Any]) -> list[Any]:
        count = len(value)
        if count >= _BULK_FROM:
            kinds = set(map(type, value))
            if kinds <= _SCALARS or (kinds == {int} and min(value) >= _INT_MIN and max(value) <= _INT_MAX):
                self.note(count * _NUMBER)
                return value[:]
            if kinds == {bytes} or (kinds == {str} and all(map(str.isascii, value))):
                size = sum(map(len, value))
                if size < _HEAVY or max(map(len, value)) < _HEAVY:
                    self.note(size)
                    return value[:]
        pack = self._pack
        packed = [item if type(item) in _SCALARS else pack(item) for item in value]
        if count >= _MANY:
            self._note_many(packed[:_SAMPLE], count)
        return packed

    def _note_many(self, sample: list[Any], count: int) -> None:
        """Counts the elements of a long container that do not count for themselves, by the first of them."""
        size = len(self.dumps(sample))
        if size < _HEAVY:
            self.note(size * count // len(sample))

    def _pack_bytes(self, value: bytes) -> Any:
        block = self.store(value)
        return value if block is None else Ext(_Code.BYTES_BLOCK, self.dumps([block.offset, block.size]))

    def note(self, size: int) -> None:
        """For packers: counts a part for the weight of the value, if it matters."""
        if size >= _HEAVY:
            self._notes.size += size

    def reserve(self, size: int) -> WritablePart | None:
        """For packers: gives a block that travels with the value, if these bytes shall not travel with the message."""
        if size < _HEAVY:
            return None
        self._notes.size += size
        if size < LARGE or self._arena is None:
            return None
        return self._noted(self._arena.allocate(size))

    def adopt(self, data: memoryview) -> WritablePart | None:
        """For packers: the same for bytes that need not be copied; None if they must be."""
        if len(data) < LARGE or self._arena is None:
            return None
        block = self._noted(self._arena.adopt(data))
        if block is not None:
            self._notes.size += len(data)
        return block

    def _noted(self, block: WritablePart | None) -> WritablePart | None:
        if block is not None:
            notes = self._notes
            if notes.blocks is None:
                notes.blocks = []
            notes.blocks.append(block)
        return block

    def store(self, data: bytes | bytearray | memoryview) -> WritablePart | None:
        """For packers: the same, with these bytes in it."""
        block = self.adopt(memoryview(data))
        if block is None:
            block = self.reserve(len(data))
            if block is not None:
                block.buffer[:] = data
        return block

    def _find_packer(self, kind: type) -> Packer:
        # A class of a script, or of a function, is shipped by value: see _pickled.
        if _importable(kind) or (self.stored and kind.__module__ == "__main__" and "<" not in kind.__qualname__):
            if issubclass(kind, enum.Enum):
                return _pack_enum
            if issubclass(kind, tuple) and hasattr(kind, "_fields"):
                return _pack_named_tuple
            if issubclass(kind, msgspec.Struct):
                return _pack_struct
            if hasattr(kind, "__pydantic_fields__") and hasattr(kind, "model_validate"):
                return _pack_pydantic
            if dataclasses.is_dataclass(kind) and kind.__reduce_ex__ is object.__reduce_ex__:
                return _pack_dataclass
        root = kind.__module__.partition(".")[0]
        if root == "numpy":
            numpy = sys.modules["numpy"]
            if kind is numpy.ndarray:
                return _pack_ndarray
            if issubclass(kind, numpy.generic):
                return _pack_numpy_scalar
        if issubclass(kind, pathlib.PurePath):
            return _pack_path
        return _pickled

    def _explain(self, value: Any, error: BaseException) -> EncodingError:
        """Finds the part of a value that cannot be encoded. Runs only after a failure."""
        path = "value"
        while True:
            for step, part in _parts(value):
                try:
                    self._pack(part)
                except BaseException as inner:  # noqa: BLE001 - this is what is being looked for
                    value, error, path = part, inner, path + step
                    break
            else:
                return self._refusal(type(value), path, str(error) or type(error).__name__)

    def _refusal(self, kind: type, path: str, reason: str) -> EncodingError:
        return EncodingError(type_name(kind), path, reason, *[True] * self.stored)

    # decoding

    def loads(self, data: bytes | memoryview | Payload) -> Any:
        """Rebuilds one value.

        Raises:
            EncodingError: the bytes are not a value, or a part of it cannot be rebuilt here.
        """
        value = self._loads(data)
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise EncodingError("value", "value", f"it cannot be rebuilt here: {broken.error}") from broken.error
        return value

    def loads_batch(self, data: bytes | memoryview | Payload) -> list[Any]:
        """Rebuilds a list of values. One that cannot be rebuilt is a :class:`Broken`; the others are not affected."""
        values = self._loads(data)
        if not isinstance(values, list):
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
            self._suspect = not self.trusted and may_have_large_maps(data)  # type: ignore[arg-type]
            return self.decode(data)  # type: ignore[arg-type]
        except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
            self._broken = None
            raise EncodingError("value", "value", f"the bytes are not a value: {error}") from error
        finally:
            if self._parts:
                self._parts = {}

    def decode(self, data: bytes | memoryview) -> Any:
        """For unpackers: rebuild what an extension holds."""
        if self._suspect:
            check_keys(data)
        return self._decoder.decode(data)

    def part(self, offset: int, size: int) -> memoryview:
        """For unpackers: the bytes of a block of the message that is being read, read-only."""
        found = self._parts.get(offset)
        if found is None or found.size != size:
            raise LookupError(f"the message has no block of {size} bytes at {offset}")
        return found.view()

    def _extension(self, code: int, data: memoryview) -> Any:
        try:
            return _UNPACKERS[code](self, data)
        except BaseException as error:  # noqa: BLE001 - one part must not spoil the rest of a batch
            if self._parts:
                _let_go(error)
            self._broken = Broken(error)
            return self._broken

    def resolve(self, ref: str) -> Any:
        """Finds a class by ``module:qualname``."""
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
        if self.known is not None and not self.known.allows(found):
            raise LookupError(f"class {ref!r} is not taken from others: {self.known.why_not}")
        return found


class _Unwrap:
    """Gives the encoder what snapshots stand for; their blocks go to whoever makes a payload."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def __call__(self, value: Any) -> Any:
        if type(value) is not Packed:
            raise TypeError(f"a value of type {type_name(type(value))} was not packed")
        if value.blocks:
            if self._notes.blocks is None:
                raise TypeError("parts of the value are in shared memory: it can only travel in a payload")
            self._notes.blocks.extend(value.blocks)
        return value.tree


def _let_go(error: BaseException) -> None:
    """Keeps where an error came from as text only: it may be kept for long, and its frames have the whole message."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _is_text(value: str) -> bool:
    """Tells whether UTF-8 can hold a string. Names of files can have lone surrogates, which it cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_MAIN: Final = "__main__"
"""The module that is another one in every process: what it has does not travel by its name."""


def _is_key(key: Any) -> bool:
    kind = type(key)
    if kind is str:
        return _is_text(key)
    if kind is int:
        return bool(_INT_MIN <= key <= _INT_MAX)
    return kind in _KEYS


def _importable(kind: type) -> bool:
    """Tells whether another process finds this class by its name."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found is kind and kind.__module__ != "__main__"


def _ref(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _parts(value: Any) -> list[tuple[str, Any]]:
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
        items = [part for _, part in _parts(value)] or list(getattr(value, "__dict__", {}).values())
    for item in items:
        found = _find_broken(item)
        if found is not None:
            return found
    return None


# One packer and one unpacker per extension.


def _pack_tuple(codec: Codec, value: Any) -> Ext:
    return Ext(_Code.TUPLE, codec.dumps([codec._pack(item) for item in value]))  # noqa: SLF001 - same module


def _set(code: int) -> Packer:
    def pack(codec: Codec, value: Any) -> Ext:
        items = [codec._pack(item) for item in value]  # noqa: SLF001 - same module
        if codec.canonical:
            items.sort(key=codec.dumps)
        return Ext(code, codec.dumps(items))

    return pack


def _text(code: int, to_text: Callable[[Any], str] = str) -> Packer:
    def pack(_codec: Codec, value: Any) -> Ext:
        return Ext(code, to_text(value).encode())

    return pack


def _object(code: int, codec: Codec, kind: type, state: Any) -> Ext:
    return Ext(code, codec.dumps([_ref(kind), codec._pack(state)]))  # noqa: SLF001 - same module


def _pack_enum(codec: Codec, value: enum.Enum) -> Any:
    if isinstance(value, enum.Flag):  # a combination of flags has no name of its own
        return _object(_Code.ENUM, codec, type(value), [None, value.value])
    return _object(_Code.ENUM, codec, type(value), [value.name, None])


def _pack_named_tuple(codec: Codec, value: Any) -> Any:
    return _object(_Code.NAMED_TUPLE, codec, type(value), list(value))


def _pack_struct(codec: Codec, value: msgspec.Struct) -> Any:
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return _object(_Code.STRUCT, codec, type(value), fields)


def _pack_dataclass(codec: Codec, value: Any) -> Any:
    state = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    state.update(getattr(value, "__dict__", {}))
    return _object(_Code.DATACLASS, codec, type(value), state)


def _pack_pydantic(codec: Codec, value: Any) -> Any:
    return _object(_Code.PYDANTIC, codec, type(value), value.__getstate__())


_PATHS: Final = {
    kind.__name__: kind
    for kind in (
        *(pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(pathlib.Path, pathlib.PosixPath, pathlib.WindowsPath),
    )
}
_PATH_MODULES: Final = frozenset({"pathlib", "pathlib._local"})
"""Where the classes of paths say that they are from: that depends on the version of Python."""


def _pack_path(codec: Codec, value: pathlib.PurePath) -> Any:
    kind = type(value)
    ref = f"pathlib:{kind.__name__}" if _PATHS.get(kind.__name__) is kind else _ref(kind)
    return Ext(_Code.PATH, codec.dumps([ref, str(value)]))


def _pack_ndarray(codec: Codec, value: Any) -> Any:
    numpy = sys.modules["numpy"]
    if value.dtype.hasobject:
        return _pickled(codec, value)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    description = numpy.lib.format.dtype_to_descr(value.dtype)
    head = [codec._pack(description), list(value.shape), order]  # noqa: SLF001 - same module
    contiguous = value.flags.c_contiguous or value.flags.f_contiguous
    block = None
    if contiguous and value.nbytes >= LARGE:
        block = codec.adopt(memoryview(value.ravel(order="K").view(numpy.uint8)))
    if block is not None:
        return Ext(_Code.NDARRAY_BLOCK, codec.dumps([*head, block.offset, block.size]))
    block = codec.reserve(value.nbytes)
    if block is None:
        return Ext(_Code.NDARRAY, codec.dumps([*head, value.tobytes(order)]))
    stored = numpy.frombuffer(block.buffer, dtype=numpy.uint8)
    if contiguous:
        numpy.copyto(stored, value.ravel(order="K").view(numpy.uint8))  # also what is between the fields of a record
    else:
        numpy.copyto(stored.view(value.dtype).reshape(value.shape, order=order), value)
    return Ext(_Code.NDARRAY_BLOCK, codec.dumps([*head, block.offset, block.size]))


def _pack_numpy_scalar(codec: Codec, value: Any) -> Any:
    if value.dtype.hasobject:
        return _pickled(codec, value)
    description = sys.modules["numpy"].lib.format.dtype_to_descr(value.dtype)
    return Ext(_Code.NUMPY_SCALAR, codec.dumps([codec._pack(description), value.tobytes()]))  # noqa: SLF001


def _is_data(kind: type) -> bool:
    """Tells whether a class would be sent field by field, if another process could find it by its name."""
    plain = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or hasattr(kind, "__pydantic_fields__")
    return plain or issubclass(kind, (enum.Enum, msgspec.Struct))


def _pickled(codec: Codec, value: Any) -> Any:
    kind = type(value)
    if not codec.trusted:
        rule = "a store takes nothing that is pickled" if codec.stored else "pickle is not allowed here"
        if _is_data(kind) and not _importable(kind):
            raise TypeError(f"{rule}, and only this process knows its class; put it in a module")
        raise TypeError(f"{rule}, and no codec knows this type")
    data, kept = _dump(value, by_value=kind.__module__ != "builtins" and not _importable(kind))
    buffers: list[Any] = []
    for buffer in kept:
        raw = buffer.raw()
        block = codec.store(raw)
        # Never within the pickle: there it would arrive writable, which one in shared memory cannot.
        buffers.append(bytes(raw) if block is None else [block.offset, block.size])
    codec.note(len(data))
    return Ext(_Code.PICKLE_BUFFERS, codec.dumps([data, buffers])) if buffers else Ext(_Code.PICKLE, data)


def _dump(value: Any, *, by_value: bool) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickles a value: by value where a class of it lives in ``__main__``, in a notebook, or in a function."""
    buffers: list[pickle.PickleBuffer] = []
    if not by_value:
        try:
            data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if _MAIN not in str(error):
                raise
        else:
            if _MAIN.encode() not in data:
                return data, buffers
        buffers = []
    return by_value_dumps(value, buffers.append), buffers


def _has_plain_offset(value: dt.datetime | dt.time) -> bool:
    """Whether ISO 8601 tells everything about its time zone."""
    zone = value.tzinfo
    return zone is None or (type(zone) is dt.timezone and len(offset_arguments(zone)) == 1)


def _pack_datetime(codec: Codec, value: dt.datetime) -> Any:
    if _has_plain_offset(value):
        return Ext(_Code.DATETIME, codec.dumps([value.isoformat(), value.fold]))
    return _pack_standard(codec, value)  # keeps the time zone's rules, not only its offset


def _pack_time(codec: Codec, value: dt.time) -> Any:
    if _has_plain_offset(value):
        return Ext(_Code.TIME, codec.dumps([value.isoformat(), value.fold]))
    return _pack_standard(codec, value)


def _pack_standard(codec: Codec, value: Any) -> Any:
    try:
        name, state = state_of(value)
    except TypeError:
        if codec.trusted:
            return _pickled(codec, value)
        raise
    return Ext(_Code.STANDARD, codec.dumps([name, codec._pack(state)]))  # noqa: SLF001 - same module


def _pack_timedelta(codec: Codec, value: dt.timedelta) -> Any:
    return Ext(_Code.TIMEDELTA, codec.dumps([value.days, value.seconds, value.microseconds]))


def _pack_complex(codec: Codec, value: complex) -> Any:
    return Ext(_Code.COMPLEX, codec.dumps([value.real, value.imag]))


def _pack_range(codec: Codec, value: range) -> Any:
    ends = [codec._pack(number) for number in (value.start, value.stop, value.step)]  # noqa: SLF001 - same module
    return Ext(_Code.RANGE, codec.dumps(ends))


def _pack_bytearray(codec: Codec, value: bytearray) -> Any:
    block = codec.store(value)
    if block is None:
        return Ext(_Code.BYTEARRAY, bytes(value))
    return Ext(_Code.BYTEARRAY_BLOCK, codec.dumps([block.offset, block.size]))


_PACKERS: Final[dict[type, Packer]] = {
    **dict.fromkeys(STANDARD, _pack_standard),
    tuple: _pack_tuple,
    set: _set(_Code.SET),
    frozenset: _set(_Code.FROZENSET),
    complex: _pack_complex,
    dt.datetime: _pack_datetime,
    dt.date: _text(_Code.DATE, dt.date.isoformat),
    dt.time: _pack_time,
    dt.timedelta: _pack_timedelta,
    uuid.UUID: _text(_Code.UUID),
    decimal.Decimal: _text(_Code.DECIMAL),
    bytearray: _pack_bytearray,
    range: _pack_range,
}


def _list_of(codec: Codec, data: memoryview) -> list[Any]:
    found = codec.decode(data)
    if not isinstance(found, list):
        raise TypeError("a list was expected")
    return found


def _keys(codec: Codec, values: list[Any]) -> list[Any]:
    """Refuse keys of untrusted data that share one hash: a set or dict of n of them takes n * n comparisons."""
    if not codec.trusted and len(values) > _SAME_HASH:
        seen: dict[int, int] = {}
        for value in values:
            key = hash(value)
            count = seen[key] = seen.get(key, 0) + 1
            if count > _SAME_HASH:
                raise ValueError(f"more than {_SAME_HASH} keys of a set or dict have the same hash")
    return values


def _unpack_items(codec: Codec, data: memoryview) -> dict[Any, Any]:
    items = _list_of(codec, data)
    _keys(codec, [key for key, _ in items])
    return dict(items)


def _class_and_state(codec: Codec, data: memoryview, base: type | None = None) -> tuple[type, Any]:
    ref, state = _list_of(codec, data)
    kind = codec.resolve(ref)
    if base is not None and not issubclass(kind, base):
        raise TypeError(f"{ref} is not a {base.__name__}")
    return kind, state


def _unpack_enum(codec: Codec, data: memoryview) -> Any:
    kind, (name, value) = _class_and_state(codec, data, enum.Enum)
    return kind[name] if name is not None else kind(value)  # type: ignore[index]


def _unpack_named_tuple(codec: Codec, data: memoryview) -> Any:
    kind, state = _class_and_state(codec, data, tuple)
    return kind._make(state)  # type: ignore[attr-defined]


def _unpack_struct(codec: Codec, data: memoryview) -> Any:
    kind, state = _class_and_state(codec, data, msgspec.Struct)
    return kind(**state)


def _unpack_dataclass(codec: Codec, data: memoryview) -> Any:
    kind, state = _class_and_state(codec, data)
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__qualname__} is not a dataclass")
    missing = {field.name for field in dataclasses.fields(kind)} - state.keys()
    if missing:
        raise TypeError(f"{kind.__qualname__} lacks {', '.join(sorted(missing))}")
    if codec.known is not None:
        state = {field.name: state[field.name] for field in dataclasses.fields(kind)}
    value = object.__new__(kind)
    for name, item in state.items():
        object.__setattr__(value, name, item)
    return value


def _unpack_pydantic(codec: Codec, data: memoryview) -> Any:
    kind, state = _class_and_state(codec, data)
    if not hasattr(kind, "__pydantic_fields__"):
        raise TypeError(f"{kind.__qualname__} is not a pydantic model")
    whole = isinstance(state, dict) and state.keys() == _PYDANTIC_STATE
    if not whole or not isinstance(state["__dict__"], dict) or not isinstance(state["__pydantic_fields_set__"], set):
        raise TypeError(f"this is not the state of a {kind.__qualname__}")
    if not all(isinstance(state[name], (dict, type(None))) for name in ("__pydantic_extra__", "__pydantic_private__")):
        raise TypeError(f"this is not the state of a {kind.__qualname__}")
    if codec.known is not None:
        state = _declared_state(kind, state)
    value: Any = object.__new__(kind)
    value.__setstate__(state)
    return value


def _declared_state(kind: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Of the state of a model, what the model declares."""
    private, extra = state["__pydantic_private__"], state["__pydantic_extra__"]
    fields, hidden = kind.__pydantic_fields__, getattr(kind, "__private_attributes__", {})
    return {
        "__dict__": {name: value for name, value in state["__dict__"].items() if name in fields},
        "__pydantic_extra__": extra if kind.model_config.get("extra") == "allow" else None,
        "__pydantic_fields_set__": {name for name in state["__pydantic_fields_set__"] if name in fields},
        "__pydantic_private__": private and {name: value for name, value in private.items() if name in hidden},
    }


def _unpack_path(codec: Codec, data: memoryview) -> Any:
    ref, state = _list_of(codec, data)
    module, _, name = ref.partition(":")
    known = _PATHS.get(name) if module in _PATH_MODULES else None
    if known is not None:
        return known(state)
    kind, state = _class_and_state(codec, data, pathlib.PurePath)
    return kind(state)


def _dtype(codec: Codec, description: Any) -> Any:
    import numpy

    return numpy.lib.format.descr_to_dtype(description)


def _unpack_ndarray(codec: Codec, data: memoryview) -> Any:
    import numpy

    description, shape, order, content = _list_of(codec, data)
    if codec.writable:
        content = bytearray(content)
    return numpy.frombuffer(content, dtype=_dtype(codec, description)).reshape(shape, order=order)


def _unpack_ndarray_block(codec: Codec, data: memoryview) -> Any:
    import numpy

    description, shape, order, offset, size = _list_of(codec, data)
    content = codec.part(offset, size)
    return numpy.frombuffer(content, dtype=_dtype(codec, description)).reshape(shape, order=order)


def _unpack_numpy_scalar(codec: Codec, data: memoryview) -> Any:
    import numpy

    description, content = _list_of(codec, data)
    dtype = _dtype(codec, description)
    # An empty string has no bytes that it could be read from.
    return numpy.frombuffer(content, dtype=dtype)[0] if dtype.itemsize else dtype.type()


def _unpickle(codec: Codec, data: memoryview) -> Any:
    if not codec.trusted:
        raise TypeError("pickled values are not accepted here")
    return _frozen(pickle.loads(data))  # noqa: S301 - only a codec for our own process tree gets here


def _unpickle_buffers(codec: Codec, data: memoryview) -> Any:
    if not codec.trusted:
        raise TypeError("pickled values are not accepted here")
    content, found = _list_of(codec, data)
    buffers = [part if isinstance(part, bytes) else codec.part(*part) for part in found]
    return _frozen(pickle.loads(content, buffers=buffers))  # noqa: S301 - as above


def _frozen(value: Any) -> Any:
    """An array of objects is pickled; it is read-only like all the others."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        value.flags.writeable = False
    return value


def _unpack_datetime(codec: Codec, data: memoryview) -> Any:
    text, fold = _list_of(codec, data)
    return dt.datetime.fromisoformat(text).replace(fold=fold)


def _unpack_time(codec: Codec, data: memoryview) -> Any:
    text, fold = _list_of(codec, data)
    return dt.time.fromisoformat(text).replace(fold=fold)


def _unpack_standard(codec: Codec, data: memoryview) -> Any:
    name, state = _list_of(codec, data)
    if type(state) is Broken:
        raise state.error
    return rebuild(name, state)


def _unpack_range(codec: Codec, data: memoryview) -> range:
    start, stop, step = _list_of(codec, data)
    return range(start, stop, step)


_UNPACKERS: Final[dict[int, Callable[[Codec, memoryview], Any]]] = {
    _Code.TUPLE: lambda codec, data: tuple(_list_of(codec, data)),
    _Code.SET: lambda codec, data: set(_keys(codec, _list_of(codec, data))),
    _Code.FROZENSET: lambda codec, data: frozenset(_keys(codec, _list_of(codec, data))),
    _Code.BIG_INT: lambda _codec, data: int.from_bytes(data, "little", signed=True),
    _Code.COMPLEX: lambda codec, data: complex(*_list_of(codec, data)),
    _Code.DATETIME: _unpack_datetime,
    _Code.DATE: lambda _codec, data: dt.date.fromisoformat(str(data, "utf-8")),
    _Code.TIME: _unpack_time,
    _Code.TIMEDELTA: lambda codec, data: dt.timedelta(*_list_of(codec, data)),
    _Code.UUID: lambda _codec, data: uuid.UUID(str(data, "utf-8")),
    _Code.DECIMAL: lambda _codec, data: decimal.Decimal(str(data, "utf-8")),
    _Code.ENUM: _unpack_enum,
    _Code.DATACLASS: _unpack_dataclass,
    _Code.PYDANTIC: _unpack_pydantic,
    _Code.STRUCT: _unpack_struct,
    _Code.NAMED_TUPLE: _unpack_named_tuple,
    _Code.BYTEARRAY: lambda _codec, data: bytearray(data),
    _Code.PATH: _unpack_path,
    _Code.RANGE: _unpack_range,
    _Code.ITEMS: _unpack_items,
    _Code.NDARRAY: _unpack_ndarray,
    _Code.NUMPY_SCALAR: _unpack_numpy_scalar,
    _Code.PICKLE: _unpickle,
    _Code.PICKLE_BUFFERS: _unpickle_buffers,
    _Code.BYTES_BLOCK: lambda codec, data: bytes(codec.part(*_list_of(codec, data))),
    _Code.BYTEARRAY_BLOCK: lambda codec, data: bytearray(codec.part(*_list_of(codec, data))),
    _Code.NDARRAY_BLOCK: _unpack_ndarray_block,
    _Code.STANDARD: _unpack_standard,
    _Code.SURROGATES: lambda _codec, data: str(data, "utf-8", "surrogatepass"),
}
