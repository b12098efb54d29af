"""Where a text may be cut so that its pieces, tokenised one by one, give the token ids of the whole text. Pure.

Two rules are exact for the tokenizers in use: a text may be cut before a space that follows an ASCII letter, and before
a special token that the tokenizer splits off first of all (a separator). Each tokenizer is checked for both rules when
it is loaded: by the contents of its file, and by a thousand difficult strings. A text is cut by the rules that its
tokenizer passes.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenizers import AddedToken, Tokenizer

GRID = 1_024  # fewest characters of a piece
WINDOW = 65_536  # most characters searched in one call, which holds the interpreter lock for 1 ms
MAX_SEPARATORS = 16  # most separators that are searched for: hundreds would make the search slow
CHECKS = 1_000  # number of sample texts that must give the same token ids cut and whole before a tokenizer is cut
#: Regular expression syntax that looks to the left of a match. Character classes are removed before the search.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBAGKZz]|\^|\$")
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_LETTER_SPACE = re.compile("[A-Za-z][ \u0120\u2581]")
_LETTER_BLANK = re.compile("[A-Za-z] ")
_LETTER = re.compile("[A-Za-z]")


class Cuts:
    """Cuts texts for one tokenizer, at its ``separators`` and, with ``spaces``, before spaces.

    Every piece but the last has at least ``grid`` characters.
    """

    def __init__(self, separators: Sequence[str], *, spaces: bool, grid: int = GRID) -> None:
        self.separators, self.spaces, self.grid = tuple(separators), spaces, grid
        rules = (["[A-Za-z] "] if spaces else []) + [re.escape(separator) for separator in separators]
        self._pattern = re.compile("|".join(rules)) if rules else None
        self._longest = max(map(len, ("a ", *separators)))

    def next(self, text: str, start: int) -> tuple[int, int] | None:
        """Return (end of the piece from ``start``, how far the text was read to find it); None for the last piece.

        Texts that are equal up to the second number have the same piece.
        """
        if len(text) < start + self.grid:
            return None
        found = self._search(text, start + self.grid - 1)
        while found is not None:
            if found[0][-1] == " " and len(found[0]) == 2:
                return found.end() - 1, found.end()
            if found.start() >= start + self.grid:
                return found.start(), found.end()
            found = self._search(text, found.start() + 1)
        return None

    def _search(self, text: str, start: int) -> re.Match[str] | None:
        while self._pattern is not None and start < len(text):
            found = self._pattern.search(text, start, start + WINDOW + self._longest)
            if found is not None:
                return found
            start += WINDOW
        return None

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the text in pieces, first to last."""
        start = 0
        while (cut := self.next(text, start)) is not None:
            yield text[start : cut[0]]
            start = cut[0]
        yield text[start:]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts in a tokenizer's file that decide about cutting.

    hard: special tokens that are split off before the rest of the text is tokenised. spaces: cutting before a space
    may be exact. added: all tokens that the file adds to the model's vocabulary.
    """

    hard: tuple[str, ...]
    spaces: bool
    added: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Facts:
        """Return the facts of a tokenizer of the ``tokenizers`` library."""
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        plain = tokenizer.normalizer is None
        hard = tuple(
            token.content
            for token in added
            if token.special and not (token.lstrip or token.single_word or (token.normalized and not plain))
        )
        return cls(hard, _spaces_are_safe(tokenizer, added), tuple(token.content for token in added))

    def cuts(self, template: str, encode: Callable[[str], Sequence[int]]) -> Cuts:
        """Return the cuts that leave the ids of all sample texts as they are. Takes some 20 ms.

        template: source of the chat template; separators occur in it. encode: text → ids, no special tokens around.
        """
        separators = [token for token in self.hard if token in template and not self._overlapped(token)]
        separators = separators[:MAX_SEPARATORS]
        for hard, spaces in ((separators, self.spaces), (separators, False), ([], self.spaces)):
            cuts = Cuts(hard, spaces=spaces, grid=1)
            if all(_equal(cuts, sample, encode) for sample in _samples(separators, self.added)):
                return Cuts(hard, spaces=spaces)
        return Cuts((), spaces=False)

    def _overlapped(self, token: str) -> bool:
        """Return whether another token may begin before ``token`` in a text and take a part of it."""
        starts = tuple(token[:length] for length in range(1, len(token)))
        return any(other.endswith(starts) or (other != token and token in other) for other in self.added)


def _equal(cuts: Cuts, text: str, encode: Callable[[str], Sequence[int]]) -> bool:
    """Return whether the pieces of ``text`` give the ids of the whole."""
    return list(encode(text)) == list(itertools.chain.from_iterable(map(encode, cuts.pieces(text))))


def _spaces_are_safe(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> bool:
    """Return whether the tokenizer's file shows that no step depends on both sides of a cut before a space."""
    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.dropout:
        return False
    normalizers = list(_flat(tokenizer.normalizer, "normalizers"))
    if not all(map(_keeps_spaces, normalizers)):
        return False
    if not all(map(_left_to_right, _flat(tokenizer.pre_tokenizer, "pretokenizers"))):
        return False
    for token in added:
        spans = _LETTER_SPACE if token.normalized and normalizers else _LETTER_BLANK
        if spans.search(token.content) or (token.rstrip and _LETTER.match(token.content[-1])):
            return False
    names = {token.content for token in added}
    return not any(
        _LETTER_SPACE.search(entry) for entry in tokenizer.get_vocab(with_added_tokens=False) if entry not in names
    )


