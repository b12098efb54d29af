"""The bridge's table against the truth of engines: never a block too many, and equal wherever events allow it."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker_plugin.bridged import CANONICAL, PAGE, ScriptedEngine

from warmfleet_worker.bridge.block_table import BlockTable, scheme_of
from warmfleet_worker.bridge.group_ends import Group
from warmfleet_worker.bridge.kv_events import EventError, decode
from warmfleet_worker.bridge.sequence import Sequence
from warmfleet_worker.bridge.tier_copies import TierCopies
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker

LORA = ("tuned", "/adapters/tuned")


class Follower:
    """A table that follows one engine as a ``Rank`` does."""

    def __init__(self, engine: ScriptedEngine, capacity: int = 24) -> None:
        self.engine = engine
        self.tracker = Tracker()
        self.table = BlockTable(self.tracker, PAGE, capacity, lookahead=engine.told.lookahead)
        self.sequence = Sequence(self, engine.replay)
        self.exact = True

    def batch(self, payload: bytes) -> None:
        self.table.apply(decode(payload))

    def lost(self) -> None:
        self.exact = False
        self.table.doubt()

    def restarted(self) -> None:
        self.exact = True
        self.table.clear()

    def check(self) -> None:
        """The table holds nothing that the engine did not hold after the last batch, and all of it if none was lost."""
        truth = self.engine.truths[self.sequence.last] if self.sequence.last >= 0 else set()
        assert self.table.held <= truth
        assert set(self.tracker.table) == self.table.held
        if self.exact:
            assert self.table.held == truth


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_every_batch_gives_the_engines_own_table(lookahead: int) -> None:
    engine = ScriptedEngine(1, lookahead=lookahead)
    follower = Follower(engine)
    for _ in range(60):
        for _ in engine.serve():
            follower.sequence.live(*engine.newest)
            follower.check()
    assert engine.scheduler.pool.evicted > 100
    assert not follower.table.unproved


def test_copies_of_one_block_are_counted() -> None:
    """A prompt that ends at a block boundary computes its last block again: two copies, two removals."""
    table = BlockTable(Tracker(), PAGE, 100)
    first, second = range(16), range(16, 32)
    table.apply(decode(stored([1, 2], None, [*first, *second])))
    table.apply(decode(stored([2], 1, [*second])))
    table.apply(decode(removed(2)))
    assert len(table) == 2
    table.apply(decode(removed(2)))
    assert table.held == hashes([*first])


def test_a_report_of_hits_is_no_further_copy() -> None:
    table = BlockTable(Tracker(), PAGE, 100)
    for _ in range(3):
        table.apply(decode(stored([1, 2], None, list(range(32)))))
    table.apply(decode(removed(2)))
    assert table.held == hashes(list(range(16)))
    table.apply(decode(removed(1)))
    assert not table.held


def test_after_a_loss_blocks_are_proved_by_what_is_stored_on_top_of_them() -> None:
    table = BlockTable(Tracker(), PAGE, 100)
    table.apply(decode(stored([1, 2, 3], None, list(range(48)))))
    table.doubt()
    assert not table.held
    table.apply(decode(stored([4], 2, list(range(100, 116)))))
    assert table.held == hashes(list(range(32))) | hashes([*range(32), *range(100, 116)])


def test_a_block_behind_an_unknown_one_is_left_out() -> None:
    table = BlockTable(Tracker(), PAGE, 100)
    table.apply(decode(stored([2, 3], 1, list(range(32)))))
    assert not table.held
    assert table.unproved == {"parent": 2}


def test_salts_adapters_and_media() -> None:
    table = BlockTable(Tracker(), PAGE, 100, lora_path=dict([LORA]).get)
    ids = list(range(32))
    table.apply(decode(stored([1, 2], None, ids, extra_keys=[["tenant"], None])))
    assert table.held == hashes(ids, salt="tenant")
    table.clear()
    table.apply(decode(stored([3, 4], None, ids, lora_name="tuned", extra_keys=[["tuned", "tenant"], ["tuned"]])))
    assert table.held == hashes(ids, salt="tenant", lora=LORA)
    table.clear()
    table.apply(decode(stored([5, 6], None, ids, lora_name="unknown", extra_keys=[["unknown"], ["unknown"]])))
    table.apply(decode(stored([7, 8], None, ids, lora_id=3)))
    table.apply(decode(stored([9, 10], None, ids, extra_keys=[None, [["an image", 4]]])))
    table.apply(decode(stored([11], None, ids[:16], extra_keys=[[b"\x01" * 32]])))
    assert table.held == hashes(ids[:16])  # the block before the image
    assert table.unproved == {"adapter": 4, "extra_keys": 2}


def test_only_the_followed_group_and_the_engines_own_cache_count() -> None:
    table = BlockTable(Tracker(), PAGE, 100)
    table.apply(decode(stored([1], None, list(range(16)), group_idx=1)))
    table.apply(decode(stored([2], None, list(range(16)), medium="CPU")))
    table.apply(decode(stored([3], None, list(range(8)), block_size=8)))
    assert not table.held
    assert table.groups_told == {1: Group("", 0, PAGE)}
    table.apply(decode(stored([2], None, list(range(16)))))
    table.apply(decode(removed(2, medium="CPU")))
    table.apply(decode(removed(2, group_idx=1)))
    assert table.held == hashes(list(range(16)))


def test_a_tier_has_the_blocks_of_which_its_events_tell_more_copies_than_removals() -> None:
    """Its events name blocks by the engine's hashes only, and lack the salt."""
    chance, tier, ids = random.Random(3), Tracker(), list(range(20 * PAGE))
    table = BlockTable(Tracker(), PAGE, 100, tiers={"cpu": tier})
    table.apply(decode(stored(list(range(20)), None, ids, extra_keys=[["tenant"], *[None] * 19])))
    of_key = [digest[-8:] for digest in wire.chain_hashes(table.scheme, ids, salt="tenant")]
    copies = Counter[int]()
    for step in range(400):
        if step == 200:
            table.apply([event for key in range(20) for event in decode(removed(key))])
            assert not table.held  # and late events of copies are understood
        key = chance.randrange(20)
        if chance.random() < 0.5:
            table.apply(decode(stored([key], None, [], block_size=0, medium=chance.choice(("CPU", "cpu")))))
            copies[key] += 1
        elif copies[key]:
            table.apply(decode(removed(key, medium="CPU")))
            copies[key] -= 1
        copies = +copies
        assert set(tier.table) == {of_key[key] for key in copies}
    table.apply(decode(stored([99], None, [], block_size=0, medium="CPU")))
    assert (table.unproved, table.tiers_told) == ({"tier": 1}, {"cpu": False})


