"""The number of tokens that an image has in a prompt, by its width and height, for families of models. Pure.

A family is a formula with whole numbers as parameters. A plugin announces family and parameters only if the formula
counts as its vLLM does for every one of SIZES. For other models it announces the family LEARNED: engines report the
tokens of each image that they see (operation ``image`` of their streams).

If every image has the same tokens, among them others than the announced one, these are announced as ``runs``: a token
id, how often it stands there, then the next. ``joins`` are three token ids each: where an image meets a text or another
image, the first two become the third. Gemma 3 has both: it puts line feeds around an image.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence, Sequence

    Join = tuple[int, int, int]

LEARNED = "learned"  # in place of a family: no formula
MAX_TOKENS = 2**20  # most tokens of a prompt's images; a lie about their sizes must not cost memory
MAX_ID = 256  # most characters of an image's identifier, which is in the hash of each of the image's blocks
MADE_CHARACTERS = 16  # length of the digest of what a processor makes of images, which is before each report in Redis
MAX_IMAGE_BYTES = 4_096  # longest report of an image; one of Pixtral's has 1.5 KB

#: Widths and heights on which a formula is tried: small, large, odd, and nearly as narrow as transformers allows.
SIZES = tuple(
    (width, height) for width in (16, 27, 64, 301, 777, 2_000, 4_032) for height in (28, 55, 480, 1_500, 3_024)
)


def fixed(_width: int, _height: int, tokens: int) -> int:
    """Every image is scaled to one size, as in LLaVA."""
    return tokens


def grid(width: int, height: int, factor: int, least: int, most: int) -> int:
    """Both sides become multiples of ``factor`` pixels, with ``least`` to ``most`` pixels in all, as in Qwen's VL.

    A square of ``factor`` pixels is a token. This is ``smart_resize`` of transformers.
    """
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor * factor > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor * factor < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * columns


#: Name of a family -> its formula, and the names of its parameters.
FAMILIES: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "fixed": (fixed, ("tokens",)),
    "grid": (grid, ("factor", "least", "most")),
}


def join(pieces: Sequence[MutableSequence[int]], joins: Sequence[Join]) -> None:
    """Join tokens where one of these pieces of a prompt ends and the next begins, one kind after the other as vLLM."""
    for left, right, made in joins:
        before: MutableSequence[int] = []
        for piece in pieces:
            if before and piece and (before[-1], piece[0]) == (left, right):
                before[-1] = made
                del piece[0]
            before = piece or before
