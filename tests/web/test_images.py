"""Previews of results that are images: as files of a few raster formats, with headers that disarm everything else."""

from __future__ import annotations

import io
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dfm_async import Federation, Session
from dfm_async.wire.codec.images import SIDE, image_file
from dfm_async.wire.codec.registry import Unsupported
from tests.support.pipelines import pipeline_of
from tests.web.rig import Server, Tokens, new_service, refusal, serving

fed = Federation("images")
lab = fed.site("lab")

RED = Image.new("RGB", (20, 10), (255, 0, 0))
WIDE = np.zeros((2, 5000, 3), np.uint8)


def file_of(kind: str, image: Image.Image = RED, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def claims(width: int, height: int) -> bytes:
    """Return a PNG that claims to have another size."""
    return file_of("PNG").replace(struct.pack(">II", 20, 10), struct.pack(">II", width, height))


GRADIENT = np.arange(256, dtype=np.uint8).reshape(16, 16)
PALETTE = RED.quantize(4)
PALETTE.info["transparency"] = 0
FILES = {
    "PNG": file_of("PNG"),
    "JPEG": file_of("JPEG", exif=b"Exif\0\0" + bytes(2000)),
    "WebP": file_of("WEBP"),
    "lossless WebP": file_of("WEBP", lossless=True),
    "WebP with alpha and EXIF": file_of("WEBP", RED.convert("RGBA"), exif=b"Exif\0\0" + bytes(20)),
}
PIXELS: dict[str, tuple[Any, str, tuple[int, int], Any]] = {
    "grey array": (GRADIENT, "L", (16, 16), 17),
    "array with one channel": (GRADIENT[:, :, None], "L", (16, 16), 17),
    "array in another order": (np.asfortranarray(np.asarray(RED)), "RGB", (20, 10), (255, 0, 0)),
    "RGBA array": (np.full((3, 4, 4), 7, np.uint8), "RGBA", (4, 3), (7, 7, 7, 7)),
    "wide array": (WIDE, "RGB", (1000, 1), (0, 0, 0)),
    "RGB": (RED, "RGB", (20, 10), (255, 0, 0)),
    "CMYK": (RED.convert("CMYK"), "RGB", (20, 10), (255, 0, 0)),
    "bits": (Image.new("1", (9, 3), 1), "L", (9, 3), 255),
    "palette": (PALETTE, "RGBA", (20, 10), (255, 0, 0, 0)),
    "premultiplied": (RED.convert("RGBA").convert("RGBa"), "RGBA", (20, 10), (255, 0, 0, 255)),
    "16 bits": (Image.fromarray(GRADIENT.astype(np.uint16) * 200), "L", (16, 16), 17),
    "floats": (Image.fromarray(GRADIENT / np.float32(255)), "L", (16, 16), 17),
    "even floats": (Image.new("F", (3, 3), 0.5), "L", (3, 3), 0),
    "large": (Image.new("RGB", (3000, 1500), (0, 9, 0)), "RGB", (SIDE, SIDE // 2), (0, 9, 0)),
}
NEITHER: dict[str, tuple[Any, str]] = {
    "number": (5, "the value of type int is not an image"),
    "text": (file_of("PNG").decode("latin-1"), "the value of type str is not an image"),
    "svg": (
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        "the value of type bytes is not",
    ),
    "html": (b"<!doctype html><script>alert(1)</script>", "the value of type bytes is not an image"),
    "gif": (file_of("GIF"), "the value of type bytes is not an image"),
    "no bytes": (b"", "the value of type bytes is not an image"),
    "wide integers": (np.zeros((4, 4), np.int64), "the value of type numpy.ndarray is not an image"),
    "five channels": (np.zeros((4, 4, 5), np.uint8), "the value of type numpy.ndarray is not an image"),
    "no rows": (np.zeros((0, 4), np.uint8), "the value of type numpy.ndarray is not an image"),
    "no pixels": (Image.new("RGB", (0, 4)), "there is no preview: the image has no pixels"),
    "bomb": (claims(60_000, 60_000), "there is no preview: the image has 60,000 x 60,000 pixels"),
    "long": (file_of("PNG") + bytes(17 * 2**20), "previews have at most 16,777,216"),
    "cut png": (file_of("PNG")[:20], "the size of the image cannot be found"),
    "cut jpeg": (file_of("JPEG")[:20], "the size of the image cannot be found"),
    "endless jpeg": (b"\xff\xd8" + b"\xff\xe1\x00\x00" * 10_000, "the size of the image cannot be found"),
    "cut webp": (file_of("WEBP")[:20], "the size of the image cannot be found"),
    "odd webp": (b"RIFF\0\0\0\0WEBPVP9 " + bytes(50), "the size of the image cannot be found"),
}


@lab.operation
async def give(kind: str) -> Any:
    return FILES[kind] if kind in FILES else (PIXELS | NEITHER)[kind][0]


PIPELINES = {"give": pipeline_of(give, "kind", name="give")}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    service = new_service(pipelines=PIPELINES, session=lambda: Session(fed, target="inline"))
    async with serving(service) as found:
        yield found


async def path_of(server: Server, kind: str, **options: Any) -> str:
    """Run a job, and return the path of the preview of its result."""
    answer = await server.client.post("/pipelines/give/jobs", json={"params": {"kind": kind}}, **options)
    job_id = answer.json()["job_id"]
    await server.finished(job_id)
    return f"/jobs/{job_id}/results/1/image"


async def test_files_of_images_are_passed_on_with_headers_that_disarm_them(server: Server) -> None:
    for name, data in FILES.items():
        response = await server.client.get(await path_of(server, name))
        assert response.content == data
        kind = name.removeprefix("lossless ").split()[0].lower()
        assert {key: value for key, value in response.headers.items() if key not in ("date", "server")} == {
            "content-type": f"image/{kind}",
            "content-length": str(len(data)),
            "content-security-policy": "default-src 'none'; sandbox",
            "cross-origin-resource-policy": "same-origin",
            "x-content-type-options": "nosniff",
            "cache-control": "no-store",
        }


@pytest.mark.parametrize("kind", PIXELS)
async def test_pixels_are_sent_as_png(server: Server, kind: str) -> None:
    _, mode, size, pixel = PIXELS[kind]
    response = await server.client.get(await path_of(server, kind))
    assert response.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(response.content)) as found:
        assert (found.format, found.mode, found.size) == ("PNG", mode, size)
        found.load()
        assert found.getpixel((0 if pixel != 17 else 1, 0 if pixel != 17 else 1)) == pixel


async def test_a_large_preview_is_whole(server: Server) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (600, 500, 3), np.uint8)
    PIXELS["noise"] = (noise, "RGB", (500, 600), None)
    response = await server.client.get(await path_of(server, "noise"))
    assert int(response.headers["content-length"]) > 800_000
    with Image.open(io.BytesIO(response.content)) as found:
        assert np.array_equal(np.asarray(found), noise)


@pytest.mark.parametrize("kind", NEITHER)
async def test_other_values_have_no_preview(server: Server, kind: str) -> None:
    path = await path_of(server, kind)
    response = await server.client.get(path)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == "image"
    assert NEITHER[kind][1] in response.json()["message"]
    assert await refusal(server.client.get(path.replace("results/1", "results/0"))) == (404, "result")
    assert await refusal(server.client.get(path.replace("results/1", "results/x"))) == (422, "query")


def test_an_image_that_its_library_cannot_read_has_no_preview() -> None:
    with (
        Image.open(io.BytesIO(file_of("PNG")[:45])) as broken,
        pytest.raises(Unsupported, match="the image cannot be read: "),
    ):
        image_file(broken)


async def test_a_preview_needs_the_permission_to_read_its_job() -> None:
    service = new_service(pipelines=PIPELINES, session=lambda: Session(fed, target="inline"), authorizer=Tokens())
    async with serving(service) as server:
        ada, bob = ({"authorization": name} for name in ("ada", "bob"))
        path = await path_of(server, "PNG", headers=ada)
        assert (await server.client.get(path, headers=ada)).status_code == 200
        assert await refusal(server.client.get(path, headers=bob)) == (404, "job")
        assert await refusal(server.client.get(path)) == (401, "unauthenticated")
