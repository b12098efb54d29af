"""The ends of prefixes that all KV cache groups support, against a definition that looks at all blocks."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import pytest

from warmfleet_worker.ends import WHOLE_PREFIX, Ends, GroupedTransitions, Rule, Rules
from warmfleet_worker.vllm_hooks.block_table import hash_of_key

HASH_TOKENS = 16
MAIN = Rule((0,), 32)
SHAPES = {
    "one window": Rules(Rule((0,), 16), (Rule((1,), 16, 4),), 16),
    "windows of two sizes, several groups": Rules(Rule((2,), 16), (Rule((0, 1), 16, 3), Rule((3, 4), 16, 9)), 16),
    "blocks of several sizes": Rules(MAIN, (Rule((1,), 16, 5), Rule((2,), 64, 2)), 64),
    "states": Rules(Rule((1,), 16), (Rule((0, 2, 3), 16),), 16),
    "states and a window": Rules(Rule((0,), 32), (Rule((1,), 64), Rule((2,), 32, 3)), 64),
    "full attention twice": Rules(Rule((0,), 16), (Rule((1,), 16, WHOLE_PREFIX), Rule((2,), 16, 2)), 16),
    "chunks": Rules(Rule((0,), 16), (Rule((1,), 16, 4, chunk_tokens=64),), 16),
}


@dataclass
class Table:
    """A table of blocks of all groups, and what it reports. The hash of a prefix names all blocks before it, too."""

    rules: Rules
    rng: random.Random
    held: dict[bytes, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # key -> group, prefix (its hashes)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    hashes: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transitions = GroupedTransitions(hash_of_key(self.rules.main.groups[0]), self.rules)
        self.transitions.table = self.transitions.whole = self.held
        self.block_tokens = {
            number: rule.block_tokens for rule in (self.rules.main, *self.rules.others) for number in rule.groups
        }

    def hashed(self, prefix: tuple[int, ...]) -> bytes:
        known = self.hashes.get(prefix)
        return known or self.hashes.setdefault(prefix, hashlib.sha256(repr(prefix).encode()).digest())

    def key(self, group: int, prefix: tuple[int, ...]) -> bytes:
        return self.hashed(prefix) + group.to_bytes(4, "big")

    def store(self, group: int, prompt: tuple[int, ...], first: int, last: int, share: float) -> None:
        """Store blocks ``first`` to ``last`` of a prompt; each with this probability."""
        steps = self.block_tokens[group] // HASH_TOKENS
        prefixes = [prompt[: (at + 1) * steps] for at in range(max(0, first - 1), last)]
        if group in self.rules.chained():
            self.transitions.note_chain(group, max(0, first - 1), [self.hashed(prefix) for prefix in prefixes])
        for prefix in prefixes[1:] if first else prefixes:
            key = self.key(group, prefix)
            if key not in self.held and self.rng.random() < share:
                self.held[key] = group, prefix
                self.transitions.note(key)

    def drop(self, key: bytes) -> tuple[int, tuple[int, ...]]:
        self.transitions.note((key,))
        return self.held.pop(key)

    def act(self) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.55 or not self.held:
            head = rng.choice(self.prompts[-8:]) if self.prompts and rng.random() < 0.8 else ()
            head = head[: rng.randrange(len(head) + 1)] if rng.random() < 0.5 else head
            prompt = head + tuple(rng.randrange(10**9) for _ in range(rng.randrange(1, 24)))
            self.prompts.append(prompt)
            for group, tokens in self.block_tokens.items():
                blocks = len(prompt) * HASH_TOKENS // tokens
                first = rng.randrange(blocks + 1) if rng.random() < 0.3 else 0
                self.store(group, prompt, first, blocks, 1 if group in self.rules.main.groups else 0.85)
                if group not in self.rules.main.groups and group not in self.rules.chained():
                    part = prompt[: rng.randrange(1, len(prompt) + 1)]  # a state may end within a block
                    if self.key(group, part) not in self.held:
                        self.held[self.key(group, part)] = group, part
                        self.transitions.note(self.key(group, part))
        elif kind < 0.9:
            keys = list(self.held)
            at = rng.randrange(len(keys))
            for key in keys[at : at + rng.randrange(1, 12)]:
                self.drop(key)
        elif kind < 0.97:  # a block's entries go to another block (vLLM's move_block_hashes)
            key = rng.choice(list(self.held))
            if self.held[key][0] not in self.rules.main.groups:
                held = self.drop(key)
                self.held[key] = held
                self.transitions.note(key)
        elif kind < 0.98:
            self.held.clear()
            self.transitions.note(None)

    def supported(self, rule: Rule, group: int, prefix: tuple[int, ...]) -> bool:
        tokens = len(prefix) * HASH_TOKENS
        if tokens % rule.block_tokens:
            return False
        blocks, steps = tokens // rule.block_tokens, rule.block_tokens // HASH_TOKENS
        if rule.chunk_tokens:
            needed = range(tokens // rule.chunk_tokens * rule.chunk_tokens // rule.block_tokens, blocks)
        else:
            needed = range(max(0, blocks - rule.blocks), blocks)
        return all(self.key(group, prefix[: (at + 1) * steps]) in self.held for at in needed)

    def ends(self) -> set[bytes]:
        """The definition: the aligned blocks of the main group at which each group of each rule has what it needs."""
        found = set()
        for group, prefix in self.held.values():
            if group in self.rules.main.groups and len(prefix) * HASH_TOKENS % self.rules.align_tokens == 0:
                rules = [self.rules.main, *self.rules.others]
                if all(self.supported(rule, number, prefix) for rule in rules for number in rule.groups):
                    found.add(self.hashed(prefix)[-8:])
        return found


def followed(ends: Ends, known: set[bytes]) -> set[bytes]:
    """What a router knows after the changes that wait. Each of them must be one."""
    for run in ends.drain(10**6):
        hashes = {run.packed[at : at + 8] for at in range(0, len(run.packed), 8)}
        if run.operation == "cleared":
            known = set()
        elif run.operation == "stored":
            assert known.isdisjoint(hashes)
            known = known | hashes
        else:
            assert known >= hashes
            known = known - hashes
    return known


@pytest.mark.parametrize("shape", SHAPES)
def test_ends_are_as_defined_after_random_changes(shape: str) -> None:
    found = 0
    for seed in range(4):
        rng = random.Random(f"{shape} {seed}")
        table, known = Table(SHAPES[shape], rng), set[bytes]()
        for _ in range(60):
            for _ in range(rng.randrange(1, 6)):
                table.act()
            list(table.transitions.drain(10**6))
            known = followed(table.transitions.ends, known)
            assert known == table.ends() == set(table.transitions.ends.table)
            found += len(known)
    assert found > 500


@pytest.mark.parametrize("shape", SHAPES)
def test_predecessors_are_kept_of_held_blocks_only(shape: str) -> None:
    table = Table(SHAPES[shape], random.Random(shape))
    for _ in range(200):
        table.act()
    list(table.transitions.drain(10**6))
    for key in list(table.held):
        table.drop(key)
    list(table.transitions.drain(10**6))
    ends = table.transitions.ends
    assert not ends.table
    assert not ends._places
    for held in ends._held:
        assert not any([held.run, held._by_group, held._parents, held._children, held.touched])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cut_has_all_ends_and_lost_records_only_cost_some(shape: str) -> None:
    rng = random.Random(shape)
    table = Table(SHAPES[shape], rng)
    for _ in range(60):
        table.act()
    assert set(table.transitions.cut()) == set(table.held)
    list(table.transitions.drain(10**6))
    for _ in range(60):  # drained before the cut, so that nothing is lost
        table.act()
        list(table.transitions.drain(10**6))
    table.transitions.cut()
    assert len(table.transitions.ends) == 0
    known = set(table.transitions.ends.cut())
    assert known <= table.ends()
    table.held.clear()
    table.transitions.note(None)
    list(table.transitions.drain(10**6))
    for _ in range(80):
        table.act()
        list(table.transitions.drain(10**6))
        known = followed(table.transitions.ends, set(table.transitions.ends.cut()))
        table.transitions.cut()
        assert set(table.transitions.ends.cut()) == known == table.ends()


def test_parts_of_the_main_groups_blocks_are_no_ends() -> None:
    """The engine's table also has such entries; what is reported of it has none."""
    transitions = GroupedTransitions(hash_of_key(0), Rules(Rule((0,), 32), (Rule((1,), 16),), 32))
    whole, part = (letter * 32 for letter in (b"w", b"p"))
    reported = {whole + b"\0\0\0\0": None}
    transitions.table = reported
    transitions.whole = {**reported, part + b"\0\0\0\0": None, **{one + b"\0\0\0\1": None for one in (whole, part)}}
    transitions.cut()
    assert transitions.ends.cut() == [whole[-8:]]
