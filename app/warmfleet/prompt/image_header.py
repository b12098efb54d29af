"""Reads from the first bytes of an image how vLLM sees it: width, height, and whether it is converted to RGB. Pure.

No pixel is decoded, and no compressed text. The number of parts looked at is bounded, so that no image costs more than
some 100 us. An image that is not surely read as Pillow reads it raises NotReproducible.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

from warmfleet.prompt.messages import NotReproducible

if TYPE_CHECKING:
    from collections.abc import Iterator

#: ``rgb``: without an alpha channel; ``clear``: the same, but a colour is transparent (vLLM 0.33 converts it to RGB);
#: ``other``: every other image, which vLLM converts to RGB.
Kind = Literal["rgb", "clear", "other"]

MAX_PARTS = 4_096  # most chunks of a PNG or blocks of a GIF before its first frame
MAX_SEGMENTS = 256  # most segments of a JPEG before its pixels, and most chunks of a WebP


class Header(NamedTuple):
    """Width and height in pixels as stored, and the kind.

    Metadata may turn the image, which exchanges its sides: no formula of ``image_tokens`` tells them apart.
    """

    width: int
    height: int
    kind: Kind


def header_of(data: bytes) -> Header:
    """Read the header of an image. Raises NotReproducible (``image_format``, ``image_header``)."""
    reader = next((read for magic, read in READERS.items() if data.startswith(magic)), None)
    if reader is None:
        raise NotReproducible("image_format")
    try:
        header = reader(data)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise NotReproducible("image_header") from error
    if not header.width or not header.height:
        raise NotReproducible("image_header")
    return header


def _png(data: bytes) -> Header:
    width, height, _, colour = struct.unpack_from(">IIBB", data, 16)
    kind: Kind = "rgb" if colour == 2 else "other"
    for name in _png_chunks(data):
        if name == b"tRNS" and kind == "rgb":
            kind = "clear"
    return Header(width, height, kind)


def _png_chunks(data: bytes) -> Iterator[bytes]:
    """Yield the name of each chunk behind the first, of an animation up to its second image."""
    if data[12:16] != b"IHDR":
        raise ValueError("no IHDR")
    at, pixels = 33, False
    for _ in range(MAX_PARTS):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"IEND" or (pixels and name == b"fcTL"):
            return
        yield name
        pixels = pixels or name == b"IDAT"
        at += length + 12
    raise ValueError("too many chunks")


def _jpeg(data: bytes) -> Header:
    header, at = None, 2
    for _ in range(MAX_SEGMENTS):
        mark, marker, length = struct.unpack_from(">BBH", data, at)
        if mark == marker == 0xFF:  # a byte of padding
            at += 1
            continue
        if mark != 0xFF or length < 2:
            break
        if marker == 0xDA and header is not None:
            return header
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, layers = struct.unpack_from(">xHHB", data, at + 4)
            header = Header(width, height, "rgb" if layers == 3 else "other")
        at += 2 + length
    raise ValueError("no pixels")


def _gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_PARTS):
        if in_extension:
            in_extension = data[at] != 0
            at += 1 + data[at]
        elif data[at] == 0x2C:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
            return Header(max(width, left + columns), max(height, top + rows), "other")
        else:
            in_extension = data[at] == 0x21
            at += 2 if in_extension else 1
    raise ValueError("no frame")


def _webp(data: bytes) -> Header:
    size, clear, moving, at = None, False, False, 12
    for _ in range(MAX_SEGMENTS):
        if at >= len(data) and size is not None:
            return Header(*size, "other" if clear else "rgb")
        name, length = struct.unpack_from("<4sI", data, at)
        body, bits = at + 8, int.from_bytes(data[at + 9 : at + 13], "little")
        if name == b"VP8X":
            clear, moving = bool(data[body] & 0x10), bool(data[body] & 0x02)
            sides = int.from_bytes(data[body + 4 : body + 10], "little")
            size = (sides & 0xFFFFFF) + 1, (sides >> 24) + 1
        elif name == b"VP8L" and not moving:
            size, clear = size or ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), bool(bits >> 28 & 1)
        elif name == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, body + 6)
            size = size or (width & 0x3FFF, height & 0x3FFF)
        elif name == b"ALPH" and not moving:
            clear = True
        at = body + length + length % 2
    raise ValueError("too many chunks")


READERS = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"RIFF": _webp,
}
