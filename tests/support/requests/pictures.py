"""Random pictures of all formats that routers know, and random chats with them."""

from __future__ import annotations

import base64
import io
import random
from typing import Any, Literal

from PIL import Image
from tests.support.requests.random_requests import PROSE, RandomRequest

XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'
#: Format -> modes of the image as it is stored.
MODES = {
    "PNG": ("RGB", "RGBA", "L", "P", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "GIF": ("P", "L", "RGB"),
    "WEBP": ("RGB", "RGBA"),
}
#: Format, mode and whether the image moves.
FORMS = [(form, mode, False) for form, modes in MODES.items() for mode in modes]
FORMS += [(form, mode, True) for form in ("PNG", "GIF", "WEBP") for mode in MODES[form] if mode != "I;16"]
KINDS: tuple[Literal["chat", "messages", "responses"], ...] = ("chat", "messages", "responses")
MOST_TURNS = 8
#: Number of pictures that chats share, so that engines have many of them in their cache: each of FORMS, most twice.
PICTURES = 48
BASE64 = "data:image/png;base64,"  # engines and routers read the format from the picture


def exif(orientation: int) -> bytes:
    made = Image.Exif()
    made[0x0112] = orientation
    made[0x010F] = "a camera"
    return made.tobytes()


def picture(rng: random.Random, least: int = 1, most: int = 90, wanted: tuple[str, str, bool] | None = None) -> bytes:
    """A random image, each side of ``least`` pixels or more, but fewer than ``most``. wanted: one of FORMS."""
    form, mode, moves = wanted or rng.choice(FORMS)
    out, size = io.BytesIO(), (rng.randrange(least, most), rng.randrange(least, most))
    image = Image.new(mode, size) if mode == "I;16" else Image.effect_noise(size, 90).convert(mode)
    more: dict[str, object] = {}
    if form != "GIF" and rng.random() < 0.5:
        more["exif"] = exif(rng.randrange(0, 10))
    if form in ("JPEG", "WEBP") and rng.random() < 0.3:
        more["xmp"] = XMP % rng.randrange(1, 9)
    if form == "PNG" and mode == "RGB" and rng.random() < 0.4:
        more["transparency"] = (1, 2, 3)
    if form == "JPEG":
        more |= {"progressive": rng.random() < 0.5, "comment": b"c" * rng.randrange(1, 60_000)}
        more |= {"icc_profile": b"i" * rng.randrange(1, 90_000)} if rng.random() < 0.3 else {}
    if form == "GIF":
        more |= {"comment": b"c" * rng.randrange(1, 2_000)}
    if moves:
        more |= {"save_all": True, "append_images": [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]}
    if moves and form == "PNG":
        more["default_image"] = rng.random() < 0.5
    if form == "WEBP":
        more |= {"lossless": rng.random() < 0.5}
    image.save(out, form, **more)
    return out.getvalue()


def conversations(seed: int, count: int) -> list[RandomRequest]:
    """Chats of three APIs with several pictures; later ones often go on from earlier ones."""
    rng = random.Random(seed)
    wanted = [FORMS[number % len(FORMS)] for number in range(PICTURES)]
    shown = [base64.b64encode(picture(rng, 20, 200, form)).decode() for form in wanted]
    known: list[list[Any]] = []
    made = []
    for _ in range(count):
        turns = list(rng.choice(known)) if known and rng.random() < 0.7 else []
        turns = turns[: rng.randrange(len(turns) + 1)]
        for _ in range(rng.randrange(1, 4)):
            turns.append(_turn(rng, shown, seed))
        known = [*known[-20:], turns]
        made.append(_request(rng, turns[-MOST_TURNS:]))
    return made


def _turn(rng: random.Random, shown: list[str], seed: int) -> list[tuple[str, str]]:
    """Return the parts of a message: texts, and pictures with a client's id or none."""
    parts = []
    for _ in range(rng.randrange(1, 5)):
        if rng.random() < 0.45:
            at = rng.randrange(len(shown))
            parts.append((shown[at], f"picture {seed}.{at}" if rng.random() < 0.2 else ""))
        else:
            parts.append(("", " ".join(rng.choices(PROSE, k=rng.randrange(1, 60)))))
    return parts


def _request(rng: random.Random, turns: list[list[tuple[str, str]]]) -> RandomRequest:
    kind = rng.choices(KINDS, [6, 1, 1])[0]
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": [_part(kind, data, text) for data, text in turn]})
        said = "I see " + turn[0][1][:9]
        messages.append({"role": "assistant", "content": said})
    messages.pop()
    if kind == "responses":
        return RandomRequest(kind, {"input": messages, "store": False}, None)
    body: dict[str, Any] = {"messages": messages} | ({"max_tokens": 1} if kind == "messages" else {})
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice(["a", "b"])
    return RandomRequest(kind, body, ("ad", "/ad") if rng.random() < 0.1 else None)


def _part(kind: str, data: str, text: str) -> dict[str, Any]:
    if not data:
        return {"type": "input_text" if kind == "responses" else "text", "text": text}
    if kind == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    if kind == "responses":
        return {"type": "input_image", "image_url": BASE64 + data, "detail": "auto"}
    return {"type": "image_url", "image_url": {"url": BASE64 + data}} | ({"uuid": text} if text else {})