@pytest.mark.parametrize(
    ("medium", "locality", "loads_last"),
    [
        ("CPU", None, True),
        ("STORAGE", None, True),
        ("cpu", None, False),
        ("CPU", "LOCAL", False),
        ("DISK", None, False),
    ],
)
def test_only_the_offloading_connector_loads_the_last_block_of_a_prompt(
    medium: str, locality: str | None, *, loads_last: bool
) -> None:
    more = {} if locality is None else {"locality": locality}
    table = BlockTable(Tracker(), PAGE, 100)
    table.apply(decode(stored([1], None, [], block_size=0, medium=medium, **more)))
    assert list(table.tiers_told.values()) == [loads_last]


@pytest.mark.parametrize("end", ["clear", "doubt"])
def test_nothing_is_known_of_a_tier_after_a_reset_or_lost_events(end: str) -> None:
    tier, ids = Tracker(), list(range(2 * PAGE))
    table = BlockTable(Tracker(), PAGE, 100, tiers={"disk": tier})
    table.apply(decode(stored([1, 2], None, ids)))
    table.apply(decode(stored([1, 2], None, ids, medium="STORAGE")))
    table.apply(decode(stored([1, 2], None, ids, medium="STORAGE", locality="REMOTE")))
    assert set(tier.table) == hashes(ids)
    getattr(table, end)()
    assert not tier.table


def test_no_more_blocks_of_a_tier_are_kept_than_it_may_have() -> None:
    tier = TierCopies(Tracker(), 2)
    assert [tier.stored(key, lambda key: str(key).encode().ljust(8)) for key in (1, 2, 3, 1)] == [
        True,
        True,
        False,
        True,
    ]
    assert len(tier) == 2


