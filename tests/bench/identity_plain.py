"""The same work without our code: the template and tokenizer of transformers, and vLLM's block hash over cbor2."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import cbor2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from warmfleet_worker.protocol.wire import default_none_hash

BLOCK = 16


class Plain:
    """Turns a body into packed block hashes, without any cache."""

    def __init__(self, tokenizer: bytes, template: str) -> None:
        self.tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer.from_str(tokenizer.decode())
        )
        self.tokenizer.chat_template = template

    def chain(self, body: bytes) -> bytes:
        messages = json.loads(body)["messages"]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        previous, packed = default_none_hash("sha256_cbor"), []
        for start in range(0, len(ids) - BLOCK, BLOCK):
            previous = _sha256_cbor((previous, tuple(ids[start : start + BLOCK]), None))
            packed.append(previous[-8:])
        return b"".join(packed)


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
