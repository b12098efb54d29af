"""The fact ``images`` as servers of vLLM announce it, written out by hand from vLLM's ``MultiModalHasher``."""

from __future__ import annotations

from typing import Any

WHITE = (255, 255, 255)
MADE = "00112233aabbccdd"


def length(number: int) -> bytes:
    return number.to_bytes(8, "little")


def framed(chunk: bytes) -> bytes:
    return length(len(chunk)) + chunk


def value(item: Any) -> bytes:
    """Return the bytes that vLLM hashes for a value, since 0.31."""
    if isinstance(item, tuple | list):
        return b"\1" + length(len(item)) + b"".join(map(value, item))
    if isinstance(item, dict):
        return b"\2" + length(len(item)) + b"".join(framed(name.encode()) + value(held) for name, held in item.items())
    return b"\3" + framed(item.encode() if isinstance(item, str) else length(item))


def fact(model_id: str, *, plain: bool = False, media_io: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the fact of a server for ``model_id``. plain: of vLLM 0.28 to 0.30. more: other fields."""
    background = (media_io or {}).get("image", {}).get("rgba_background_color", WHITE)
    if plain:
        behind = b"model_id" + model_id.encode()
        mode = b"imageimage.io_config.image_modeRGB"
        colours = b"".join(
            b"image.io_config.rgba_background_color.%d" % number + length(colour)
            for number, colour in enumerate(background)
        )
        frames = {"rgb": (b"imageimage", behind), "other": (mode + colours + b"image.data", behind)}
    else:
        image = framed(b"image") + b"\3" + framed(b"image")
        kwargs = framed(b"media_io_kwargs") + value(media_io) if media_io else b""
        behind = kwargs + framed(b"model_id") + value(model_id)
        config = value({"image_mode": "RGB", "rgba_background_color": tuple(background)})
        other = b"\2" + length(2) + framed(b"io_config") + config + framed(b"data") + b"\3"
        frames = {"rgb": (image + b"\3", behind), "other": (image + other, behind)}
        if kwargs:
            frames["uuid"] = (framed(b"image") + b"\3", behind)
    frames["clear"] = frames["rgb"]
    hexes = {kind: [before.hex(), after.hex()] for kind, (before, after) in frames.items()}
    rules = {"token": "<img>", "token_id": 7, "family": "fixed", "parameters": {"tokens": 16}, "made": MADE}
    return rules | {"algorithm": "blake3", "framed": not plain, "frames": hexes} | more
