"""Previews of values that are images, as files of a few raster formats that browsers show.

Files are passed on as they are: what decodes them is the browser, which is made for untrusted ones. Pixels, of arrays
and of images that were decoded already, are written as PNG.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dfm_async.base.tasks import INTERRUPTS
from dfm_async.wire.codec.registry import Unsupported, image_pixels

SIDE: Final = 1024
"""The most pixels of a side of a preview; of larger images, some pixels are left out."""
_FILE: Final = 16 * 1024 * 1024
"""The most bytes of a file that is passed on."""
_PIXELS: Final = 50_000_000
"""The most pixels that it may claim: a small file can take much memory where it is decoded."""
_SEGMENTS: Final = 1000
"""The number of segments of a JPEG among which its size is searched."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_COLOURS: Final = {1: 0, 3: 2, 4: 6}
"""The colour type of a PNG by the number of its channels: grey, RGB, RGBA."""
_FRAME_HEADERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of JPEG segments that have the size of the image."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image as a file: its media type and its content."""

    media: str
    data: bytes


def image_file(value: Any) -> ImageFile | None:
    """Return a value that is an image as a file, or None if it is not an image.

    Images are those of Pillow, arrays of bytes with the shape of an image, and bytes that begin as a PNG, a JPEG or a
    WebP file. Takes a while for large ones.

    Raises:
        Unsupported: the image is too large, or cannot be read.
    """
    try:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return _checked_file(memoryview(value).cast("B"))
        pixels = _array_pixels(value) or image_pixels(value, SIDE)
        return None if pixels is None else ImageFile("image/png", _png(*pixels))
    except (Unsupported, *INTERRUPTS):
        raise
    except BaseException as error:  # the libraries of users
        raise Unsupported(f"the image cannot be read: {error}") from error


def _checked_file(data: memoryview) -> ImageFile | None:
    head = bytes(data[:32])
    for media, begins, size_of in _FORMATS:
        if not begins(head):
            continue
        if len(data) > _FILE:
            raise Unsupported(f"the file has {len(data):,} bytes; previews have at most {_FILE:,}")
        size = size_of(data)
        if size is None:
            raise Unsupported(f"the size of the image cannot be found in this file of the type {media}")
        width, height = size
        if width * height > _PIXELS:
            raise Unsupported(f"the image has {width:,} x {height:,} pixels; previews have at most {_PIXELS:,}")
        return ImageFile(media, bytes(data))
    return None


def _png_size(data: memoryview) -> tuple[int, int] | None:
    if len(data) < 24 or bytes(data[12:16]) != b"IHDR":
        return None
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _jpeg_size(data: memoryview) -> tuple[int, int] | None:
    at = 2
    for _ in range(_SEGMENTS):
        if len(data) < at + 9 or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker in _FRAME_HEADERS:
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        (length,) = struct.unpack(">H", data[at + 2 : at + 4])
        at += 2 + max(2, length)
    return None


def _webp_size(data: memoryview) -> tuple[int, int] | None:
    if len(data) < 30:
        return None
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", data[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


_Size = Callable[[memoryview], "tuple[int, int] | None"]
_FORMATS: Final[tuple[tuple[str, Callable[[bytes], bool], _Size], ...]] = (
    ("image/png", lambda head: head.startswith(_PNG), _png_size),
    ("image/jpeg", lambda head: head.startswith(_JPEG), _jpeg_size),
    ("image/webp", lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP", _webp_size),
)
"""The formats of files: the media type, whether a file begins like one, and the width and height that it claims."""
IMAGES: Final = tuple(media for media, _, _ in _FORMATS)
"""The media types of previews."""


def _array_pixels(value: Any) -> tuple[int, int, int, bytes] | None:
    """Return the width, height, channels and pixels of an array of bytes, or None if it has no shape of an image."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype != numpy.uint8 or 0 in value.shape:
        return None
    if value.ndim == 2:
        value = value[:, :, None]
    if value.ndim != 3 or value.shape[2] not in _COLOURS:
        return None
    step = -(-max(value.shape[:2]) // SIDE)
    part = value[::step, ::step]
    height, width, channels = part.shape
    return width, height, channels, part.tobytes()


def _png(width: int, height: int, channels: int, pixels: bytes) -> bytes:
    if width == 0 or height == 0:
        raise Unsupported("the image has no pixels")
    row = width * channels
    lines = b"".join(b"\0" + pixels[at : at + row] for at in range(0, height * row, row))  # 0: without a filter
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    return b"".join([_PNG, _chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(lines)), _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
