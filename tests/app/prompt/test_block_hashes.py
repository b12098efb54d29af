"""Block hashes equal to vLLM's, bit by bit."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
from tests.vllm import golden

from warmfleet.prompt.block_hashes import (
    MAX_BLOCKS,
    TEXT_BLOCK_BYTES,
    TEXT_SCHEME,
    Hasher,
    hash_of,
    text_chain,
    text_tokens,
)
from warmfleet.protocol import wire
from warmfleet.protocol.wire import DIGEST_BYTES, Scheme, WireError, chain_hashes, default_none_hash, pack_hashes

#: Chains made by six versions of real vLLM, 0.28 to 0.33, with the schemes that our plugin announced there.
GOLDEN = json.loads(golden.OUT.read_text())
VECTORS = [
    pytest.param(version, vector, id=f"{version}-{vector['scheme']['algorithm']}-{vector['scheme']['block_tokens']}")
    for version, made in GOLDEN.items()
    for vector in made["vectors"]
]


def hasher(algorithm: str, extra_keys: str = "tagged", block_tokens: int = 16) -> Hasher:
    none_hash = default_none_hash(algorithm)[: DIGEST_BYTES[algorithm]]
    return Hasher(Scheme(algorithm, none_hash, block_tokens, extra_keys))


@pytest.mark.parametrize(("version", "vector"), VECTORS)
def test_golden_vectors(version: str, vector: dict[str, Any]) -> None:
    scheme, seed = Scheme.from_dict(vector["scheme"]), vector["seed"]
    assert scheme.extra_keys in (("plain",) if version < "0.31" else ("tagged", "lookahead_1", "lookahead_3"))
    assert scheme.as_dict() == vector["scheme"]
    made = Hasher(scheme)
    for name, case in golden.CASES.items():
        assert made.chain(golden.TOKENS, **case).hashes.hex() == vector["hashes"][name], name
    if scheme.algorithm.startswith("sha256") and (seed or version >= "0.29"):  # else the engine takes a random one
        assert default_none_hash(scheme.algorithm, seed or "vllm-none-hash") == scheme.none_hash


def test_every_version_and_algorithm_has_vectors() -> None:
    assert [version.rpartition(".")[0] for version in GOLDEN] == ["0.28", "0.29", "0.30", "0.31", "0.32", "0.33"]
    seen = {(version, vector["scheme"]["algorithm"]) for version, made in GOLDEN.items() for vector in made["vectors"]}
    assert seen == {(version, algorithm) for version in GOLDEN for algorithm in DIGEST_BYTES}


def test_an_unknown_scheme_is_refused() -> None:
    good = GOLDEN["0.33.0"]["vectors"][0]["scheme"]
    forms = [good | {"extra_keys": form} for form in ("lookahead_0", "lookahead_100", "lookahead_x", "plain_drop_drop")]
    for bad in (*forms, good | {"none_hash": "00" * 16}, good | {"algorithm": "md5"}, good | {"none_hash": "zz"}):
        with pytest.raises(WireError):
            Scheme.from_dict(bad)


@pytest.mark.parametrize("algorithm", DIGEST_BYTES)
@pytest.mark.parametrize("extra_keys", ["tagged", "plain", "lookahead_1", "lookahead_3", "lookahead_17"])
@pytest.mark.parametrize("block_tokens", [1, 16, 24, 300])
def test_equals_the_reference(algorithm: str, extra_keys: str, block_tokens: int) -> None:
    made, rng = hasher(algorithm, extra_keys, block_tokens), random.Random(block_tokens)
    for high in (23, 255, 65_535, 262_143, 2**32 - 1):  # every width of CBOR integers, and ids beyond the table
        ids = [rng.randrange(high + 1) for _ in range(3 * block_tokens + 7)]
        for salt, lora in ((None, None), ("s" * 30, None), (None, ("a", "/x")), ("t", ("b" * 300, "/y"))):
            whole = ids if made.scheme.lookahead else ids[:-1]
            expected = pack_hashes(chain_hashes(made.scheme, whole, None, salt, lora, hash_of(algorithm)))
            assert made.chain(ids, salt, lora).hashes == expected


FINE = [
    vector
    for made in GOLDEN.values()
    for vector in made["vectors"]
    if vector["scheme"]["block_tokens"] == 16 and vector["scheme"]["algorithm"].startswith("sha256")
]


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("vector", FINE, ids=lambda vector: vector["scheme"]["algorithm"])
def test_a_block_that_is_hashed_in_steps_has_the_hash_of_its_last_step(vector: dict[str, Any], steps: int) -> None:
    """As in vLLM, where a group's block is larger than what is hashed at a time: each k-th hash of the finer chain."""
    fine = Scheme.from_dict(vector["scheme"])
    scheme = replace(fine, block_tokens=16 * steps, hash_block_tokens=16)
    assert scheme.scheme_id != replace(fine, block_tokens=16 * steps, hash_block_tokens=16 * steps).scheme_id
    assert Scheme.from_dict(scheme.as_dict()) == scheme
    made = Hasher(scheme)
    for name, case in golden.CASES.items():
        hashes = bytes.fromhex(vector["hashes"][name])
        expected = b"".join([hashes[at : at + 8] for at in range(8 * (steps - 1), len(hashes), 8 * steps)])
        assert made.chain(golden.TOKENS, **case).hashes == expected
        assert pack_hashes(chain_hashes(scheme, golden.TOKENS, **case)) == expected


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_chain_in_steps_goes_on_from_any_block(algorithm: str) -> None:
    """A long chain is made in several calls, and the trie continues earlier ones: with the same hashes."""
    scheme = Scheme(algorithm, default_none_hash(algorithm), 24, hash_block_tokens=8)
    made, ids = Hasher(scheme), array("I", range(24 * 600 + 5))
    whole = made.digests(scheme.none_hash, 0, ids, "s", None)
    assert len(whole) == 600
    assert whole == chain_hashes(scheme, ids, None, "s")
    for block in (1, 170, 599):
        assert made.digests(whole[block - 1], block, ids[24 * block :], "s", None) == whole[block:]


