"""The codecs that have names: of applications, of installed packages, and ours for well-known libraries.

A value of such a type travels as the name of its codec and a state, which is packed like any other value. Codecs of
libraries are in modules of their own, which are imported with the first value of the library: none of them is loaded
for programs that do not use it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from msgspec.msgpack import Ext

from dfm_async.base.tasks import INTERRUPTS
from dfm_async.wire.codec.arrays import ARRAY_KINDS
from dfm_async.wire.codec.codec_engine import CodecEngine, Kind, Kinds, type_name
from dfm_async.wire.codec.kinds import VALUE_KINDS
from dfm_async.wire.codec.pickling import PICKLE_KINDS, pack_pickle

_log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP: Final = "dfm_async.codecs"
"""The group of entry points: each names a module that registers codecs when it is imported."""
LIBRARIES: Final = {
    "numpy": "masked_arrays",
    "pandas": "pandas_frames",
    "PIL": "pil_images",
    "polars": "polars_frames",
    "pyarrow": "arrow_tables",
    "scipy": "sparse_matrices",
    "torch": "torch_tensors",
    "xarray": "xarray_datasets",
}
"""By library: our module that registers the codecs of its types."""
_CODE: Final = 30
_CORE: Final = frozenset(
    {type(None), bool, int, float, str, bytes, list, dict}
    | {row.of for row in (*VALUE_KINDS, *ARRAY_KINDS) if row.of is not None}
)


class Unsupported(TypeError):
    """A codec of ours does not know this variant of a type. It is pickled where that is allowed, else refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCodec:
    """How the values of one type become data, and values again.

    Attributes:
        type: the type.
        name: what travels in place of the type.
        encode: turns a value into data.
        decode: turns data into a value.
        safe: whether ``decode`` may get untrusted data.
        subclasses: whether subclasses of the type are encoded in the same way.
        canonical: encodes for keys and fingerprints: equal values give equal data, whatever their layout in memory.
        preview: describes a value by plain data, with at most this number of elements.
        arrow: turns a value that is a table into one of Arrow; may raise anything. pyarrow may not be installed.
        pixels: turns a value that is an image into its width, height, number of channels (1, 3 or 4) and bytes, with at
            most this number of pixels in a row or column. May raise anything.
        ours: whether it is one of our own, for a library.
    """

    type: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    safe: bool = True
    subclasses: bool = False
    canonical: Callable[[Any], Any] | None = None
    preview: Callable[[Any, int], Any] | None = None
    arrow: Callable[[Any], Any] | None = None
    pixels: Callable[[Any, int], tuple[int, int, int, bytes]] | None = None
    ours: bool = False