def test_blocks_whose_hash_looks_further_ahead_than_told_are_left_out() -> None:
    table = BlockTable(Tracker(), PAGE, 100)
    for behind in ([[16], [32]], [[16, 17], [32, 33]]):
        table.apply(decode(stored([1, 2], None, list(range(32)), lookahead_token_ids=behind)))
        assert not table.held
        assert table.lookahead == len(behind[0]), "so the engine joins anew, with this number"
    assert table.unproved == {"lookahead": 4}
    malformed: list[Any] = [[[16]], [[16], 7], 5]
    for told in malformed:
        with pytest.raises(EventError):
            decode(stored([1, 2], None, list(range(32)), lookahead_token_ids=told))
    table.apply(decode(stored([1, 2], None, list(range(32)), lookahead_token_ids=[[16], [32, 33]])))
    table = BlockTable(Tracker(), PAGE, 100, lookahead=1)
    table.apply(decode(stored([1], None, list(range(16)))))
    table.apply(decode(stored([1, 2], None, list(range(32)), lookahead_token_ids=[["x"], [32]])))
    assert (table.held, table.unproved) == (set(), {"lookahead": 1, "extra_keys": 2})


def test_blocks_of_the_same_tokens_before_other_ones_are_no_copies() -> None:
    table = BlockTable(Tracker(), PAGE, 100, lookahead=1)
    for key, token in ((1, 16), (2, 17)):
        table.apply(decode(stored([key], None, list(range(16)), lookahead_token_ids=[[token]])))
    chains = [wire.chain_hashes(table.scheme, [*range(16), token]) for token in (16, 17)]
    assert table.held == {chain[0][-8:] for chain in chains}
    table.apply(decode(removed(1)))
    assert table.held == {chains[1][0][-8:]}


def test_whole_digests_serve_as_well_as_numbers() -> None:
    table = BlockTable(Tracker(), PAGE, 100)
    table.apply(decode(stored([b"a" * 32, b"b" * 32], None, list(range(32)))))
    table.apply(decode(removed(b"b" * 32)))
    assert table.held == hashes(list(range(16)))


def test_arrays_of_earlier_engines() -> None:
    ids = list(range(32))
    old = [1.0, [["BlockStored", [1, 2], None, ids, 16, None], ["BlockRemoved", [2]]]]
    table = BlockTable(Tracker(), PAGE, 100)
    table.apply(decode(msgpack.packb(old)))
    assert table.held == hashes(ids[:16])
    table.apply(decode(msgpack.packb([1.0, [["AllBlocksCleared"]], 0])))
    assert not table.held


@pytest.mark.parametrize("page", [16, 64])
def test_batches_of_sglang(page: int) -> None:
    """Batches as SGLang 0.5.23 records and encodes them: a node, a child, a salted node, removals, a reset."""
    recorded = json.loads((Path(__file__).parent / "sglang_batches.json").read_text())[str(page)]
    batches = [decode(bytes.fromhex(batch), sglang=True) for batch in recorded]
    head, more = list(range(100, 100 + 4 * 64)), list(range(1_000, 1_128))
    table = BlockTable(Tracker(), page, 1_000)
    chain = partial(hashes, scheme=scheme_of(page))
    told = [chain(head), chain(head + more), chain(head + more) | chain(head[:128], salt="tenant")]
    for events, held in zip(batches, [*told, chain(head) | chain(head[:128], salt="tenant"), set()], strict=True):
        table.apply(events)
        assert table.held == held
    assert not table.unproved