def test_a_scheme_is_announced_as_before_where_hashes_are_as_long_as_blocks() -> None:
    scheme = Scheme("sha256", default_none_hash("sha256"), 16)
    assert "hash_block_tokens" not in scheme.as_dict()
    for wrong in (3, 32, -16, "x"):
        with pytest.raises(WireError):
            Scheme.from_dict(scheme.as_dict() | {"hash_block_tokens": wrong})


def test_capped_as_the_engine_caps() -> None:
    made = hasher("sha256_cbor")
    lengths = {n: len(made.chain(range(n)).hashes) // 8 for n in (0, 1, 16, 17, 32, 33)}
    assert lengths == {0: 0, 1: 0, 16: 0, 17: 1, 32: 1, 33: 2}  # the last token is always computed
    assert len(hasher("sha256_cbor", block_tokens=1).chain([7] * 20_000).hashes) == 8 * MAX_BLOCKS


@pytest.mark.parametrize("form", ["tagged", "tagged_drop", "lookahead_2"])
@pytest.mark.parametrize("hashed", [8, 16])
def test_the_block_of_the_last_token_stands_apart(form: str, hashed: int) -> None:
    """It is the one that a longer prompt's chain has behind the others, if a prompt ends with it."""
    unit = {} if hashed == 16 else {"hash_block_tokens": hashed}
    made = Hasher(Scheme("sha256_cbor", default_none_hash("sha256_cbor"), 16, form, **unit))
    ids = [7 * number for number in range(200)]
    for tokens in range(180):
        chain, longer = made.chain(ids[:tokens]), made.chain(ids[: tokens + 20]).hashes
        ends = tokens % 16 == 0 and tokens >= (32 if made.scheme.drops else 16) and not made.scheme.lookahead
        assert chain.last == (longer[len(chain.hashes) : len(chain.hashes) + 8] if ends else b""), tokens
    assert not hasher("sha256_cbor", block_tokens=1).chain([7] * 20_000).last, "no hash is made so far behind"


def test_text_chain_shares_prefixes_only() -> None:
    first, second = b"x" * 640 + b"one", b"x" * 640 + b"other"
    assert text_chain(first).hashes == text_chain(second).hashes
    assert len(text_chain(first).hashes) == 8 * 640 // TEXT_BLOCK_BYTES
    assert text_chain(b"y" + first).hashes[:8] != text_chain(first).hashes[:8]
    assert text_chain(b"").hashes == b""
    assert (text_tokens(0), text_tokens(640)) == (1, 160)
    assert text_chain(first).scheme_id == TEXT_SCHEME.scheme_id != hasher("sha256_cbor").scheme.scheme_id


def test_text_scheme_is_one_that_a_record_may_carry() -> None:
    assert Scheme.from_dict(TEXT_SCHEME.as_dict()) == TEXT_SCHEME
    assert wire.SCHEMA == 1