def _flat(part: Any, members: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer as its file describes them. Sequences are taken apart."""
    if part is None:
        return
    described = part if isinstance(part, dict) else json.loads(part.__getstate__())
    if described.get("type") == "Sequence":
        for member in described.get(members) or ():
            yield from _flat(member, members)
    else:
        yield described


def _keeps_spaces(normalizer: dict[str, Any]) -> bool:
    if normalizer.get("type") == "Replace":
        return normalizer.get("pattern") == {"String": " "} and normalizer.get("content") == "\u2581"
    return normalizer.get("type") == "NFC"


def _left_to_right(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Split":
        pattern = pre_tokenizer.get("pattern") or {}
        return "String" in pattern or not _LOOKS_BACK.search(_CLASS.sub("", pattern.get("Regex") or "^"))
    return kind in ("ByteLevel", "Metaspace", "Digits")


def _samples(separators: Sequence[str], added: Sequence[str]) -> Iterator[str]:
    """Yield texts full of places where a rule would cut, with difficult characters beside them."""
    rng = random.Random(7)
    words = ["a", "The", "end", "I", "x2", "don't", "we'LL", "def"]
    words += ["caf\u00e9", "e\u0301", "na\u00efve", "\u00df", "\ufb01x"]
    spaces = [" ", "  ", "   ", " \n", "\n ", "\t ", " \t", "\r\n", "\n\n", " \u00a0", "\u3000", " \u200b", ""]
    others = ["1", "1234", "3.14", ",", "...", "==", "/*", "</", "'s", "'", '"', "(", "[1]", "\x00", "\ufffd"]
    others += ["\u4e2d\u6587", "\u65e5\u672c\u8a9e", "\u0410\u0411", "\u05e9\u05dc", "\u0645\u0631", "\u0301"]
    others += ["\U0001f600", "\U0001f469\u200d\U0001f467", "\u2581", "\u0120"]
    special = [*separators, *added[:48]]
    special += [separator[:-1] for separator in separators] + [separator[1:] for separator in separators]
    for _ in range(CHECKS):
        parts = []
        for _ in range(rng.randrange(1, 9)):
            kinds = (words, words, others, special or words)
            parts.append(rng.choice(rng.choice(kinds)))
            parts.append(rng.choice(spaces[: rng.choice((1, len(spaces)))]))
        yield "".join(parts)
