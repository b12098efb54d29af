"""Reads from the first bytes of an image how vLLM sees it: width, height, and whether it is converted to RGB. Pure.

No pixel is decoded, and no compressed text. The number of parts looked at is bounded, so that no image costs more than
some 100 us. An image that is not surely read as Pillow reads it raises NotReproducible.
"""

from __future__ import annotations

import re
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
#: Texts in a PNG that may turn the image.
TURNING = (b"XML:com.adobe.xmp\0", b"Raw profile type ")
#: Begin of EXIF -> byte order, in the words of ``struct``; type of an entry -> a single number of this type.
ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
NUMBERS = {3: "H", 4: "I"}
BYTES = 1  # a type whose value Pillow does not take for a number
ORIENTATION = 0x0112
TURN = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
EXIF, XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


class Header(NamedTuple):
    """Width and height in pixels as the image is shown, and its kind."""

    width: int
    height: int
    kind: Kind


def header_of(data: bytes) -> Header:
    """Read the header of an image. Raises NotReproducible (``image_format``, ``image_header``)."""
    reader = next((read for magic, read in READERS.items() if data.startswith(magic)), None)
    if reader is None:
        raise NotReproducible("image_format")
    try:
        header, info = reader(data)
        turned = bool(info) and _orientation(info) in (5, 6, 7, 8)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise NotReproducible("image_header") from error
    if not header.width or not header.height:
        raise NotReproducible("image_header")
    return Header(header.height, header.width, header.kind) if turned else header


def _orientation(info: dict[str, bytes]) -> int:
    """Return the orientation in an image's metadata, 1 if there is none: in EXIF's first directory, else in XMP.

    Pillow would copy the value of every entry, and the entries of 64 kB may name 300 MB.
    """
    exif = info.get("exif", b"")
    while exif.startswith(EXIF):
        exif = exif[len(EXIF) :]
    found = None
    if exif:
        order = ORDERS.get(exif[:4])
        if order is None:
            return 1  # Pillow raises an error, after which vLLM takes the image as it is
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        if count > MAX_SEGMENTS:
            raise ValueError("too many entries")
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(f"{order}HHI", exif, entry)
            if tag == ORIENTATION:
                if length != 1:
                    raise ValueError("several orientations")
                (found,) = (1,) if kind == BYTES else struct.unpack_from(order + NUMBERS[kind], exif, entry + 8)
    if found is None:
        match = TURN.search(info.get("xmp", b""))
        found = int(match[1]) if match else 1
    return int(found)


def _png(data: bytes) -> tuple[Header, dict[str, bytes]]:
    width, height, _, colour = struct.unpack_from(">IIBB", data, 16)
    kind: Kind = "rgb" if colour == 2 else "other"
    info: dict[str, bytes] = {}
    for name, at, length in _png_chunks(data):
        if name == b"tRNS" and kind == "rgb":
            kind = "clear"
        elif name == b"eXIf":
            info["exif"] = EXIF + data[at : at + length]
        elif name == b"acTL" or (name in (b"iTXt", b"tEXt", b"zTXt") and data.startswith(TURNING, at)):
            raise ValueError("an animation, or perhaps turned by a text")
    return Header(width, height, kind), info


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk behind the first, and where its data begin and how long they are."""
    if data[12:16] != b"IHDR":
        raise ValueError("no IHDR")
    at = 33
    for _ in range(MAX_PARTS):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"IEND":
            return
        yield name, at + 8, length
        at += length + 12
    raise ValueError("too many chunks")


def _jpeg(data: bytes) -> tuple[Header, dict[str, bytes]]:
    header, info, at = None, dict[str, bytes](), 2
    for _ in range(MAX_SEGMENTS):
        mark, marker, length = struct.unpack_from(">BBH", data, at)
        if mark == marker == 0xFF:  # a byte of padding
            at += 1
            continue
        if mark != 0xFF or length < 2:
            break
        body, end = at + 4, at + 2 + length
        if marker == 0xDA and header is not None:
            return header, info
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, layers = struct.unpack_from(">xHHB", data, body)
            header = Header(width, height, "rgb" if layers == 3 else "other")
        elif marker == 0xE1 and data.startswith(EXIF, body):
            info["exif"] = info["exif"] + data[body + 6 : end] if "exif" in info else data[body:end]
        elif marker == 0xE1 and data.startswith(XMP, body):
            info["xmp"] = data[body + len(XMP) : end]
        at = end
    raise ValueError("no pixels")


def _gif(data: bytes) -> tuple[Header, dict[str, bytes]]:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_PARTS):
        if in_extension:
            in_extension = data[at] != 0
            at += 1 + data[at]
        elif data[at] == 0x2C:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
            return Header(max(width, left + columns), max(height, top + rows), "other"), {}
        else:
            in_extension = data[at] == 0x21
            at += 2 if in_extension else 1
    raise ValueError("no frame")


def _webp(data: bytes) -> tuple[Header, dict[str, bytes]]:
    size, clear, moving, info, at = None, False, False, dict[str, bytes](), 12
    for _ in range(MAX_SEGMENTS):
        if at >= len(data) and size is not None:
            return Header(*size, "other" if clear else "rgb"), info
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
        elif name in (b"EXIF", b"XMP "):
            info.setdefault("exif" if name == b"EXIF" else "xmp", data[body : body + length])
        at = body + length + length % 2
    raise ValueError("too many chunks")


READERS = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"RIFF": _webp,
}
