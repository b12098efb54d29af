"""The order of eviction at a small copy of vLLM's block pool; ``tests/vllm/test_tail_eviction.py`` has the real one."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from warmfleet_worker.vllm_hooks import eviction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet_worker.eviction.objective import Served
    from warmfleet_worker.eviction.tail_eviction import TailEviction

BLOCK = 16
GROUP = bytes(4)  # stands behind the hash in a block's key


class Block:
    def __init__(self, number: int) -> None:
        self.block_id, self.ref_cnt, self.block_hash = number, 0, None
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None
        self.is_null = False

    block_hash: bytes | None


class Queue:
    """vLLM's ``FreeKVCacheBlockQueue``: a list that is linked both ways between two ends."""

    def __init__(self, blocks: list[Block]) -> None:
        self.fake_free_list_head, self.end = Block(-1), Block(-1)
        self._relink(blocks)

    def order(self) -> list[Block]:
        found, block = [], self.fake_free_list_head.next_free_block
        while block is not None and block is not self.end:
            found.append(block)
            block = block.next_free_block
        return found

    def remove(self, block: Block) -> None:
        assert block.prev_free_block is not None
        assert block.next_free_block is not None
        self._relink([other for other in self.order() if other is not block])
        block.prev_free_block = block.next_free_block = None

    def prepend_n(self, blocks: list[Block]) -> None:
        self._relink([*blocks, *self.order()])

    def append_n(self, blocks: list[Block]) -> None:
        self._relink([*self.order(), *blocks])

    def _relink(self, blocks: list[Block]) -> None:
        chain = [self.fake_free_list_head, *blocks, self.end]
        for before, after in pairwise(chain):
            before.next_free_block, after.prev_free_block = after, before


class Pool:
    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(number) for number in range(blocks)]
        self.free_block_queue = Queue(self.blocks)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken = self.free_block_queue.order()[:num_blocks]
        for block in taken:
            self.free_block_queue.remove(block)
            block.ref_cnt, block.block_hash = 1, None
        return taken

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        blocks = list(blocks)
        for block in blocks:
            block.ref_cnt -= 1
        self.free_block_queue.prepend_n([block for block in blocks if not block.ref_cnt and block.block_hash is None])
        self.free_block_queue.append_n([block for block in blocks if not block.ref_cnt and block.block_hash])

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1


class Manager:
    enable_caching = True

    def __init__(self, blocks: int) -> None:
        self.block_pool = Pool(blocks)
        single = SimpleNamespace(req_to_blocks={}, block_size=BLOCK)
        self.tables: dict[str, list[Block]] = single.req_to_blocks
        self.coordinator = SimpleNamespace(single_type_managers=[single])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[object()])

    def free(self, request: Any) -> None:
        self.block_pool.free_blocks(reversed(self.tables.pop(request.request_id, [])))


class Engine:
    """Requests on the copy. Their blocks' hashes are the request's name and the place in the chain."""

    def __init__(self, blocks: int = 30, target: str | None = "0.1", speed: int = 480, hashed: int = BLOCK) -> None:
        self.manager = Manager(blocks)
        self.scheduler = SimpleNamespace(kv_cache_manager=self.manager, connector=None, hash_block_size=hashed)
        self.hook = eviction.install(self.scheduler, target, lambda: speed)
        self.each = BLOCK // hashed

    @property
    def order(self) -> list[int]:
        return [block.block_id for block in self.manager.block_pool.free_block_queue.order()]

    @property
    def tail(self) -> TailEviction:
        assert self.hook is not None
        assert self.hook.eviction.tail is not None
        return self.hook.eviction.tail

    def run(self, name: str, blocks: int, request_id: str = "", extra: dict[str, str] | None = None) -> Any:
        table = self.manager.tables[request_id or name] = self.manager.block_pool.get_new_blocks(blocks)
        hashes = [f"{name}{step}".encode() for step in range(blocks * self.each)]
        for place, block in enumerate(table):
            block.block_hash = hashes[(place + 1) * self.each - 1] + GROUP
        return SimpleNamespace(
            request_id=request_id or name,
            block_hashes=hashes,
            num_prompt_tokens=blocks * BLOCK,
            num_tokens=blocks * BLOCK,
            is_finished=lambda: True,
            sampling_params=SimpleNamespace(extra_args=extra),
        )

    def finish(self, request: Any) -> None:
        self.manager.free(request)


@pytest.fixture(autouse=True)
def known_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that stand for vLLM's, which this environment lacks."""
    monkeypatch.setattr(eviction, "missing", lambda _part: "")


