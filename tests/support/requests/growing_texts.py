"""Random texts for tests of tokenizers, as growing conversations give them; some are edited, cut off or begun anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "def", "return", "self", "import", "None", "I", "don't", "we'll"]
ODD = [
    "中文字符",
    "日本語、",
    "Привет",
    "שלום",
    "e\u0301",
    "é",
    "😀",
    "👩\u200d👧",
    "  ",
    "\n\n",
    "\t",
    "\r\n",
    "   \n ",
    "\u00a0",
]
ODD += [
    "1234567",
    "3.14",
    "==",
    "</",
    "(x)",
    "\u2581",
    "Ġ",
    "\x00",
    "\ufffd",
    "a" * 50,
    "<|im",
    "_start|>",
    "\u0301",
    "'S",
]


@dataclass
class Texts:
    """An endless stream of prompts. separators: of the template that would have made them."""

    seed: int
    separators: tuple[str, ...]
    rng: random.Random = field(init=False)
    kept: list[str] = field(default_factory=lambda: [""])

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def some(self, length: int) -> str:
        """About ``length`` characters."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.1:  # no place to cut
            return "".join(rng.choices([*ODD[:3], "x"], k=length // 4 + 1))
        if kind < 0.2:
            return rng.choice([" ", "\n", "a ", "a  ", " a", "\t "]) * (length // 2)
        odd = ODD + list(self.separators)
        parts = [rng.choice(odd) if rng.random() < 0.08 else rng.choice(WORDS) for _ in range(length // 5 + 1)]
        return "".join(part + rng.choice((" ", " ", " ", " ", "", "  ", ".\n")) for part in parts)

    def next(self) -> str:
        """Return a recent text, grown, edited, truncated or unchanged, or a new text."""
        rng, text = self.rng, self.rng.choice(self.kept)
        kind, at = rng.random(), rng.randrange(len(text) + 1)
        if len(text) > 30_000 or kind < 0.1:
            text = self.some(rng.choice((5, 900, 4_000)))
        elif kind < 0.6:
            text += rng.choice(self.separators or ("\n",)) + self.some(rng.choice((20, 300, 3_000)))
        elif kind < 0.75:
            text = text[:at] + self.some(10) + text[at + rng.randrange(20) :]
        elif kind < 0.9:
            text = text[:at]
        self.kept = [*self.kept[-9:], text]
        return text
