"""The identifier and the number of tokens that an engine gives to an image of a request, without decoding it. Pure.

vLLM hashes an image with the model's id and its settings. A plugin records the bytes that vLLM hashes before and behind
the image's own; so the same rule serves every version of vLLM. An image whose identifier or length is not surely known
raises NotReproducible with the reason. URLs are never fetched.
"""

from __future__ import annotations

import binascii
import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pybase64
from blake3 import blake3

from warmfleet.prompt.image_header import header_of
from warmfleet.prompt.media_prefix import MODALITIES, REAL
from warmfleet.prompt.messages import NotReproducible
from warmfleet.protocol.image_tokens import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet.protocol.wire import Media

    Frame = tuple[bytes, bytes]

HASHES: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256, "sha512": hashlib.sha512}
KINDS = frozenset({"rgb", "clear", "other"})
MAX_FRAME_BYTES = 16_384  # most bytes that are hashed before or behind an image
MAX_TOKENS = 2**20  # most tokens of a prompt's images; a lie about their sizes must not cost memory
MAX_ID = 256  # most characters of an image's id, which is in the hash of each of the image's blocks
MAX_IMAGES = 512  # most images of a prompt, because each block's images are searched among all


class Item(NamedTuple):
    """An image as the engine knows it."""

    identifier: str
    tokens: int

    @property
    def mark(self) -> str:
        """Stands for the image in a text. Equal marks are equal images; no text is cut within a mark."""
        name = hashlib.blake2b(f"{self.tokens} {self.identifier}".encode(), digest_size=16).hexdigest()
        return f"{REAL}{name}{REAL}"


class Images:
    """The images of one prompt: puts marks for them into its text, and their tokens into its ids."""

    def __init__(self, rules: ImageRules, items: Sequence[Item], encode: Callable[[str], array[int]]) -> None:
        """encode: text → ids, as for prompts without images. Raises NotReproducible for too many tokens."""
        if sum(item.tokens for item in items) > MAX_TOKENS:
            raise NotReproducible("image_size")
        self._rules, self._items, self._encode = rules, items, encode
        self._tokens = {item.mark.strip(REAL): item.tokens for item in items}

    def marked(self, text: str) -> str:
        """Put the mark of each image in place of the token that the template wrote. Raises NotReproducible."""
        between = text.split(self._rules.token)
        if len(between) != len(self._items) + 1 or REAL in text:
            raise NotReproducible("image_place")
        marks = [item.mark for item in self._items]
        return "".join([part for pair in zip(between, [*marks, ""], strict=True) for part in pair])

    def ids(self, text: str) -> array[int]:
        """Return the ids of a marked text, with each image's token as often as the image has tokens."""
        parts, token_id = text.split(REAL), self._rules.token_id
        counts = [self._tokens[name] for name in parts[1::2]]
        parts[1::2] = [self._rules.token] * len(counts)
        ids, made, at = self._encode("".join(parts)), array("I"), 0
        if ids.count(token_id) != len(counts):
            raise NotReproducible("image_place")
        for tokens in counts:
            place = ids.index(token_id, at)
            made += ids[at:place] + array("I", [token_id]) * tokens
            at = place + 1
        return made + ids[at:]

    def places(self, parts: Sequence[array[int]]) -> list[Media]:
        """Find the images in the ids of a prompt, which come in parts; no image is in two parts.

        Raises NotReproducible if there are other tokens of images, such as special ones that begin every prompt.
        """
        found: list[Media] = []
        token_id, begin = self._rules.token_id, 0
        if sum(ids.count(token_id) for ids in parts) != sum(item.tokens for item in self._items):
            raise NotReproducible("image_place")
        waiting = list(reversed(self._items))
        for ids in parts:
            at, left = 0, ids.count(token_id)
            while left > 0 and waiting:
                item = waiting.pop()
                at = ids.index(token_id, at)
                found.append((begin + at, item.tokens, item.identifier))
                at, left = at + item.tokens, left - item.tokens
            begin += len(ids)
        return found


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The rules that an API server announced for its images (fact ``images``).

    token, token_id: stand in the prompt as often as the image has tokens. family, parameters: see ``image_tokens``.
    algorithm: a key of HASHES. framed: the length of the image's bytes is hashed before them. frames: by the kind of
    the image (``image_header``), the bytes hashed before and behind its own; ``uuid``: those around a client's id,
    missing if that is the identifier itself.
    """

    token: str
    token_id: int
    family: str
    parameters: tuple[int, ...]
    algorithm: str
    framed: bool
    frames: Mapping[str, Frame]

    @classmethod
    def of(cls, fact: Any) -> ImageRules | None:
        """Read the announced fact; None if there is none, or a family or hash that is not known here."""
        try:
            _, names = FAMILIES[fact["family"]]
            frames = {
                kind: (bytes.fromhex(before), bytes.fromhex(behind))
                for kind, (before, behind) in fact["frames"].items()
            }
            parameters = tuple(int(fact["parameters"][name]) for name in names)
            rules = cls(
                str(fact["token"]),
                int(fact["token_id"]),
                fact["family"],
                parameters,
                str(fact["algorithm"]),
                fact["framed"] is True,
                frames,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        short = all(len(part) <= MAX_FRAME_BYTES for frame in frames.values() for part in frame)
        usable = rules.token and 0 <= rules.token_id < 2**32 and min(parameters) > 0 and rules.algorithm in HASHES
        return rules if usable and short and frames.keys() >= KINDS else None

    def item(self, part: Mapping[str, Any], rename: Callable[[str], str] | None = None) -> Item:
        """Identify the image of a content part. rename: gives the id in place of the client's. Raises NotReproducible.

        Takes 0.5 ms for an image of 1 MB.
        """
        kind = MODALITIES[part["type"]]
        if kind != "image" or part["type"] == "image_embeds":
            raise NotReproducible(kind if kind != "image" else "image_format")
        data = _data(part)
        width, height, mode = header_of(data)
        formula, _ = FAMILIES[self.family]
        tokens = formula(width, height, *self.parameters)
        if not 0 < tokens <= MAX_TOKENS:
            raise NotReproducible("image_size")
        uuid = part.get("uuid")
        if uuid is None:
            return Item(self._hash(data, mode), tokens)
        if not isinstance(uuid, str) or not uuid:
            raise NotReproducible("image_id")
        own = rename(uuid) if rename is not None else uuid
        if len(own) > MAX_ID:
            raise NotReproducible("image_id")
        return Item(self._hash(own.encode(), "uuid") if "uuid" in self.frames else own, tokens)

    def _hash(self, data: bytes, kind: str) -> str:
        before, behind = self.frames[kind]
        made = HASHES[self.algorithm]()
        made.update(before + len(data).to_bytes(8, "little") if self.framed else before)
        made.update(data)
        made.update(behind)
        return str(made.hexdigest())


def _data(part: Mapping[str, Any]) -> bytes:
    """Return the bytes of the image, as vLLM reads them from a data URL. Raises NotReproducible."""
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str) or not url:
        raise NotReproducible("image_id" if part.get("uuid") is not None else "image_format")
    if url[:5].lower() != "data:":
        raise NotReproducible("image_url")
    comma = url.find(",")
    if comma < 0 or not url[:comma].endswith(";base64"):
        raise NotReproducible("image_format")
    try:
        return pybase64.b64decode(url[comma + 1 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotReproducible("image_format") from error
