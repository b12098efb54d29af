"""The header of an image as Pillow reads it, which is how vLLM reads it; a broken image costs nothing."""

from __future__ import annotations

import io
import random
import time
import warnings
from contextlib import suppress

import pytest
from PIL import Image, ImageOps, PngImagePlugin
from tests.support.requests.pictures import XMP, exif, picture

from warmfleet.prompt.image_header import Header, Kind, header_of
from warmfleet.prompt.messages import NotReproducible


def pillow(data: bytes) -> Header:
    """What vLLM sees: it decodes the image and turns it."""
    image: Image.Image = Image.open(io.BytesIO(data))
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    image.load()
    kind: Kind = "other" if image.mode != "RGB" else "clear" if "transparency" in image.info else "rgb"
    return Header(*image.size, kind)


def test_equals_pillow() -> None:
    rng, kinds = random.Random(5), set()
    for _ in range(600):
        data = picture(rng)
        header = header_of(data)
        assert header == pillow(data), data[:80]
        kinds.add((data[:3], header.kind))
    assert len(kinds) == 3 + 2 + 1 + 2


def test_metadata_behind_the_pixels_turn_a_png() -> None:
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, "PNG")
    data = out.getvalue()
    chunk = io.BytesIO()
    PngImagePlugin.putchunk(chunk, b"eXIf", exif(6)[6:])
    at = data.index(b"IEND") - 4
    turned = data[:at] + chunk.getvalue() + data[at:]
    assert header_of(turned) == pillow(turned) == Header(20, 30, "rgb")


def test_a_text_that_may_turn_a_png_makes_it_unknown() -> None:
    out, text = io.BytesIO(), PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", (XMP % 6).decode())
    Image.new("RGB", (30, 20)).save(out, "PNG", pnginfo=text)
    with pytest.raises(NotReproducible, match="image_header"):
        header_of(out.getvalue())


def camera(exif: bytes) -> bytes:
    """The begin of a JPEG with this EXIF."""
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, "JPEG", exif=b"Exif\0\0" + exif)
    return out.getvalue()


@pytest.mark.parametrize(
    "exif",
    [b"", b"junk", b"II*\0", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"]
    + [b"II*\0\x08\0\0\0\x01\0\x12\x01%c\0\x01\0\0\0\x08\0\0\0\0\0\0\0" % kind for kind in (1, 3, 4)]
    + [b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09\0\0\0\0\0\0\0"],
)
def test_odd_metadata_turn_an_image_as_pillow_does_or_make_it_unknown(exif: bytes) -> None:
    data = camera(exif)
    try:
        assert header_of(data) == pillow(data)
    except NotReproducible:
        assert exif == b"II*\0"


def test_broken_and_hostile_images_are_unknown_and_cost_nothing() -> None:
    rng, began, reasons = random.Random(6), time.perf_counter(), set()
    hostile = [
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 500_000,  # half a million empty comments
        b"\xff\xd8\xff" + b"\xff" * 2_000_000,
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\0\0\x01" * 4 + b"\0\0\0\0junk\0\0\0\0" * 1_000_000,
        b"GIF89a" + b"\0" * 7 + b"\x21\xfe" + b"\x01a" * 1_000_000,
        b"RIFF\0\0\0\0WEBP" + b"junk\0\0\0\0" * 500_000,
        b"BM" + b"\0" * 100,
        camera(b"II*\0\x08\0\0\0\x50\x14" + b"\x02\x01\x02\0\0\xe0\0\0\x08\0\0\0" * 5_200),  # names 300 MB
        camera(b"II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0" * 16_000),
        b"",
    ]
    for _ in range(2_000):
        broken = bytearray(picture(rng) if rng.random() < 0.1 else hostile[rng.randrange(5)][:200])
        for _ in range(rng.randrange(1, 6)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        hostile.append(bytes(broken[: rng.randrange(len(broken) + 1)]))
    worst = 0.0
    for data in hostile:
        begin = time.perf_counter()
        try:
            header_of(data)
        except NotReproducible as error:
            reasons.add(error.reason)
        worst = max(worst, time.perf_counter() - begin)
    assert reasons == {"image_format", "image_header"}
    assert worst < 0.1
    assert time.perf_counter() - began < 20


def test_a_bomb_is_only_measured() -> None:
    out = io.BytesIO()
    Image.new("1", (1, 1)).save(out, "PNG")
    data = bytearray(out.getvalue())
    data[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert header_of(bytes(data)) == Header(2**31 - 1, 2**31 - 1, "other")
