"""Text → token ids as the engines make them: by `tokenizers`, or by a faster twin proved equal when it is loaded."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import sys
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from warmfleet.prompt.cut_points import Cuts, Facts
from warmfleet.prompt.messages import NotReproducible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Encode = Callable[[str, bool], array[int]]
    Affixes = tuple[array[int], array[int]]

logger = logging.getLogger("warmfleet.prompt.tokenizer")

PROBES = 300
MAX_SPECIAL = 256  # characters of a special token that is tried in texts
UNTOLD = Facts((), spaces=False, added=())


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Text and whether to add special tokens → token ids, unsigned 32-bit. fast: the 30 to 90 times faster engine.

    affixes: the special tokens that are added before and behind every text; None: they are not the same for all.
    ``encode`` raises UnicodeEncodeError for half a surrogate pair, NotReproducible for any other text it fails on.
    """

    name: str
    encode: Encode
    fast: bool
    facts: Facts
    affixes: Affixes | None

    @classmethod
    def load(cls, tokenizer_json: bytes) -> Encoder:
        """Try it in this process: for those that are trusted. Raises ValueError. 0.1 to 6 s: call it in an executor."""
        return cls.of(read(tokenizer_json), tokenizer_json)

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokenizer_json: bytes) -> Encoder:
        """The same of what ``read`` gave. Raises ValueError."""
        try:
            slow = _slow(tokenizer)
            facts = Facts.of(tokenizer)
            samples = _samples(tuple(one for one in facts.added if len(one) <= MAX_SPECIAL)[:64])
            fast = _proven_twin(tokenizer_json.decode(), slow, samples)
            affixes = _affixes(fast or slow, samples)
        except NotReproducible as error:
            raise ValueError(f"it fails on a text: {in_words(error.__cause__)}") from error
        return cls(_name(tokenizer_json), fast or slow, fast is not None, facts, affixes)

    @classmethod
    def made(cls, tokenizer_json: bytes, *, fast: bool, affixes: Affixes | None) -> Encoder:
        """One that was tried elsewhere: only constructed here, so other threads wait less. Raises ValueError."""
        encode = _fast(tokenizer_json.decode()) if fast else _slow(read(tokenizer_json))
        return cls(_name(tokenizer_json), encode, fast, UNTOLD, affixes)

    def cuts(self, template: str) -> Cuts:
        """Where texts of this tokenizer may be cut; template: the chat template that will make them."""
        if self.affixes is None:
            return Cuts((), spaces=False)
        try:
            return self.facts.cuts(template, self.plain)
        except NotReproducible:
            return Cuts((), spaces=False)

    def plain(self, text: str) -> array[int]:
        return self.encode(text, False)

    def whole(self, text: str) -> array[int]:
        """With the special tokens that the tokenizer adds."""
        return self.encode(text, True)


def read(tokenizer_json: bytes) -> Tokenizer:
    """Raises ValueError. Holds the interpreter's lock: 50 ms for each MB."""
    with _refusing("not a tokenizer"):
        tokenizer: Tokenizer = _unlimited(Tokenizer.from_str(tokenizer_json.decode()))
    return tokenizer


def in_words(error: BaseException | None) -> str:
    """What a foreign file made a library say, fit for a line of a log."""
    return " ".join(str(error).split())[:200]


#: What ends a thread or a task is no panic of Rust's, which is a BaseException, too.
OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """A file on which a library fails is refused, with ``what`` and the library's words."""
    try:
        yield
    except OURS:
        raise
    except BaseException as error:  # a panic in Rust is no Exception, and must not end the replica
        raise ValueError(f"{what}: {in_words(error)}") from error


def _unlimited(tokenizer: Any) -> Any:
    """Of either library: as engines use it, whole texts as they are."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _guarded(encode: Encode) -> Encode:
    """A text on which a library fails costs that text its identity and nobody anything else."""

    def guarded(text: str, special: bool) -> array[int]:
        try:
            return encode(text, special)
        except (UnicodeError, *OURS):
            raise
        except BaseException as error:  # a panic in Rust is no Exception: it costs this text only
            raise NotReproducible("tokenizer") from error

    return guarded


def _slow(tokenizer: Tokenizer) -> Encode:
    def encode(text: str, special: bool) -> array[int]:
        if not text.isascii():
            text.encode()  # of half a surrogate pair the library says TypeError
        # Of all ways only this one releases the GIL: other requests go on meanwhile.
        return array("I", tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    return _guarded(encode)


def _fast(text: str) -> Encode:
    """Raises ValueError where fastokens is not installed or does not take it."""
    if sys.byteorder != "little":
        raise ValueError("fastokens gives little-endian ids")
    with _refusing("fastokens does not take it"):
        import fastokens

        twin = _unlimited(fastokens.Tokenizer.from_json_str(text))

    def encode(text: str, special: bool) -> array[int]:
        ids = array("I")
        ids.frombytes(twin.encode_batch_flat([text], add_special_tokens=special)[0])
        return ids

    return _guarded(encode)


def _proven_twin(text: str, slow: Encode, samples: list[str]) -> Encode | None:
    try:
        fast = _fast(text)
    except ValueError as error:  # whatever a faster engine stumbles over, the reference remains
        logger.info("%s", error)
        return None
    for sample in samples:
        for special in (False, True):
            wanted = slow(sample, special)
            try:
                same = fast(sample, special) == wanted
            except NotReproducible:
                same = False
            if not same:
                logger.warning("fastokens differs from tokenizers on a probe: not used for this model")
                return None
    return fast


def _name(tokenizer_json: bytes) -> str:
    return hashlib.sha256(tokenizer_json).hexdigest()


def _affixes(encode: Encode, samples: list[str]) -> Affixes | None:
    """What ``special`` adds, if it is the same whatever the text."""
    plain, whole = encode("a", False), encode("a", True)
    ends = range(len(whole) - len(plain) + 1)
    at = next((k for k in ends if whole[k : k + len(plain)] == plain), None)
    if at is None:
        return None
    before, behind = whole[:at], whole[at + len(plain) :]
    same = all(encode(sample, True) == before + encode(sample, False) + behind for sample in samples)
    return (before, behind) if same else None


def _samples(specials: tuple[str, ...]) -> list[str]:
    """Strings that tell tokenizers apart: scripts, digits, odd white space, normalisation, special tokens in text."""
    rng = random.Random(20)
    pieces = ["def f(x):\n    return x ** 2\n", "The quick brown fox", " jumps", "don't", "I'LL", "1234567890", "3.14"]
    pieces += [
        "中文字符",
        "日本語です",
        "Привет",
        "مرحبا",
        "שלום",
        "é",
        "e\u0301",
        "\ufb01",
        "①",
        "😀👩\u200d👩\u200d👧",
    ]
    pieces += ["\t\t", "   ", "\n\n\n", "\r\n", "\u00a0", "\u3000", "\u200b", "", "\x00", "\ufffd"]
    pieces += ["a" * 40, "==", "/*", "</", '{"k": [1, null]}', "http://a.b/c?d=e"]
    pieces += specials
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 12))) for _ in range(PROBES)] + pieces
