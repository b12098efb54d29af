"""Slots computed as by Redis show the pools that share a master of a Cluster, and the tags that spread pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from warmfleet.fleet.connection.pool_masters import Crowded, by_master, crowded, master_of, next_tag
from warmfleet.protocol.redis_address import CLUSTER_SLOTS, slot_of
from warmfleet.protocol.wire import Keys, WireError

A, B, C = (("127.0.0.1", port) for port in (1, 2, 3))
THIRDS = ((0, 5_460, A), (5_461, 10_922, B), (10_923, CLUSTER_SLOTS - 1, C))


@given(st.from_regex(r"[A-Za-z0-9._-]{1,20}(/[A-Za-z0-9._-]{1,20})?(#[0-9]{1,3})?", fullmatch=True))
def test_a_tags_slot_is_that_of_its_keys(tag: str) -> None:
    keys = Keys(tag)
    assert slot_of(keys.tag) == key_slot(keys.load.encode()) == key_slot(keys.events("w.0").encode())
    master = master_of(tag, THIRDS)
    assert [master] == [owner for first, last, owner in THIRDS if first <= slot_of(keys.tag) <= last]


def test_a_slot_without_an_owner_and_a_store_that_is_no_cluster_have_no_master() -> None:
    assert master_of("demo", ()) is None
    assert by_master(["demo"], ()) == {}
    assert crowded(["demo", "other"], ()) == ()
    assert next_tag("demo", ["demo", "demo#4"], ()) == "demo#5"
    with pytest.raises(WireError):
        master_of("not a name", THIRDS)


def test_two_busy_pools_on_one_master_while_another_is_idle() -> None:
    on = {master: [f"m#{n}" for n in range(60) if master_of(f"m#{n}", THIRDS) == master] for master in (A, B, C)}
    one_each = [on[A][0], on[B][0], on[C][0]]
    assert crowded(one_each, THIRDS) == ()
    assert crowded([*one_each, on[A][1]], THIRDS) == (), "every master has work"
    assert crowded([on[A][0]], THIRDS) == (), "one pool cannot be spread"
    assert crowded([on[A][0], on[A][1], on[B][0]], THIRDS) == (Crowded(A, (on[A][0], on[A][1])),)


@given(st.integers(0, 12), st.sampled_from(["llama", "Qwen/Qwen3-8B"]))
def test_tags_that_are_proposed_one_after_another_spread_evenly(count: int, name: str) -> None:
    tags: list[str] = []
    for _ in range(count):
        tag = next_tag(name, tags, THIRDS)
        assert tag not in tags
        tags.append(tag)
    sizes = [len(found) for found in by_master(tags, THIRDS).values()]
    assert max(sizes) - min(sizes) <= 1


def test_a_proposed_tag_keeps_away_from_other_models_and_from_tags_that_were_used() -> None:
    others = [tag for n in range(40) if master_of(tag := f"other#{n}", THIRDS) in (A, B)]
    tag = next_tag("llama", ["llama", "llama#7"], THIRDS, others)
    assert master_of(tag, THIRDS) == C
    assert int(tag.removeprefix("llama#")) > 7
