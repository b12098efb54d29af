"""Text → token ids as the engines make them: by `tokenizers`, or by a faster twin proved equal when it is loaded."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from warmfleet.chat import NotReproducible
from warmfleet.cuts import Cuts, Facts

if TYPE_CHECKING:
    from collections.abc import Callable

    Encode = Callable[[str, bool], array[int]]

logger = logging.getLogger("warmfleet.encoder")

PROBES = 300


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Text and whether to add special tokens → token ids, unsigned 32-bit. fast: the 30 to 90 times faster engine.

    affixes: the special tokens that are added before and behind every text; None: they are not the same for all.
    """

    name: str
    encode: Encode
    fast: bool
    facts: Facts
    affixes: tuple[array[int], array[int]] | None

    @classmethod
    def load(cls, tokenizer_json: bytes) -> Encoder:
        """Raises ValueError if no engine reads it. Takes 0.5 to 3 s: call it in an executor."""
        try:
            return cls._load(tokenizer_json)
        except ValueError:
            raise
        except Exception as error:  # the library raises nothing more special, some of it at the first text only
            raise ValueError(f"not a tokenizer: {error}") from error

    @classmethod
    def _load(cls, tokenizer_json: bytes) -> Encoder:
        text = tokenizer_json.decode()
        slow = Tokenizer.from_str(text)
        slow.no_truncation()
        slow.no_padding()

        def encode(text: str, special: bool) -> array[int]:
            # Of all ways only this one releases the GIL: other requests go on meanwhile.
            return array("I", slow.encode_batch_fast([text], add_special_tokens=special)[0].ids)

        facts = Facts.of(slow)
        fast = _fast_twin(text, encode, facts.added[:64])
        affixes = _affixes(fast or encode, facts.added[:64])
        name = hashlib.sha256(tokenizer_json).hexdigest()
        return cls(name, _guarded(fast or encode), fast is not None, facts, affixes)

    def cuts(self, template: str) -> Cuts:
        """Where texts of this tokenizer may be cut; template: the chat template that will make them."""
        if self.affixes is None:
            return Cuts((), spaces=False)
        return self.facts.cuts(template, self.plain)

    def plain(self, text: str) -> array[int]:
        return self.encode(text, False)

    def whole(self, text: str) -> array[int]:
        """With the special tokens that the tokenizer adds."""
        return self.encode(text, True)


def _guarded(encode: Encode) -> Encode:
    """Some tokenizers have no id for some texts."""

    def guarded(text: str, special: bool) -> array[int]:
        try:
            return encode(text, special)
        except ValueError:  # a lone surrogate
            raise
        except Exception as error:  # as above
            raise NotReproducible("tokenizer") from error

    return guarded


def _fast_twin(text: str, reference: Encode, specials: tuple[str, ...]) -> Encode | None:
    try:
        import fastokens
    except ImportError:
        return None
    if sys.byteorder != "little":
        return None
    try:
        twin = fastokens.Tokenizer.from_json_str(text)
        twin.no_truncation()
        twin.no_padding()

        def encode(text: str, special: bool) -> array[int]:
            ids = array("I")
            ids.frombytes(twin.encode_batch_flat([text], add_special_tokens=special)[0])
            return ids

        for sample in _samples(specials):
            for special in (False, True):
                if encode(sample, special) != reference(sample, special):
                    logger.warning("fastokens differs from tokenizers on a probe: not used for this model")
                    return None
    except Exception as error:  # noqa: BLE001  whatever a faster engine stumbles over, the reference remains
        logger.info("fastokens does not take this tokenizer: %s", error)
        return None
    return encode


def _affixes(encode: Encode, specials: tuple[str, ...]) -> tuple[array[int], array[int]] | None:
    """What ``special`` adds, if it is the same whatever the text."""
    plain, whole = encode("a", False), encode("a", True)
    ends = range(len(whole) - len(plain) + 1)
    at = next((k for k in ends if whole[k : k + len(plain)] == plain), None)
    if at is None:
        return None
    before, behind = whole[:at], whole[at + len(plain) :]
    same = all(encode(sample, True) == before + encode(sample, False) + behind for sample in _samples(specials))
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