def test_the_end_of_a_prompt_goes_in_place_of_the_oldest_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """ξ is 48 tokens, three blocks; nothing is expected to be added."""
    engine = Engine(12)
    monkeypatch.setattr(engine.tail.next_prompt, "_growth", SimpleNamespace(samples=99, value=0.0))
    engine.finish(engine.run("a", 5))
    engine.finish(engine.run("b", 5))
    assert engine.order == [10, 11, 4, 3, 2, 1, 0, 9, 8, 7, 6, 5]
    taken = engine.manager.block_pool.get_new_blocks(4)
    assert [block.block_id for block in taken] == [4, 3, 10, 11], "two without content, and two of the tagged ones"
    taken = engine.manager.block_pool.get_new_blocks(4)
    assert [block.block_id for block in taken] == [2, 9, 8, 7], "tagged ones, though 1 and 0 are older"
    assert engine.order == [1, 0, 6, 5]
    assert [block.block_id for block in engine.manager.block_pool.get_new_blocks(2)] == [1, 0]


def test_a_preempted_request_is_not_judged() -> None:
    engine = Engine(30, "10")
    request = engine.run("a", 5)
    request.is_finished = lambda: False
    engine.finish(request)
    assert (engine.tail.tagged, len(engine.tail.tags)) == (0, 0)


@pytest.mark.parametrize("why", ["in use", "other content", "not in the queue"])
def test_a_tagged_block_that_has_changed_stays_where_it_is(why: str) -> None:
    engine = Engine(10, "10")
    pool = engine.manager.block_pool
    engine.finish(engine.run("a", 5))
    engine.finish(engine.run("b", 5))
    block = pool.blocks[4]
    if why == "in use":
        pool.touch([block])
    elif why == "other content":
        block.block_hash = b"new" + GROUP
    else:
        pool.free_block_queue.remove(block)
    before = engine.order
    assert [other.block_id for other in pool.get_new_blocks(1)] == [3]
    assert engine.order == [number for number in before if number != 3]
    assert "free" in vars(engine.manager), "nothing went wrong"


@pytest.mark.parametrize("target", [None, "0"])
@pytest.mark.parametrize(
    ("request_id", "extra", "ended"),
    [
        (f"cmpl-wf-{'a' * 22}.~mine-0", None, True),
        (f"cmpl-wf-{'a' * 22}.mine-0", None, False),
        ("b", {"x-warmfleet-conversation": "ended"}, True),
        ("b", {"x-warmfleet-conversation": "open"}, False),
        ("b", {"other": "ended"}, False),
    ],
)
def test_an_ended_conversation_goes_first_with_and_without_t_lru(
    request_id: str, extra: dict[str, str] | None, target: str | None, *, ended: bool
) -> None:
    engine = Engine(10, target)
    engine.finish(engine.run("a", 5))
    engine.finish(engine.run("b", 5, request_id, extra))
    taken = [block.block_id for block in engine.manager.block_pool.get_new_blocks(5)]
    assert taken == ([9, 8, 7, 6, 5] if ended else [4, 3, 2, 1, 0])


