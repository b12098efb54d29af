"""A prompt's key is its block at a depth where few prompts are alike; all turns of a conversation share a key."""

from __future__ import annotations

import random
from collections import Counter

from warmfleet.pools.home_pools import WINDOW, Beginnings
from warmfleet.prompt.block_hashes import Chain

DEPTH, BLOCK, POOLS = 1_024, 16, 8
RANDOM = random.Random(16)


def blocks(count: int) -> bytes:
    return RANDOM.randbytes(8 * count)


def chain(hashes: bytes) -> tuple[Chain]:
    return (Chain(1, BLOCK, hashes),)


def test_turns_of_a_conversation_have_one_key_from_the_depth_on() -> None:
    beginnings, text = Beginnings(), blocks(1_000)
    keys = {beginnings.key(chain(text[: 8 * length]), DEPTH, POOLS) for length in (64, 65, 100, 500, 1_000)}
    assert keys == {text[8 * 63 : 8 * 64]}


def test_a_system_prompt_that_most_have_is_no_key() -> None:
    beginnings, system = Beginnings(), blocks(300)  # 4,800 tokens
    sessions = [blocks(600) for _ in range(100)]
    told = [beginnings.key(chain(system + session), DEPTH, POOLS) for _ in range(5) for session in sessions]
    late = Counter(told[200:])
    assert len(late) == len(sessions)  # each session has its own key, and keeps it
    assert max(late.values()) == 3
    depth = 64
    while depth <= 300:
        depth += depth // 4
    assert set(late) == {(system + session)[8 * (depth - 1) : 8 * depth] for session in sessions}
    assert depth < 1.25 * 300


def test_prompts_that_are_only_asked_about_are_no_conversations() -> None:
    beginnings, asked, system = Beginnings(), Beginnings(), blocks(300)
    prompts = [chain(system + blocks(100)) for _ in range(100)]
    for prompt in prompts:
        assert asked.key(prompt, DEPTH, POOLS, counted=False) == system[8 * 63 : 8 * 64]
    assert len(asked) == 0
    for prompt in prompts:
        assert beginnings.key(prompt, DEPTH, POOLS) == asked.key(prompt, DEPTH, POOLS)
    hot = beginnings.key(prompts[0], DEPTH, POOLS)
    assert asked.key(prompts[0], DEPTH, POOLS, counted=False) == hot != system[8 * 63 : 8 * 64]


def test_prompts_that_are_alike_to_their_ends_keep_one_key() -> None:
    beginnings, text = Beginnings(), blocks(70)
    assert {beginnings.key(chain(text), DEPTH, POOLS) for _ in range(100)} == {text[8 * 63 : 8 * 64]}


def test_prompts_that_end_within_what_many_share_have_their_last_block() -> None:
    beginnings, system = Beginnings(), blocks(70)
    for _ in range(20):
        beginnings.key(chain(system + blocks(100)), DEPTH, POOLS)
    assert beginnings.key(chain(system), DEPTH, POOLS) == system[-8:]


def test_a_conversation_of_many_turns_keeps_its_key() -> None:
    """The turns of one conversation are many prompts with one beginning, and do not make this beginning common."""
    beginnings, system = Beginnings(), blocks(68)
    sessions = [system + blocks(1_000) for _ in range(12)]
    told: dict[int, list[bytes]] = {number: [] for number in range(len(sessions))}
    for turn in range(100):
        for number, session in enumerate(sessions):
            told[number].append(beginnings.key(chain(session[: 8 * (90 + 9 * turn)]), DEPTH, POOLS))
    assert [len(set(keys[2:])) for keys in told.values()] == [1] * len(sessions)
    assert len({keys[-1] for keys in told.values()}) == len(sessions)


def test_a_document_that_some_have_stays_a_key() -> None:
    """A document in a twentieth of the prompts is not too common for a key: the limit is half of an eighth."""
    beginnings, document = Beginnings(), blocks(200)
    for number in range(2_000):
        text = document + blocks(10) if number % 20 == 0 else blocks(100)
        key = beginnings.key(chain(text), DEPTH, POOLS)
        if number % 20 == 0 and number > 200:
            assert key == document[8 * 63 : 8 * 64]


def test_a_beginning_that_was_hot_is_a_key_again_when_few_have_it() -> None:
    beginnings, system = Beginnings(), blocks(100)
    at_depth = system[8 * 63 : 8 * 64]
    for _ in range(200):
        beginnings.key(chain(system + blocks(100)), DEPTH, POOLS)
    assert beginnings.key(chain(system + blocks(100)), DEPTH, POOLS) != at_depth
    for _ in range(6 * WINDOW):
        beginnings.key(chain(blocks(100)), DEPTH, POOLS)
    assert beginnings.key(chain(system + blocks(100)), DEPTH, POOLS) == at_depth


def test_counts_are_bounded() -> None:
    beginnings, system = Beginnings(), blocks(64)
    for number in range(20 * WINDOW):
        beginnings.key(chain((system if number % 2 else blocks(64)) + blocks(100)), DEPTH, POOLS)
    assert len(beginnings) < 6 * WINDOW


def test_a_prompt_without_block_hashes_has_no_key() -> None:
    assert Beginnings().key((), DEPTH, POOLS) == b""
    assert Beginnings().key(chain(b""), DEPTH, POOLS) == b""


def test_replicas_agree_without_a_word() -> None:
    """Replicas compute equal keys although each replica sees a different half of the prompts."""
    replicas, system = [Beginnings() for _ in range(2)], blocks(300)
    sessions = [blocks(600) for _ in range(200)]
    for number in range(4_000):
        replicas[number % 2].key(chain(system + RANDOM.choice(sessions)), DEPTH, POOLS)
    for session in sessions:
        assert len({replica.key(chain(system + session), DEPTH, POOLS) for replica in replicas}) == 1