class _Registry:
    """The codecs of this process. Threads may use it at the same time.

    The lock is not held during an import: modules that are imported add their codecs, in any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[str, NamedCodec] = {}
        self._types: dict[type, NamedCodec] = {}
        self._libraries: set[str] = set()
        self._missing: dict[str, ImportError] = {}
        self._installed = False
        self._failures: list[str] = []

    def add(self, codec: NamedCodec) -> None:
        with self._lock:
            same = self._names.get(codec.name)
            if same is not None and type_name(same.type) != type_name(codec.type):
                raise ValueError(f"the codec {codec.name!r} exists already, for {type_name(same.type)}")
            if same is not None:  # its module was loaded again
                self._types.pop(same.type, None)
            self._names[codec.name] = codec
            self._types[codec.type] = codec

    def of_type(self, kind: type) -> NamedCodec | None:
        """Return the codec of a type, if there is one."""
        found = self._types.get(kind)
        if found is not None:
            return found
        roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
        for library in roots & LIBRARIES.keys():
            self.load_library(library)
        for base in kind.__mro__:
            found = self._types.get(base)
            if found is not None and (base is kind or found.subclasses):
                return found
        return None

    def of_installed(self, kind: type) -> NamedCodec | None:
        """The same, after the codecs of installed packages were loaded."""
        self._load_installed()
        return self.of_type(kind)

    def of_name(self, name: Any) -> NamedCodec:
        """Return the codec with a name.

        Raises:
            LookupError: there is none.
        """
        if not isinstance(name, str):
            raise TypeError("the name of a codec must be a string")
        if name not in self._names:
            library = name.partition(".")[0]
            if library in LIBRARIES:
                self.load_library(library)
        if name not in self._names:
            self._load_installed()
        found = self._names.get(name)
        if found is None:
            failures = "".join(f"; {failure}" for failure in self._failures)
            raise LookupError(
                f"no codec named {name!r} is registered here. Install the package that registers it in this "
                f"environment, or import its module in the code of this site{failures}"
            )
        return found

    def of_applications(self) -> list[NamedCodec]:
        with self._lock:
            return [codec for codec in self._names.values() if not codec.ours]

    def load_library(self, library: str) -> None:
        """Import our module for a library. A failure is remembered: the next attempt would take as long.

        Raises:
            LookupError: the library, or one that it needs, cannot be imported.
        """
        if library in self._libraries:
            return
        error = self._missing.get(library)
        if error is None:
            try:
                importlib.import_module(f"dfm_async.wire.codec.libraries.{LIBRARIES[library]}")
            except ImportError as found:
                error = found.with_traceback(None)  # its frames hold the message that is being read
                with self._lock:
                    self._missing[library] = error
            else:
                with self._lock:
                    self._libraries.add(library)
                return
        if isinstance(error, ModuleNotFoundError):
            package = (error.name or library).partition(".")[0]
            reason = f"need the package {package!r}, which is not installed in this environment"
        else:
            reason = f"need the package {library!r}, which cannot be imported: {error}"
        raise LookupError(f"values of {library} {reason}") from error

    def _load_installed(self) -> None:
        """Import the modules that installed packages name, once. One that fails does not affect the others."""
        if self._installed:
            return
        from importlib.metadata import entry_points  # here: it takes longer to load than everything else of this

        failures = []
        for entry in entry_points(group=GROUP):
            try:
                entry.load()
            except Exception as error:  # noqa: BLE001 - the code of a package
                failures.append(f"the entry point {entry.name!r} ({entry.value}) of {GROUP} failed: {error!r}")
        with self._lock:
            self._failures, self._installed = failures, True
        for failure in failures:
            _log.warning(failure)


_registry: Final = _Registry()


def register(
    kind: type[T],
    *,
    name: str,
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
    safe: bool = True,
    subclasses: bool = False,
) -> None:
    """Make values of a type sendable: to other processes and sites, into stores and caches, and to programs.

    Call it in the module that defines the operations, or the type: worker processes get the codecs of the application,
    and FLARE sites those of the modules that they import.

    ``encode`` returns data that can be sent itself: plain values, containers, numpy arrays, data frames, values of
    other registered types. A ``memoryview`` in it, or an array, is a buffer: large ones travel in shared memory.
    ``decode`` gets the same data; memoryviews and arrays are read-only there.

    Args:
        kind: the type.
        name: the name that is sent in place of the type, such as ``"geo.Grid"``. It must be the same everywhere.
        encode: turns a value into data. Equal values should give equal data, for cache keys.
        decode: turns the data into a value. It should raise an error for data that ``encode`` does not return.
        safe: whether ``decode`` may get untrusted data. Pass False if it unpickles or runs parts of it: then the
            values are sent only between the processes of one application.
        subclasses: whether values of subclasses are encoded in the same way; they arrive as what ``decode`` returns.

    Raises:
        TypeError: the type or a function is not one.
        ValueError: the name belongs to another type or to a library, or values of this type can always be sent.
    """
    if not isinstance(kind, type):
        raise TypeError(f"codecs are registered for types, not for {kind!r}")
    if not callable(encode) or not callable(decode):
        raise TypeError(f"encode and decode of the codec {name!r} must be functions")
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a codec must be a string, not {name!r}")
    if kind in _CORE:
        raise ValueError(f"values of {type_name(kind)} are sent without a codec")
    if name.partition(".")[0] in LIBRARIES:
        raise ValueError(f"the name {name!r} is reserved: names that begin with the name of a library belong to ours")
    _registry.add(NamedCodec(type=kind, name=name, encode=encode, decode=decode, safe=safe, subclasses=subclasses))
    KINDS.changed()


def register_ours(*codecs: NamedCodec) -> None:
    """Add codecs of our own, for a library."""
    for codec in codecs:
        _registry.add(codec)


def load_library(library: str) -> None:
    """Import our codecs for a library.

    Raises:
        LookupError: the library cannot be imported.
    """
    _registry.load_library(library)


def registered() -> list[tuple[Any, ...]]:
    """Return the codecs of applications in a form that :func:`register_all` accepts in another process."""
    return [(c.type, c.name, c.encode, c.decode, c.safe, c.subclasses) for c in _registry.of_applications()]


def register_all(codecs: list[tuple[Any, ...]]) -> None:
    """Register the codecs of another process."""
    for kind, name, encode, decode, safe, subclasses in codecs:
        register(kind, name=name, encode=encode, decode=decode, safe=safe, subclasses=subclasses)


def preview(value: Any, items: int) -> Any:
    """Describe a value of a library by plain data with at most this number of elements, or return NotImplemented."""
    codec = _registry.of_type(type(value))
    return NotImplemented if codec is None or codec.preview is None else codec.preview(value, items)


def arrow_table(value: Any) -> Any:
    """Return a table of a library as one of Arrow, or None if the value is not a table; may raise anything."""
    codec = _registry.of_type(type(value))
    return None if codec is None or codec.arrow is None else codec.arrow(value)


def image_pixels(value: Any, side: int) -> tuple[int, int, int, bytes] | None:
    """Return the pixels of an image of a library, or None if the value is not an image; may raise anything."""
    codec = _registry.of_type(type(value))
    return None if codec is None or codec.pixels is None else codec.pixels(value, side)


def _known(_engine: CodecEngine, kind: type) -> bool:
    return _registry.of_type(kind) is not None


def _installed(engine: CodecEngine, kind: type) -> bool:
    # What can be pickled needs none of them: the search for entry points takes long.
    return not engine.trusted and _registry.of_installed(kind) is not None


def _codec_of(value: Any) -> NamedCodec:
    found = _registry.of_type(type(value))
    assert found is not None  # noqa: S101 - a family has matched
    return found


def _state(codec: NamedCodec, value: Any, *, canonical: bool) -> Any:
    encode = codec.canonical if canonical and codec.canonical is not None else codec.encode
    return encode(value)


def _pack(engine: CodecEngine, value: Any) -> Ext:
    codec = _codec_of(value)
    if not codec.safe and not engine.trusted:
        raise TypeError(f"its codec {codec.name!r} is only for the processes of one application (safe=False)")
    try:
        state = _state(codec, value, canonical=engine.mode.canonical)
    except Unsupported:
        if engine.trusted:
            return pack_pickle(engine, value)
        raise
    return Ext(_CODE, engine.dumps([codec.name, engine.pack_part(state)]))


def _unpack(engine: CodecEngine, data: memoryview) -> Any:
    name, state = engine.decode_list(data)
    engine.check_whole(state)
    codec = _registry.of_name(name)
    if not codec.safe and not engine.trusted:
        raise TypeError(f"values of the codec {name!r} are not accepted here (safe=False)")
    return codec.decode(state)


def _parts(value: Any) -> list[tuple[str, Any]]:
    try:
        return [("", _state(_codec_of(value), value, canonical=False))]
    except INTERRUPTS:
        raise
    except BaseException:  # noqa: BLE001 - what is explained is that this fails
        return []


KINDS: Final = Kinds(
    (
        Kind(code=_CODE, matches=_known, pack=_pack, unpack=_unpack, parts=_parts),
        *VALUE_KINDS,
        *ARRAY_KINDS,
        *PICKLE_KINDS,
        Kind(code=_CODE, matches=_installed, pack=_pack, unpack=_unpack, parts=_parts),
    ),
    otherwise=pack_pickle,
)
"""The table of all kinds. Registered codecs come before families of classes: a registered dataclass is encoded by its
own codec.
"""