@pytest.mark.parametrize("target", [None, "", "soon", "-1"])
def test_without_a_target_there_is_no_t_lru(target: str | None, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(target=target)
    assert engine.hook is not None
    assert engine.hook.eviction.tail is None
    assert len(caplog.records) == bool(target), "one line says what is wrong"


@pytest.mark.parametrize("why", ["more than one KV cache group", "prefix caching is off"])
@pytest.mark.parametrize("target", [None, "1"])
def test_where_it_cannot_work_one_line_says_so(why: str, target: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.warmfleet")
    manager = Manager(10)
    if why == "prefix caching is off":
        manager.enable_caching = False
    elif "group" in why:
        manager.kv_cache_config.kv_cache_groups.append(object())
    scheduler = SimpleNamespace(kv_cache_manager=manager, connector=object())
    assert eviction.install(scheduler, target, lambda: 1) is None
    assert "free" not in vars(manager)
    (record,) = caplog.records
    assert why in record.getMessage()
    assert record.levelno == (logging.WARNING if target else logging.INFO)


def test_a_vllm_that_differs_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eviction, "missing", lambda part: f"there is no {part.name}")
    engine = Engine()
    assert engine.hook is None
    assert "free" not in vars(engine.manager)
    (record,) = caplog.records
    assert "there is no EVICTION: ended and paused sessions are not evicted first" in record.getMessage()


@pytest.mark.parametrize("step", ["freed", "give_up"])
def test_an_error_of_ours_leaves_eviction_to_vllm(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(10, "10")
    assert engine.hook is not None
    engine.finish(engine.run("a", 3))
    monkeypatch.setattr(engine.hook.eviction, step, None)
    engine.finish(engine.run("b", 5))
    engine.finish(engine.run("c", 5))
    assert "free" not in vars(engine.manager)
    assert "get_new_blocks" not in vars(engine.manager.block_pool)
    assert sorted(engine.order) == list(range(10))


def test_an_objective_that_fails_is_logged_once_and_ends_t_lru(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(10, "10")
    assert engine.hook is not None
    caplog.clear()
    engine.tail.objective = SimpleNamespace()
    for _ in range(3):
        engine.hook.first_token("a", 1, 2)
        engine.hook.beside()
    assert len(caplog.records) == 1
    assert "free" not in vars(engine.manager)


def test_the_objective_is_told_of_first_tokens() -> None:
    engine = Engine()
    assert engine.hook is not None
    noted: list[Served] = []
    engine.tail.objective = SimpleNamespace(note=noted.append, xi_tokens=lambda: 1)
    engine.hook.first_token("gone", 64, 100)
    assert [(note.prompt_tokens, note.uncached_tokens) for note in noted] == [(100, 36)]


@pytest.mark.parametrize(("target", "hashes"), [("auto", [b"a0", b"a1"]), ("0.1", [])])
def test_hashes_of_a_prompt_are_read_only_for_the_account(
    target: str, hashes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 4,000 tokens has 250 of them."""
    engine = Engine(10, target)
    assert engine.hook is not None
    told: list[list[bytes]] = []
    monkeypatch.setattr(engine.tail, "first_token", lambda _served, known: told.append(list(known)))
    engine.run("a", 2)

    engine.hook.first_token("a", 0, 2 * BLOCK + 1)

    assert told == [[name + GROUP for name in hashes]]


def id_of(number: int) -> str:
    return f"wf-{number:022}"


@pytest.mark.parametrize("hashed", [BLOCK, BLOCK // 2])
@pytest.mark.parametrize("target", [None, "0"])
def test_a_session_that_yields_goes_before_an_older_one_and_its_last_block_first(
    target: str | None, hashed: int
) -> None:
    engine = Engine(12, target, hashed=hashed)
    assert engine.hook is not None
    engine.finish(engine.run("a", 5, f"chatcmpl-{id_of(1)}.x-0"))
    engine.finish(engine.run("b", 5, f"chatcmpl-{id_of(2)}{'t' * 11}.x-0"))
    engine.hook.eviction.yield_sessions([id_of(9), id_of(2)])
    taken = [block.block_id for block in engine.manager.block_pool.get_new_blocks(5)]
    assert taken == [9, 8, 7, 10, 11], "three blocks in place of three of a, and two without content"
    assert engine.order == [4, 3, 2, 1, 0, 6, 5]
    assert [block.block_id for block in engine.manager.block_pool.get_new_blocks(3)] == [6, 5, 4]
    assert engine.hook.eviction.given_up == 5
    assert not engine.hook.eviction._yields


def test_blocks_that_another_request_uses_or_has_used_since_stay() -> None:
    engine = Engine(12, None)
    assert engine.hook is not None
    pool = engine.manager.block_pool
    request = engine.run("a", 5, f"cmpl-{id_of(1)}.x-0")
    engine.finish(request)
    engine.finish(engine.run("b", 5))
    engine.hook.eviction.yield_sessions([id_of(1)])
    again = SimpleNamespace(**vars(request) | {"request_id": f"cmpl-{id_of(2)}.x-0"})
    engine.manager.tables[again.request_id] = pool.blocks[:3]
    pool.touch(pool.blocks[:3])
    assert [block.block_id for block in pool.get_new_blocks(5)] == [4, 3, 10, 11, 9]
    engine.hook.eviction.yield_sessions([id_of(1)])
    again.num_prompt_tokens = again.num_tokens = 3 * BLOCK
    engine.finish(again)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [8, 7, 6], "the later request keeps what it shares"


def test_a_request_is_reported_with_its_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = Engine(20, None), []
    assert engine.hook is not None
    monkeypatch.setattr(engine.hook.eviction, "freed", lambda request, _now: told.append(request))
    for number, name in enumerate((f"cmpl-{id_of(1)}.x-0", f"1_cmpl-{id_of(2)}.x-0", "cmpl-direct-0")):
        request = engine.run("abc"[number], 4, name)
        engine.hook.first_token(name, 16 * number, 4 * BLOCK)
        request.is_finished = lambda ends=number != 1: ends
        engine.finish(request)
    assert [(request.request_id, request.cached_tokens, request.preempted) for request in told] == [
        (f"cmpl-{id_of(1)}.x-0", 0, False),
        (f"1_cmpl-{id_of(2)}.x-0", 16, True),
        ("cmpl-direct-0", 32, False),
    ]
    assert engine.hook._cached == {}


def test_a_line_tells_what_was_given_up_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(10, "10")
    assert engine.hook is not None
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.warmfleet"):
        engine.finish(engine.run("a", 10))
        engine.finish(engine.run("b", 3))
        engine.hook.beside()
        assert not caplog.records
        monkeypatch.setattr(engine.hook, "_logged_at", -1e9)
        engine.hook.beside()
        engine.hook.beside()
    first, second = (record.getMessage() for record in caplog.records)
    assert "3 blocks given up first" in first
    assert "13 blocks tagged; objective 4800 tokens, next prompt 200 tokens" in second
