"""With the prompt trie every prompt has the ids and hashes that it has without, and only new text costs time."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import tracemalloc
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import orjson
import pytest
from tests.support.requests import deepseek_tokenizer
from tests.support.requests.growing_texts import WORDS, Texts

from warmfleet.prompt.block_hashes import Hasher
from warmfleet.prompt.cut_points import Cuts
from warmfleet.prompt.prefix_trie import NODE_BYTES, Prompt, Reading, Trie
from warmfleet.prompt.prompt_identity import Identity
from warmfleet.prompt.request import Request
from warmfleet.prompt.tokenizer import Encoder
from warmfleet.protocol.wire import Scheme, default_none_hash
from warmfleet_loadtest.tokens.tiny_kinds import save_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from warmfleet.prompt.block_hashes import Chain

KINDS = ("deepseek", "qwen3", "llama3", "llama2", "metaspace")  # metaspace: llama2 as transformers makes it
TEMPLATE = "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜><|im_start|><|im_end|><|eot_id|></s>"  # noqa: RUF001
CBOR = Hasher(Scheme("sha256_cbor", default_none_hash("sha256_cbor"), 16))
PICKLE = Hasher(Scheme("sha256", default_none_hash("sha256"), 24, hash_block_tokens=8))


@pytest.fixture(scope="module", params=KINDS)
def any_encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return load(request.param, tmp_path_factory.mktemp("kind"))


def load(kind: str, folder: Path) -> Encoder:
    if kind == "deepseek":
        return deepseek_tokenizer.loaded()
    save_tokenizer(folder, "llama2" if kind == "metaspace" else kind, 3_000)
    content = (folder / "tokenizer.json").read_bytes()
    if kind == "metaspace":
        scheme = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
        content = json.dumps(json.loads(content) | {"normalizer": None, "pre_tokenizer": scheme}).encode()
    return Encoder.load(content)


@cache
def cuts_of(encoder: Encoder) -> Cuts:
    return encoder.cuts(TEMPLATE)


def reading(encoder: Encoder, *, special: bool = False, grid: int = 1_024, salt: str | None = None) -> Reading:
    prefix, suffix = (encoder.affixes if special else None) or (array("I"), array("I"))
    found = cuts_of(encoder)
    cuts = Cuts(found.separators, spaces=found.spaces, grid=grid)
    return Reading(grid, encoder.plain, cuts, prefix, suffix, (CBOR, PICKLE), salt)


def without(encoder: Encoder, text: str, *, special: bool, salt: str | None) -> tuple[list[int], tuple[Chain, ...]]:
    ids = encoder.encode(text, special)
    return ids.tolist(), tuple(hasher.chain(ids, salt) for hasher in (CBOR, PICKLE))


def same(found: Prompt, expected: tuple[list[int], tuple[Chain, ...]]) -> bool:
    assert b"".join(found.json()) == orjson.dumps(expected[0])
    return (found.ids, found.chains) == expected and found.tokens == len(expected[0])


def compare(encoder: Encoder, prompts: int, seed: int, *, grid: int, limit_bytes: int) -> None:
    """Compare prompts read with and without a trie that is so small that it evicts all the time."""
    trie, texts, rng = Trie(limit_bytes), Texts(seed, cuts_of(encoder).separators), random.Random(seed)
    for _ in range(prompts):
        text, special, salt = texts.next(), rng.random() < 0.3, rng.choice((None, None, "tenant"))
        found = trie.read(text, reading(encoder, special=special, grid=grid, salt=salt))
        assert same(found, without(encoder, text, special=special, salt=salt)), (seed, text)
        assert trie.bytes <= limit_bytes
    assert len(trie) > 1


@pytest.mark.parametrize("grid", [48, 1_024])
def test_the_trie_changes_no_prompt(any_encoder: Encoder, grid: int) -> None:
    compare(any_encoder, 160, seed=grid, grid=grid, limit_bytes=400_000)


@pytest.mark.long(
    minutes=2,
    shows=(
        "52,000 prompts of conversations that grow, are edited and truncated, with five kinds of "
        "tokenizer: token ids and hashes are the same with the prefix trie as without it"
    ),
)
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(4))
def test_the_trie_changes_no_prompt_in_long_runs(any_encoder: Encoder, seed: int) -> None:
    compare(any_encoder, 2_600, seed=seed, grid=(64, 1_024)[seed % 2], limit_bytes=(200_000, 4_000_000)[seed // 2])


def test_the_rules_that_each_kind_of_tokenizer_passes(any_encoder: Encoder, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["any_encoder"]
    cuts = cuts_of(any_encoder)
    assert cuts.spaces is (kind != "llama2")  # whose normalizer puts a "▁" before every piece
    assert cuts.separators


def known(trie: Trie, text: str, reading: Reading) -> int:
    """The characters of the text that the trie has."""
    return trie.find(text, reading)[-1].end


def codes(text: str) -> array[int]:
    return array("I", map(ord, text))


class PlainTrie:
    """A trie of single pieces without a limit: it finds beginnings by the rule alone."""

    def __init__(self) -> None:
        self.paths: set[tuple[object, ...]] = set()

    def known(self, text: str, reading: Reading) -> int:
        """The characters that an earlier text began with, in whole pieces; the text is remembered."""
        at, found = 0, 0
        path: tuple[object, ...] = (reading.key,)
        while (cut := reading.cuts.next(text, at)) is not None:
            path = (*path, text[at : cut[1]])
            found = cut[0] if path in self.paths else found
            self.paths.add(path)
            at = cut[0]
        return found


def check(trie: Trie) -> None:
    """Every node is in its place, leaves after those below it, and is counted with what it takes."""
    order = {node: number for number, node in enumerate(trie._used)}
    seen, waiting = 0, [*trie._top.children.values()]
    while waiting:
        node = waiting.pop()
        seen += 1
        assert node.origin is None, "a whole run is held by its beginning"
        assert node.tokens == len(node.ids) + (node.parent.tokens if node.parent else 0)
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key == key
            assert order[child] < order[node], "a node leaves before one below it"
            waiting.append(child)
        assert node.latest is None or node.latest in node.children.values()
    assert seen == len(order)
    assert trie.bytes == sum(trie._used.values()) == sum(node.cost for node in trie._used) <= trie.limit_bytes


@pytest.mark.parametrize("limit_bytes", [10**9, 60_000])
@pytest.mark.parametrize("seed", range(3))
def test_runs_find_what_single_pieces_would(seed: int, limit_bytes: int) -> None:
    """Runs are split, continued and evicted at random; ids, hashes and the known beginning stay those of the pieces."""
    rng, trie, plain = random.Random(seed), Trie(limit_bytes), PlainTrie()
    cuts = Cuts(("<|s|>", "<e>"), spaces=True, grid=6)
    none_hash = default_none_hash("sha256_cbor")
    forms = ("tagged", "lookahead_1_drop", "lookahead_11")  # the last looks further than its block is long
    hashers = (*[Hasher(Scheme("sha256_cbor", none_hash, 4, form)) for form in forms], PICKLE)
    texts, splits = [""], 0
    for _ in range(500):
        base = rng.choice(texts)
        added = "".join(rng.choices(("a", "b", "a ", "b ", "\u00e9", "<|s|>", "<e>", "<|s"), k=rng.randrange(40)))
        text = base[: rng.randrange(len(base) + 1)] + added if rng.random() < 0.7 else base + added
        salt = rng.choice((None, None, None, "tenant"))
        read = Reading("codes", codes, cuts, array("I", [7] * 5), array("I", [9]), hashers, salt)
        splits += trie.find(text, read)[-1].origin is not None
        found, ids = trie.read(text, read), [7] * 5 + list(codes(text)) + [9]
        assert found.ids == ids
        assert b"".join(found.json()) == orjson.dumps(ids)
        assert found.chains == tuple(hasher.chain(ids, salt) for hasher in hashers)
        expected = plain.known(text, read) + 5
        if text not in texts:  # else the ending may be known as well
            assert found.known_tokens == expected if limit_bytes == 10**9 else found.known_tokens <= expected
        check(trie)
        texts.append(text)
    assert splits > 20
    assert len(trie) < sum(len(node.pieces) for node in trie._used)


def test_a_prompt_that_comes_again_is_not_read_again(encoder: Encoder) -> None:
    calls: list[int] = []
    trie, watched = Trie(10**8), counted(encoder, calls)
    texts = ["the cat sat on a mat " * 400 + end for end in ("and slept", "and slept!", "")]
    for text in texts:
        for again in (False, True):
            calls.clear()
            found = trie.read(text, watched)
            assert same(found, without(encoder, text, special=False, salt=None))
            assert bool(calls) is not again
            assert found.known_tokens == found.tokens or not again
        check(trie)
    other_end = replace(watched, suffix=array("I", [7]))
    calls.clear()
    assert trie.read(texts[-1], other_end).ids == [*trie.read(texts[-1], watched).ids, 7]
    assert calls, "an ending with other special tokens is another one"
    calls.clear()
    trie.read("short", watched)
    trie.read("short", watched)
    assert len(calls) == 2, "short prompts have no node that could keep them"
    uncut = "1" * 200_000
    trie.read("the cat sat on a mat " * 400 + uncut, watched)
    assert trie.bytes < 300_000, "a long ending is not kept"
    check(trie)


def counted(encoder: Encoder, calls: list[int]) -> Reading:
    def encode(text: str) -> array[int]:
        calls.append(len(text))
        return encoder.plain(text)

    return replace(reading(encoder), encode=encode)


def test_a_turn_costs_its_new_text(encoder: Encoder) -> None:
    calls: list[int] = []
    texts, trie, watched, text = Texts(1, ()), Trie(10**8), counted(encoder, calls), ""
    for turn in range(30):
        new = "the cat sat on the mat. " * 80
        text += f"{turn}: {new}"
        calls.clear()
        trie.read(text, watched)
        assert sum(calls) <= len(new) + 2 * 1_024
    edited = text[:20_000] + texts.some(8) + text[20_000:]
    calls.clear()
    trie.read(edited, watched)
    assert len(edited) - 20_000 <= sum(calls) <= len(edited) - 20_000 + 2 * 1_024
    calls.clear()
    trie.read(text, watched)
    assert sum(calls) <= 2 * 1_024


def test_tenants_schemes_and_specials_do_not_share_hashes(encoder: Encoder) -> None:
    trie, text = Trie(10**8), "the cat sat on a mat " * 400
    plain = reading(encoder)
    variants = [plain, replace(plain, salt="a"), replace(plain, salt="b"), replace(plain, lora=("x", "/x"))]
    chains = [trie.read(text, variant).chains[0].hashes for variant in variants for _ in range(2)]
    assert chains[::2] == chains[1::2]
    assert len(set(chains)) == len(variants)
    first_ids = replace(plain, prefix=array("I", [7]))
    assert trie.read(text, first_ids).ids == [7, *trie.read(text, plain).ids]
    assert trie.read(text, replace(plain, hashers=(PICKLE,))).chains[0] == trie.read(text, plain).chains[1]


def test_the_least_recently_used_leave_first_and_leaves_before_their_parents(encoder: Encoder) -> None:
    trie, read, texts = Trie(120_000), reading(encoder, grid=256), Texts(5, ())
    kept = "".join(f"line {number} of the kept text " for number in range(200))
    for number in range(300):
        trie.read(f"{number} " + "and so on it goes for a while " * 40, read)
        trie.read(kept, read)
        assert trie.bytes <= trie.limit_bytes
        assert known(trie, kept, read) > 0.7 * len(kept)
    huge = " ".join(texts.some(2_000) for _ in range(100))
    trie.read(huge, read)
    assert known(trie, kept, read) > 0.7 * len(kept)  # a single prompt must not evict all others
    assert 1_000 < known(trie, huge, read) < len(huge) / 2  # of itself, its beginning is kept
    for node in trie.find(kept, read):
        assert node.parent is not None


MANY = tuple(Hasher(Scheme("sha256", default_none_hash("sha256"), tokens)) for tokens in (16, 1_024, 2_048, 4_096))


@pytest.mark.parametrize("hashers", [(CBOR, PICKLE), MANY[-1:], MANY], ids=["usual", "large blocks", "four schemes"])
def test_the_bound_is_about_what_memory_it_takes(encoder: Encoder, hashers: tuple[Hasher, ...]) -> None:
    trie, read, rng = Trie(10**9), replace(reading(encoder), hashers=hashers), random.Random(2)
    prompts = [" ".join(rng.choices(WORDS, k=4_000)) for _ in range(40)]
    tracemalloc.start()
    for prompt in prompts:
        trie.read(prompt, read).json()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < trie.bytes / grown < 1.3
    assert NODE_BYTES * len(trie) < trie.bytes


def test_a_long_salt_counts(encoder: Encoder) -> None:
    trie, read = Trie(4_000_000), reading(encoder)
    for number in range(20):
        trie.read("hi", replace(read, salt=f"{number}" + "s" * 500_000))
    assert 500_000 < trie.bytes <= trie.limit_bytes
    assert len(trie) <= 8
    trie.read("hi", replace(read, salt="s" * 5_000_000))
    assert len(trie) <= 8  # not kept at all


def test_the_first_prompt_of_a_tenant_is_kept(encoder: Encoder) -> None:
    trie, text, read = Trie(10**8), "the cat sat on a mat " * 400, replace(reading(encoder), salt="new")
    assert trie.read(text, read).known_tokens == 0
    assert trie.read(text, read).known_tokens > 1_000


def test_many_threads_share_it(encoder: Encoder) -> None:
    trie, failures = Trie(150_000), []

    def run(seed: int) -> None:
        texts = Texts(seed % 2, cuts_of(encoder).separators)  # two threads see the same prompts
        for _ in range(60):
            text = texts.next()
            if not same(trie.read(text, reading(encoder, grid=64)), without(encoder, text, special=False, salt=None)):
                failures.append(text)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert trie.bytes == sum(trie._used.values()) <= trie.limit_bytes


async def test_a_prompt_of_3_mb_does_not_stall_the_event_loop(encoder: Encoder) -> None:
    with ThreadPoolExecutor(1) as executor:
        text = "the quick brown fox jumps over it, again and again; " * 60_000
        request = Request("completions", "m", False, 1, 1, None, True, "", prompts=[text])
        shares = []
        for _ in range(3):
            identity = Identity(encoder, None, {}, executor, Trie(10**8), encoder.cuts(""))  # the trie is empty
            running = asyncio.ensure_future(identity.prompts(request, (CBOR,), None, 2_000))
            longest, before = 0.0, (began := time.perf_counter())
            while not running.done():
                await asyncio.sleep(0.001)
                longest, before = max(longest, time.perf_counter() - before), time.perf_counter()
            assert (await running)[0].tokens > 500_000
            shares.append(longest / (before - began))
        assert min(shares) < 0.5, "of the time that it takes"
