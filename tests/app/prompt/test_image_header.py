"""The header of an image as Pillow reads it, which is how vLLM reads it; a broken image costs nothing."""

from __future__ import annotations

import io
import random
import time
import warnings

from PIL import Image
from tests.support.requests.pictures import exif, picture

from warmfleet.prompt.image_header import Header, Kind, header_of
from warmfleet.prompt.messages import NotReproducible
from warmfleet.protocol.image_tokens import FAMILIES


def pillow(data: bytes) -> Header:
    """What vLLM sees, but for a turn, which exchanges the sides."""
    image: Image.Image = Image.open(io.BytesIO(data))
    image.load()
    kind: Kind = "other" if image.mode != "RGB" else "clear" if "transparency" in image.info else "rgb"
    return Header(*image.size, kind)


def test_no_formula_tells_an_images_sides_apart() -> None:
    """So the metadata that turn an image need not be read."""
    rng = random.Random(4)
    for _ in range(2_000):
        sides = rng.randrange(1, 5_000), rng.randrange(1, 5_000)
        for formula, names in FAMILIES.values():
            parameters = sorted(rng.choices((14, 28, 3_136, 100_000, 1_003_520), k=len(names)))
            assert formula(*sides, *parameters) == formula(*sides[::-1], *parameters)


def test_equals_pillow() -> None:
    rng, kinds = random.Random(5), set()
    for _ in range(600):
        data = picture(rng)
        header = header_of(data)
        assert header == pillow(data), data[:80]
        kinds.add((data[:3], header.kind))
    assert len(kinds) == 3 + 2 + 1 + 2


def camera(exif: bytes) -> bytes:
    """The begin of a JPEG with this EXIF."""
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, "JPEG", exif=b"Exif\0\0" + exif)
    return out.getvalue()


def test_metadata_are_not_looked_at() -> None:
    for metadata in (b"", b"junk", exif(6)[6:], b"Exif\0\0" * 9_000):
        assert header_of(camera(metadata)) == Header(30, 20, "rgb")


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
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\0\0\x01" * 4 + b"\0\x40\0\0eXIf" + b"Exif\0\0" * 700_000,
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
