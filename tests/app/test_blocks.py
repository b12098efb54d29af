"""Block hashes equal to vLLM's, bit by bit."""

from __future__ import annotations

import random

import pytest

from warmfleet.blocks import MAX_BLOCKS, TEXT_BLOCK_BYTES, TEXT_SCHEME, Hasher, text_chain, text_tokens
from warmfleet_worker import wire
from warmfleet_worker.wire import Scheme, chain_hashes, default_none_hash, pack_hashes

TOKENS = list(range(33))  # two full blocks of 16 and the token that is always computed

#: From vLLM 0.32's own functions, PYTHONHASHSEED unset: tokens 0..31, block 16.
GOLDEN = {
    "sha256_cbor": {
        "none": "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "h1": "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
        "h2": "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
        "salt": "1708d232e5ddcdef9cacf181a634fac79ecbebd13df829ddbe8bcd406fbb083b",
        "lora": "876c949e35b9de0f64799fe5f7d5c4aba93c0d97d320a6bfb1acc4b5cda4221d",
        "plain_salt": "91e5060ba0e2121fd5dd5886b8338c5bc6247732d11813b2b5c64d62862acc88",
        "none_0": "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
    },
    "sha256": {
        "none": "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "h1": "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
        "h2": "8be7aaa33831156d316f1f463ae57e643deb63f42e633e2d631df88815cc4629",
        "salt": "fac9edbfd8118d3b18d4a5012dfd9bce41ff921c29a58e2708f5c656ca3c3a75",
        "lora": "bf7c072a7751c299a3c5065de5923f1fb932dffaa7f2e20e564615f89b65daa4",
        "plain_salt": "608b4832378374800bdc5e44a4df3a0fc3f3531918e9101a795475c2b543a5d5",
        "none_0": "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
    },
}


def hasher(algorithm: str, extra_keys: str = "tagged", block_tokens: int = 16) -> Hasher:
    return Hasher(Scheme(algorithm, default_none_hash(algorithm), block_tokens, extra_keys))


def tail(digest: str) -> bytes:
    return bytes.fromhex(digest)[-8:]


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256"])
def test_golden_vectors(algorithm: str) -> None:
    golden = GOLDEN[algorithm]
    assert default_none_hash(algorithm).hex() == golden["none"]
    assert default_none_hash(algorithm, "0").hex() == golden["none_0"]
    chain = hasher(algorithm).chain(TOKENS)
    assert chain.hashes == tail(golden["h1"]) + tail(golden["h2"])
    assert hasher(algorithm).chain(TOKENS, salt="t1").hashes[:8] == tail(golden["salt"])
    assert hasher(algorithm).chain(TOKENS, lora=("a", "/adapters/a")).hashes[:8] == tail(golden["lora"])
    assert hasher(algorithm, "plain").chain(TOKENS, salt="t1").hashes[:8] == tail(golden["plain_salt"])


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256"])
@pytest.mark.parametrize("extra_keys", ["tagged", "plain"])
@pytest.mark.parametrize("block_tokens", [1, 16, 24, 300])
def test_equals_the_reference(algorithm: str, extra_keys: str, block_tokens: int) -> None:
    made, rng = hasher(algorithm, extra_keys, block_tokens), random.Random(block_tokens)
    for high in (23, 255, 65_535, 262_143, 2**32 - 1):  # every width of CBOR integers, and ids beyond the table
        ids = [rng.randrange(high + 1) for _ in range(3 * block_tokens + 7)]
        for salt, lora in ((None, None), ("s" * 30, None), (None, ("a", "/x")), ("t", ("b" * 300, "/y"))):
            expected = pack_hashes(chain_hashes(made.scheme, ids[: len(ids) - 1], None, salt, lora))
            assert made.chain(ids, salt, lora).hashes == expected


def test_capped_as_the_engine_caps() -> None:
    made = hasher("sha256_cbor")
    lengths = {n: len(made.chain(range(n)).hashes) // 8 for n in (0, 1, 16, 17, 32, 33)}
    assert lengths == {0: 0, 1: 0, 16: 0, 17: 1, 32: 1, 33: 2}  # the last token is always computed
    assert len(hasher("sha256_cbor", block_tokens=1).chain([7] * 20_000).hashes) == 8 * MAX_BLOCKS


def test_text_chain_shares_prefixes_only() -> None:
    one, other = b"x" * 640 + b"one", b"x" * 640 + b"other"
    assert text_chain(one).hashes == text_chain(other).hashes
    assert len(text_chain(one).hashes) == 8 * 640 // TEXT_BLOCK_BYTES
    assert text_chain(b"y" + one).hashes[:8] != text_chain(one).hashes[:8]
    assert text_chain(b"").hashes == b""
    assert (text_tokens(0), text_tokens(640)) == (1, 160)
    assert text_chain(one).scheme_id == TEXT_SCHEME.scheme_id != hasher("sha256_cbor").scheme.scheme_id


def test_text_scheme_is_one_that_a_record_may_carry() -> None:
    assert Scheme.from_dict(TEXT_SCHEME.as_dict()) == TEXT_SCHEME
    assert wire.SCHEMA == 1
