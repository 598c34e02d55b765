"""Values to bytes and back, with their types.

Plain values (None, booleans, 64-bit integers, floats, strings, bytes, lists, dicts) are MessagePack as they are.
Everything else becomes an extension: tuples, sets, datetimes, containers of ``collections``, enums, dataclasses,
pydantic models, numpy arrays. :mod:`.kinds` has one row for each of them. Types that applications register, and those
of well-known libraries, have named codecs (:mod:`.registry`). Values that no row knows are pickled, but only by a codec
for the processes of our own tree.

Encoding has two steps. :meth:`Codec.pack` takes a snapshot: it walks the value, copies its containers and fails for
what cannot travel. :meth:`Codec.dumps` then turns one snapshot, or a whole batch of them, into bytes. A producer can
change or reuse its value as soon as ``pack`` has returned.

A codec with an arena puts large buffers (arrays, bytes, buffers of pickled objects) into shared memory instead; the
snapshot then only refers to them.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

from dfm_async.wire.codec.codec_engine import Broken, CodecEngine, Mode, Packed, type_name, weight
from dfm_async.wire.codec.pickling import dumps_by_value
from dfm_async.wire.codec.registry import KINDS
from dfm_async.wire.codec.untrusted import KnownClasses
from dfm_async.wire.memory import Allocator

__all__ = ["Broken", "Codec", "KnownClasses", "Packed", "dumps_by_value", "type_name", "weight"]


class Codec(CodecEngine):
    """Encodes and decodes values, in one of the modes that its named constructors make."""

    def __init__(self, mode: Mode, arena: Allocator | None = None) -> None:
        super().__init__(KINDS, mode, arena)

    @classmethod
    def for_processes(cls, arena: Allocator | None = None) -> Codec:
        """Make a codec for the processes of one tree that we started ourselves: it pickles what no kind knows.

        Args:
            arena: where large buffers go. What such a codec packs is only good for messages, not for keeping.
        """
        return cls(Mode(trusted=True), arena)

    @classmethod
    def for_untrusted(cls, known: KnownClasses | None = None) -> Codec:
        """Make a codec for untrusted data: nothing is pickled, and no module is imported.

        Args:
            known: the classes that rebuilt values may be of; None means those of all loaded modules.
        """
        return cls(Mode(known=known))

    @classmethod
    def for_store(cls) -> Codec:
        """Make a codec for files that the same application reads later, with the classes of its main script."""
        return cls(Mode(stored=True))

    @classmethod
    def for_programs(cls, arena: Allocator | None = None) -> Codec:
        """Make a codec for programs outside the federation, which may write to the arrays that they get.

        Args:
            arena: where the buffers go that travel beside a message.
        """
        return cls(Mode(writable=True), arena)

    def for_keys(self) -> Codec:
        """Make the codec for keys and fingerprints: equal dicts and sets give equal bytes, whatever their order."""
        return Codec(dataclasses.replace(self.mode, canonical=True, known=None))

    @cached_property
    def plain(self) -> Codec:
        """The same without an arena, for values that are kept."""
        return self if self._arena is None else Codec(self.mode)

    @cached_property
    def own(self) -> Codec:
        """The same for values that were encoded here, of whichever class."""
        return self.plain if self.mode.known is None else Codec(dataclasses.replace(self.mode, known=None))