@pytest.mark.parametrize("page", [1, 3, 8])
def test_small_pages_make_larger_blocks(page: int) -> None:
    """SGLang's pages may be one token: a block is held while its last page is."""
    scheme = scheme_of(page)
    assert scheme.block_tokens == {1: 16, 3: 18, 8: 16}[page]
    table = BlockTable(Tracker(), page, 1_000)
    ids = list(range(5, 5 + 3 * scheme.block_tokens + page))
    pages = range(len(ids) // page)
    table.apply(decode(stored(list(pages), None, ids, block_size=page)))
    expected = wire.chain_hashes(scheme, ids)
    assert table.held == {digest[-8:] for digest in expected}
    for last in reversed(pages):
        table.apply(decode(removed(last)))
        assert len(table) == last * page // scheme.block_tokens


def test_the_table_forgets_what_is_in_doubt_before_it_grows_without_end() -> None:
    table = BlockTable(Tracker(), PAGE, 10)
    for number in range(400):
        table.apply(decode(stored([10 * number + n for n in range(10)], None, list(range(number, number + 160)))))
        table.doubt()
        assert len(table._blocks) <= 2 * 10 + 1_024 + 10
    assert not table.unproved


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([1.0]),
        msgpack.packb([1.0, [["BlockMoved", [1]]]]),
        msgpack.packb([1.0, [{"type": "BlockStored", "block_hashes": [1]}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": ["text"]}]]),
        msgpack.packb([1.0, [["BlockStored", [1], "x", [1], 16, None]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [1], float("inf"), None]]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventError):
        decode(payload)


ACTIONS = ("serve", "serve", "serve", "serve", "drop", "drop all", "repeat", "restart", "reset", "report", "verify")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.lists(st.sampled_from([*ACTIONS, "reply loses"]), max_size=40), st.booleans())
def test_the_table_is_never_more_than_the_truth_and_equal_after_healing(
    seed: int, actions: list[str], replays: bool
) -> None:
    """The engine's replay reaches 6 batches back, or the engine has none."""
    engine = ScriptedEngine(seed, kept=6, replays=replays)
    follower, chance = Follower(engine), random.Random(seed)
    for action in actions:
        if action == "restart":
            engine.start()
            follower.sequence.verify() if replays else follower.sequence._forget()  # the connection broke
        elif action == "reset":
            engine.reset()
        elif action == "report":
            engine.report_hits()
            follower.exact = False
        elif action == "verify":
            follower.sequence.verify()
        elif action == "reply loses":
            engine.reply_loses = {len(engine.batches) - 2}
        elif action == "repeat" and follower.sequence.last > 0:
            number = max(0, follower.sequence.last - chance.randrange(4))
            follower.sequence.live(number, engine.batches[number])
        elif action in ("serve", "drop", "drop all"):
            for _ in engine.serve():
                if action == "serve" or (action == "drop" and chance.random() < 0.5):
                    follower.sequence.live(*engine.newest)
                    follower.check()
        follower.check()
    heal(engine, follower)


def heal(engine: ScriptedEngine, follower: Follower) -> None:
    """A reset of the prefix cache makes the table exact again, whatever was lost before."""
    for _ in engine.serve():
        pass
    engine.reset()
    follower.sequence.live(*engine.newest)
    follower.exact = True
    for _ in range(3):
        for _ in engine.serve():
            follower.sequence.live(*engine.newest)
            follower.check()


# ---------------------------------------------------------------- events by hand


def stored(keys: list[Any], parent: Any, ids: list[int], **more: Any) -> bytes:
    event = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent, "token_ids": ids}
    return bytes(msgpack.packb([1.0, [event | {"block_size": PAGE, "lora_id": None, "medium": "GPU"} | more], 0]))


def removed(key: Any, **more: Any) -> bytes:
    return bytes(msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"} | more], 0]))


def hashes(ids: list[int], scheme: wire.Scheme = CANONICAL, **more: Any) -> set[bytes]:
    return {digest[-8:] for digest in wire.chain_hashes(scheme, ids, **more)}


def test_a_prefix_ends_where_all_groups_support_it() -> None:
    """A window of two blocks, of which the engine keeps those of the last one."""
    ids = list(range(5 * PAGE))
    chain = [digest[-8:] for digest in wire.chain_hashes(CANONICAL, ids)]
    table = BlockTable(Tracker(), PAGE, 100, groups={1: Group("sliding_window", 2 * PAGE + 1, PAGE)})
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * PAGE + 1}

    def ends() -> set[int]:
        assert table.ends is not None
        return {chain.index(block) for block in table.ends.table}

    table.apply([*decode(stored([4, 5], None, ids, **window)), *decode(stored([1, 2, 3, 4, 5], None, ids))])
    assert ends() == {4}, "the order within a batch does not matter"
    table.apply(decode(stored([3], 2, ids[2 * PAGE : 3 * PAGE], **window)))
    assert ends() == {3, 4}
    table.apply(decode(removed(4, group_idx=1)))
    assert ends() == set()
    table.apply(decode(stored([4], 3, ids[3 * PAGE : 4 * PAGE], **window)))
    assert ends() == {3, 4}
    table.apply(decode(removed(5)))
    assert ends() == {3}
    table.apply(decode(stored([1, 2, 3], None, ids[: 3 * PAGE], **window)))
    assert ends() == {3}, "it may only tell that they are reused"
    table.apply(decode(stored([8], 7, ids[:PAGE], **window)))
    assert table.unproved == {"group": 4}
    table.doubt()
    assert ends() == set()


def test_nothing_is_promised_beside_a_group_whose_rule_is_not_known() -> None:
    table, ids = BlockTable(Tracker(), PAGE, 100, groups={1: Group("", 0, PAGE)}), list(range(PAGE))
    table.apply(decode(stored([1], None, ids)))
    table.apply(decode(stored([1], None, ids, group_idx=1)))
    assert table.held
    assert table.ends is not None
    assert not table.ends.table
