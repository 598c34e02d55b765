"""Images of Pillow: mode, size, palette and pixels. What a file says about an image is left out."""

from __future__ import annotations

from typing import Any, Final

from PIL import Image

from dfm_async.wire.codec.registry import NamedCodec, Unsupported, register_ours

_BYTES: Final = {
    **{"L": 1, "P": 1, "LA": 2, "PA": 2, "La": 2, "I;16": 2},
    **{"RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 4, "F": 4},
}
"""The bytes of a pixel by mode. Eight pixels of the mode ``1`` share one."""
_PREMULTIPLIED: Final = {"La": "LA", "RGBa": "RGBA"}
_PALETTES: Final = ("RGB", "RGBA")
_COLOURS: Final = 256


def _size(mode: str, width: int, height: int) -> int:
    return (width + 7) // 8 * height if mode == "1" else _BYTES[mode] * width * height


def _encode(value: Any) -> Any:
    if value.mode != "1" and value.mode not in _BYTES:
        raise Unsupported(f"no codec knows images of the mode {value.mode!r}; convert it to RGB")
    # Photos in the format MPO have further pictures, such as previews. A pickle would not keep the frames either.
    if getattr(value, "n_frames", 1) > 1 and value.format != "MPO":
        raise TypeError("it has more than one frame; send a list of copies of its frames")
    value.load()  # of an image that was opened, only now the pixels are read
    palette = None
    if value.mode in ("P", "PA") and value.palette is not None:
        mode = value.palette.mode if value.palette.mode in _PALETTES else "RGB"
        palette = [mode, bytes(value.getpalette(mode) or b"")]
    transparency = value.info.get("transparency")
    return {
        "mode": value.mode,
        "size": list(value.size),
        "palette": palette,
        "transparency": transparency if isinstance(transparency, (int, bytes, tuple)) else None,
        "pixels": memoryview(value.tobytes()),
    }


def _decode(state: Any) -> Any:
    mode, (width, height), pixels = state["mode"], state["size"], state["pixels"]
    if min(width, height) < 0 or _size(mode, width, height) != len(pixels):
        raise ValueError(f"{len(pixels):,} bytes are not an image of the mode {mode!r} and {width} x {height} pixels")
    image = Image.frombytes(mode, (width, height), bytes(pixels)) if len(pixels) else Image.new(mode, (width, height))
    if state["palette"] is not None:
        kind, colours = state["palette"]
        if kind not in _PALETTES or len(colours) > _COLOURS * len(kind):
            raise ValueError("this is not the palette of an image")
        image.putpalette(colours, kind)
    if state["transparency"] is not None:
        image.info["transparency"] = state["transparency"]
    return image


def _preview(value: Any, _items: int) -> dict[str, Any]:
    return {"type": "PIL.Image.Image", "mode": value.mode, "size": list(value.size)}


def _pixels(value: Any, side: int) -> tuple[int, int, int, bytes]:
    """Return the pixels as grey, RGB or RGBA; of modes with more than 8 bits, from the darkest to the brightest."""
    longest = max(value.size)
    if longest > side:
        size = tuple(max(1, length * side // longest) for length in value.size)
        smooth = value.mode in ("L", "LA", "RGB", "RGBA")
        value = value.resize(size, Image.Resampling.BOX if smooth else Image.Resampling.NEAREST)
    if value.mode in _PREMULTIPLIED:
        value = value.convert(_PREMULTIPLIED[value.mode])
    if value.mode.startswith(("I", "F")):
        value = value.convert("F")
        low, high = value.getextrema()
        scale = 255 / (high - low) if high > low else 0
        value = value.point(lambda number: number * scale + -low * scale).convert("L")
    elif value.mode.endswith("A") or "transparency" in value.info:
        value = value.convert("RGBA")
    else:
        value = value.convert("L" if value.mode in ("1", "L") else "RGB")
    return (*value.size, len(value.getbands()), value.tobytes())


register_ours(
    NamedCodec(
        type=Image.Image,
        name="PIL.Image.Image",
        encode=_encode,
        decode=_decode,
        preview=_preview,
        pixels=_pixels,
        subclasses=True,
        ours=True,
    )
)
