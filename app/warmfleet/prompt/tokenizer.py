"""Makes token ids as the engines do: with `tokenizers`, or with the faster `fastokens` if it gives equal ids."""

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

#: The environment of a process that tokenises one text at a time. By default the libraries start a thread for each
#: core, up to 32, each with 64 MiB of address space. A single thread is as fast for a text. The libraries read these
#: variables at their first use.
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FASTOKENS_BPE_THREADS": "1"}
PROBES = 300  # number of random texts on which the fast library is compared with the slow one
MAX_SPECIAL = 256  # most characters of a special token that is put into probe texts
NO_FACTS = Facts((), spaces=False, added=())


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A loaded tokenizer.

    encode: text, and whether to add special tokens, → unsigned 32-bit ids. Half a surrogate pair raises
    UnicodeEncodeError, and any other text on which the library fails raises NotReproducible. fast: ``fastokens``
    encodes, 30 to 90 times faster. facts: empty after ``load_tried``. affixes: the special tokens before and behind
    every text; None if they depend on the text.
    """

    name: str
    encode: Encode
    fast: bool
    facts: Facts
    affixes: Affixes | None

    @classmethod
    def load(cls, tokenizer_json: bytes) -> Encoder:
        """Load a trusted file and try it in this process. Takes 0.1 to 6 s, for an executor. Raises ValueError."""
        return cls.of(read(tokenizer_json), tokenizer_json)

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokenizer_json: bytes) -> Encoder:
        """Make an encoder from a file and the tokenizer that ``read`` made of it. Raises ValueError."""
        try:
            slow = _slow(tokenizer)
            facts = Facts.of(tokenizer)
            samples = _samples(tuple(token for token in facts.added if len(token) <= MAX_SPECIAL)[:64])
            fast = _proven_fast(tokenizer_json.decode(), slow, samples)
            affixes = _affixes(fast or slow, samples)
        except NotReproducible as error:
            raise ValueError(f"it fails on a text: {in_words(error.__cause__)}") from error
        return cls(digest(tokenizer_json), fast or slow, fast is not None, facts, affixes)

    @classmethod
    def load_tried(cls, tokenizer_json: bytes, *, fast: bool, affixes: Affixes | None) -> Encoder:
        """Load a file that another process has tried, with the results of the trial. Raises ValueError."""
        encode = _fast(tokenizer_json.decode()) if fast else _slow(read(tokenizer_json))
        return cls(digest(tokenizer_json), encode, fast, NO_FACTS, affixes)

    def cuts(self, template: str) -> Cuts:
        """Find where texts of this tokenizer may be cut. template: source of the chat template that makes the texts."""
        if self.affixes is None:
            return Cuts((), spaces=False)
        try:
            return self.facts.cuts(template, self.plain)
        except NotReproducible:
            return Cuts((), spaces=False)

    def plain(self, text: str) -> array[int]:
        """Return the ids of the text alone."""
        return self.encode(text, False)

    def whole(self, text: str) -> array[int]:
        """Return the ids of the text with the special tokens that the tokenizer adds."""
        return self.encode(text, True)


def read(tokenizer_json: bytes) -> Tokenizer:
    """Read a file with the slow library, which holds the interpreter for 50 ms per MB. Raises ValueError."""
    with _value_error("not a tokenizer"):
        tokenizer: Tokenizer = _unlimited(Tokenizer.from_str(tokenizer_json.decode()))
    return tokenizer


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file, which is the name of the tokenizer in it."""
    return hashlib.sha256(content).hexdigest()


def in_words(error: BaseException | None) -> str:
    """Return the message of a library's error in one line of at most 200 characters, for a log."""
    return " ".join(str(error).split())[:200]


#: BaseExceptions that end a thread or a task. A panic in Rust arrives as a BaseException of another class.
ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


@contextmanager
def _value_error(complaint: str) -> Iterator[None]:
    """Raise ValueError, with ``complaint`` and the library's words, if a library fails on a file."""
    try:
        yield
    except ENDINGS:
        raise
    except BaseException as error:  # a panic in Rust is no Exception, and must not end the replica
        raise ValueError(f"{complaint}: {in_words(error)}") from error


def _unlimited(tokenizer: Any) -> Any:
    """Switch off truncation and padding in a tokenizer of either library, as engines do."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _guarded(encode: Encode) -> Encode:
    """Wrap ``encode`` to raise NotReproducible for every error of a library, which then affects only that text."""

    def guarded(text: str, special: bool) -> array[int]:
        try:
            return encode(text, special)
        except (UnicodeError, *ENDINGS):
            raise
        except BaseException as error:  # a panic in Rust is no Exception: it costs this text only
            raise NotReproducible("tokenizer") from error

    return guarded


def _slow(tokenizer: Tokenizer) -> Encode:
    def encode(text: str, special: bool) -> array[int]:
        if not text.isascii():
            text.encode()  # raises UnicodeEncodeError for half a surrogate pair; the library would raise TypeError
        # Of the library's functions only this one releases the interpreter, so that other requests go on meanwhile.
        return array("I", tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    return _guarded(encode)


def _fast(text: str) -> Encode:
    """Encode with fastokens. Raises ValueError if it is not installed or does not take the file."""
    if sys.byteorder != "little":
        raise ValueError("fastokens gives little-endian ids")
    with _value_error("fastokens does not take it"):
        import fastokens

        encode_all = _unlimited(fastokens.Tokenizer.from_json_str(text)).encode_batch_flat

    def encode(text: str, special: bool) -> array[int]:  # ``_guarded`` written out, for speed: it runs for each piece
        try:
            return array("I", encode_all([text], add_special_tokens=special)[0])
        except (UnicodeError, *ENDINGS):
            raise
        except BaseException as error:
            raise NotReproducible("tokenizer") from error

    return encode


def _proven_fast(text: str, slow: Encode, samples: list[str]) -> Encode | None:
    """Return the fast encoding of this file, or None if it does not give the ids of ``slow`` for every sample."""
    try:
        fast = _fast(text)
    except ValueError as error:  # the slow tokenizer is used
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


def _affixes(encode: Encode, samples: list[str]) -> Affixes | None:
    """Return the special tokens before and behind every sample, or None if they are not the same for all."""
    plain, whole = encode("a", False), encode("a", True)
    ends = range(len(whole) - len(plain) + 1)
    at = next((k for k in ends if whole[k : k + len(plain)] == plain), None)
    if at is None:
        return None
    before, behind = whole[:at], whole[at + len(plain) :]
    same = all(encode(sample, True) == before + encode(sample, False) + behind for sample in samples)
    return (before, behind) if same else None


def _samples(specials: tuple[str, ...]) -> list[str]:
    """Make texts in which tokenizers differ, by scripts, digits, odd white space, normalisation or special tokens."""
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
