"""Tokenizers that workers bring: real processes try them, and what would end or stall a replica never reaches it."""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from warmfleet import trial
from warmfleet.chat import NotReproducible
from warmfleet.encoder import Encoder
from warmfleet.trial import Encoders, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

REAL = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"
END = "<|im_end|>"


def letters(
    normalizer: Normalizer | None = None, pre_tokenizer: PreTokenizer | None = None
) -> bytes:
    """A tokenizer.json that knows printable ASCII, with these parts."""
    tokenizer = Tokenizer(models.BPE({chr(code): at for at, code in enumerate(range(33, 127))}, []))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer.to_str().encode()


def raw(**parts: Any) -> bytes:
    """The same with parts as a file has them: the library would refuse to make them."""
    return json.dumps(json.loads(letters()) | parts).encode()


def split(pattern: str) -> bytes:
    return letters(pre_tokenizer=pre_tokenizers.Split(Regex(pattern), "isolated"))


TEXT, TOKEN = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "X", "type_id": 0}}


def adding(pieces: list[Any], known: dict[str, Any]) -> dict[str, Any]:
    """A post-processor that makes ``pieces`` of a text."""
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": known}


def charsmap(text: bytes) -> bytes:
    """A table of SentencePiece's with this one replacement."""
    content = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + text + b"\0").decode()
    return raw(normalizer={"type": "Precompiled", "precompiled_charsmap": content})


def grows(*contents: str) -> bytes:
    return letters(normalizers.Sequence([normalizers.Replace(one[0], one) for one in contents]))


X = {"X": {"id": "X", "ids": [0], "tokens": ["X"]}}
HOSTILE = {
    "eight times ten": (grows(*["a" * 10] * 8), "may make 100000000 characters of one"),
    "a rare character": (grows("\ue000" + "x" * 10**6), "may make 1000001 characters of one"),
    "out of nothing": (letters(normalizers.Replace(Regex("(?=\ue000)"), "x" * 100)), "may make 101"),
    "in front": (letters(normalizers.Prepend("x" * 100)), "may make 101"),
    "a table": (charsmap(b"x" * 1000), "may make 1000"),
    "ever more bytes": (
        letters(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel() for _ in range(24)])),
        "may make 16777216",
    ),
    "a text many times": (raw(post_processor=adding([TEXT] * 20_000, {})), "limit of its trial: crash"),
    "a pattern without end": (split("(a+)+[b]"), "retry-limit"),
    "of letters of its own": (split("(q+)+[b]"), "fails on a long text"),
    "a quadratic pattern": (split(r"[\s\S](?=[\s\S]*\x{e000})|[\s\S]"), "and again"),
    "a pattern of gigabytes": (split("((((a{999}){999}){999}){999})"), ""),
    "an unknown special token": (raw(post_processor=adding([TOKEN, TEXT], {})), "no entry found"),
    "a thousand special tokens": (raw(post_processor=adding([TOKEN] * 1000 + [TEXT], X)), "adds 1000 tokens"),
    "no length": (raw(pre_tokenizer={"type": "FixedLength", "length": 0}), "non-zero"),
    "no tokenizer": (b'{"model": 1}', "not a tokenizer"),
    "no text": (b"\xff", "not a tokenizer"),
}


@pytest.fixture
def encoders() -> Iterator[Encoders]:
    with ThreadPoolExecutor(1) as executor:
        yield Encoders(executor)


async def refusal(encoders: Encoders, content: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        await encoders.take(content, END, trusted=False)
    return caught.value


@pytest.mark.parametrize("case", HOSTILE)
async def test_x(encoders: Encoders, case: str) -> None:
    content, reason = HOSTILE[case]
    t=time.perf_counter()
    got = await refusal(encoders, content)
    print(case, "->", str(got)[:200], round(time.perf_counter()-t,2))
    assert reason in str(got)
