"""The identifier and the number of tokens that an engine gives to an image of a request, without decoding it. Pure.

vLLM hashes an image with the model's id and its settings. A plugin records the bytes that vLLM hashes before and behind
the image's own; so the same rule serves every version of vLLM. The tokens follow from the image's size by a formula, or
an engine has reported them for this identifier (``LearnedImages``). An image whose identifier or tokens are not surely
known raises NotReproducible with the reason. URLs are never fetched.
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
from warmfleet.prompt.learned_images import are_runs
from warmfleet.prompt.media_prefix import MODALITIES, REAL
from warmfleet.prompt.messages import NotReproducible
from warmfleet.protocol.image_tokens import FAMILIES, LEARNED, MAX_ID, MAX_TOKENS, join

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet.prompt.learned_images import Runs
    from warmfleet.protocol.image_tokens import Join
    from warmfleet.protocol.wire import Media

    Frame = tuple[bytes, bytes]
    Learned = Callable[[str], Runs | None]  # LearnedImages.find

HASHES: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256, "sha512": hashlib.sha512}
KINDS = frozenset({"rgb", "clear", "other"})
MAX_FRAME_BYTES = 16_384  # most bytes that are hashed before or behind an image
MAX_JOINS = 16  # most joins of a rule, because each is looked for around all images of a prompt
MAX_IMAGES = 512  # most images of a prompt, because each block's images are searched among all


class Item(NamedTuple):
    """An image as the engine knows it. runs: a token id and how often it stands there, then the next; empty if the
    announced token alone stands there.
    """

    identifier: str
    tokens: int
    runs: tuple[int, ...] = ()

    @property
    def mark(self) -> str:
        """Stands for the image in a text. Equal marks are equal images; no text is cut within a mark."""
        named = f"{self.tokens} {self.identifier} {self.runs or ''}".encode()
        return f"{REAL}{hashlib.blake2b(named, digest_size=16).hexdigest()}{REAL}"

    def ids(self, token_id: int) -> array[int]:
        """Return the ids that stand in the prompt for this image. token_id: the announced one."""
        made = array("I")
        for token, count in zip(self.runs[::2], self.runs[1::2], strict=True):
            made += array("I", [token]) * count
        return made or array("I", [token_id]) * self.tokens


#: Stands for the first image that is not known. The prompt is known up to this image, and nothing of it stands behind.
UNKNOWN = Item("", 1)


class Images:
    """The images of one prompt: puts marks for them into its text, and their tokens into its ids."""

    def __init__(self, rules: ImageRules, items: Sequence[Item], encode: Callable[[str], array[int]]) -> None:
        """items: all images, or the known ones before the first that is not known, and UNKNOWN. encode: text → ids, as
        for prompts without images. Raises NotReproducible for too many tokens.
        """
        if sum(item.tokens for item in items) > MAX_TOKENS:
            raise NotReproducible("image_size")
        self._rules, self._items, self._encode = rules, items, encode
        self._ids = {item.mark.strip(REAL): item.ids(rules.token_id) for item in items}

    def marked(self, text: str, count: int) -> tuple[str, str]:
        """Put the mark of each image in place of the token that the template wrote; returns (text, rest).

        count: the number of all images. rest: the text behind the mark of UNKNOWN. Raises NotReproducible.
        """
        between = text.split(self._rules.token)
        if len(between) != count + 1 or REAL in text:
            raise NotReproducible("image_place")
        head = "".join(
            [part for pair in zip(between, [item.mark for item in self._items], strict=False) for part in pair]
        )
        rest = self._rules.token.join(between[len(self._items) :])
        return (head, rest) if self._items[-1:] == [UNKNOWN] else (head + rest, "")

    def ids(self, text: str) -> array[int]:
        """Return the ids of a marked text, with the tokens of each image in place of its mark."""
        parts, token_id = text.split(REAL), self._rules.token_id
        items = [self._ids[name] for name in parts[1::2]]
        parts[1::2] = [self._rules.token] * len(items)
        ids, at = self._encode("".join(parts)), 0
        pieces: list[array[int]] = []
        if ids.count(token_id) != len(items):
            raise NotReproducible("image_place")
        for item in items:
            place = ids.index(token_id, at)
            pieces += ids[at:place], item[:]
            at = place + 1
        pieces.append(ids[at:])
        join(pieces, self._rules.joins)
        made = array("I")
        for piece in pieces:
            made += piece
        return made

    def places(self, parts: Sequence[array[int]]) -> list[Media]:
        """Find the images in the ids of a prompt, which come in parts; no image is in two parts.

        Each image is found by the announced token, which it has. Raises NotReproducible if there are other such tokens,
        for example special ones that begin every prompt.
        """
        found: list[Media] = []
        token_id, begin, edge = self._rules.token_id, 0, 1 if self._rules.joins else 0
        waiting = [(item, self._ids[item.mark.strip(REAL)]) for item in reversed(self._items)]
        if sum(ids.count(token_id) for ids in parts) != sum(own.count(token_id) for _, own in waiting):
            raise NotReproducible("image_place")
        for ids in parts:
            at, left = 0, ids.count(token_id)
            while left > 0 and waiting:
                item, own = waiting.pop()
                at = ids.index(token_id, at) - own.index(token_id)
                inner = slice(edge, len(own) - edge)  # without tokens that may be joined with others
                if at < 0 or ids[at : at + len(own)][inner] != own[inner]:
                    raise NotReproducible("image_place")
                found.append((begin + at, item.tokens, item.identifier))
                at, left = at + len(own), left - own.count(token_id)
            begin += len(ids)
        return found


def none_learned(_identifier: str) -> Runs | None:
    """Know no image from reports."""
    return None


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The rules that an API server announced for its images (fact ``images``).

    token, token_id: the template writes it once for each image; the engine puts the image's tokens, among which it is,
    in its place. family, parameters: see ``image_tokens``. algorithm: a key of HASHES. framed: the length of the
    image's bytes is hashed before them. frames: by the kind of the image (``image_header``), the bytes hashed before
    and behind its own; ``uuid``: those around a client's id, missing if that is the identifier itself. made: stands
    for what the engine makes of some images. Engines with other settings may give an image other tokens. runs: the
    tokens of every image; empty if the announced one alone stands there. joins: see ``image_tokens``.
    """

    token: str
    token_id: int
    family: str
    parameters: tuple[int, ...]
    algorithm: str
    framed: bool
    frames: Mapping[str, Frame]
    made: str = ""
    runs: Runs = ()
    joins: tuple[Join, ...] = ()

    @classmethod
    def of(cls, fact: Any) -> ImageRules | None:
        """Read the announced fact; None if there is none, or a family or hash that is not known here."""
        try:
            names = () if fact["family"] == LEARNED else FAMILIES[fact["family"]][1]
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
                str(fact.get("made", "")),
                tuple(fact.get("runs", ())),
                tuple((int(left), int(right), int(made)) for left, right, made in fact.get("joins", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        if (rules.runs or rules.joins) and not rules._have_runs():
            return None
        short = all(len(part) <= MAX_FRAME_BYTES for frame in frames.values() for part in frame)
        usable = (
            rules.token and 0 <= rules.token_id < 2**32 and min(parameters, default=1) > 0 and rules.algorithm in HASHES
        )
        return rules if usable and short and frames.keys() >= KINDS else None

    def _have_runs(self) -> bool:
        """Whether the announced runs and joins fit each other, the family and the token."""
        if not are_runs(list(self.runs)) or (self.family, *self.parameters) != ("fixed", sum(self.runs[1::2])):
            return False
        inner = self.runs[2:-2:2] if self.joins else self.runs[::2]
        joined = [token for each in self.joins for token in each]
        return (
            len(self.joins) <= MAX_JOINS
            and self.runs[::2].count(self.token_id) == inner.count(self.token_id) > 0
            and all(0 <= token < 2**32 for token in joined)
        )

    def item(
        self,
        part: Mapping[str, Any],
        rename: Callable[[str], str] | None = None,
        learned: Learned = none_learned,
    ) -> Item:
        """Identify the image of a content part. rename: gives the id in place of the client's. learned: finds
        what engines have reported, by identifier. Raises NotReproducible.

        Takes 0.5 ms for an image of 1 MB.
        """
        kind = MODALITIES[part["type"]]
        if kind != "image" or part["type"] == "image_embeds":
            raise NotReproducible(kind if kind != "image" else "image_format")
        own = self._own(part.get("uuid"), rename)
        try:
            data = _data(part)
        except NotReproducible as why:
            if own is None or why.reason not in ("image_id", "image_url"):
                raise
            return self._learned(own, learned, why.reason)
        width, height, mode = header_of(data)
        identifier = self._hash(data, mode) if own is None else own
        if self.family == LEARNED:
            return self._learned(identifier, learned, "image_new")
        formula, _ = FAMILIES[self.family]
        tokens = formula(width, height, *self.parameters)
        if not 0 < tokens <= MAX_TOKENS:
            raise NotReproducible("image_size")
        return Item(identifier, tokens, self.runs)

    def _own(self, uuid: Any, rename: Callable[[str], str] | None) -> str | None:
        """Return the identifier of an image with this client's id; None without one. Raises NotReproducible."""
        if uuid is None:
            return None
        if not isinstance(uuid, str) or not uuid:
            raise NotReproducible("image_id")
        own = rename(uuid) if rename is not None else uuid
        if len(own) > MAX_ID:
            raise NotReproducible("image_id")
        return self._hash(own.encode(), "uuid") if "uuid" in self.frames else own

    def _learned(self, identifier: str, learned: Learned, reason: str) -> Item:
        """Return the image as an engine reported it. reason: why there is no other way to know it."""
        runs = learned(identifier)
        if runs is None:
            raise NotReproducible(reason)
        runs = self.runs or runs  # in a report, tokens may be joined with others
        if self.token_id not in runs[::2]:
            raise NotReproducible("image_place")
        return Item(identifier, sum(runs[1::2]), runs)

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
