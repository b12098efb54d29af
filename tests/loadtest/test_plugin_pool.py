"""The simulated pool that evicts in the plugin's order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.simulator.plugin_pool import PluginPool
from warmfleet_loadtest.simulator.scheduler import Limits, Request, Scheduler
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_worker.eviction import next_prompt
from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.wire import ENDED_MARK, RESERVATION_PREFIX

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)
CONFIG = EngineConfig(SCHEME, Limits(max_model_len=992), 64, StepCosts(base_s=0.0, prefill_token_s=0.001))
NAMES = {name: range(number * 10_000, number * 10_000 + 2_000) for number, name in enumerate("abcd")}


@pytest.fixture(autouse=True)
def no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_prompt, "ASSUMED_TOKENS", 0)


def answer(engine: Scheduler, name: str, tokens: int) -> int:
    """Answer a prompt with one token, that of the name's last letter. Returns how many of its tokens were cached."""
    request = Request(name, NAMES[name[-1]][:tokens], 1, [9])
    engine.add(request)
    while (step := engine.schedule()) is not None:
        engine.complete(step)
    return request.cached_tokens


@pytest.mark.parametrize(("target", "cached"), [("", 0), ("0.2", 128)])
def test_what_a_conversation_can_do_without_goes_first(target: str, cached: int) -> None:
    """63 blocks, of which a, b, c and d need 85. LRU evicts all of a. With 200 tokens to spare each has 12 to give."""
    engine = replace(CONFIG, mode="step", ttft_target=target).scheduler(clock=lambda: 1.0)
    for name, tokens in (("a", 320), ("b", 320), ("c", 400), ("d", 320), ("a", 320)):
        last = answer(engine, name, tokens)
    assert last == cached
    assert engine.pool.free == 63


@pytest.mark.parametrize("mode", ["step", "fcfs"])
def test_both_schedulers_tell_it_about_first_tokens_and_ends(mode: str) -> None:
    engine = replace(CONFIG, mode=mode, fcfs_decode_s=0.0, ttft_target="auto").scheduler(clock=lambda: 1.0)
    pool = engine.pool
    assert isinstance(pool, PluginPool)
    for round_number in range(3):
        for name in "abcd":
            request = Request(name, NAMES[name][: 160 + 32 * round_number], 3, [9, 9, 9])
            engine.add(request)
            while (step := engine.schedule()) is not None:
                engine.complete(step)
            engine.collect(1e9)
    tail = pool.eviction.tail
    assert tail is not None
    assert tail.next_prompt._growth.samples == 8
    assert len(tail.objective._uncached) == 12  # type: ignore[attr-defined]


def test_a_request_that_is_aborted_is_over_and_a_waiting_one_never_began() -> None:
    engine = replace(CONFIG, ttft_target="0.05").scheduler(clock=lambda: 1.0)
    pool = engine.pool
    assert isinstance(pool, PluginPool)
    running, waiting = Request("a", NAMES["a"][:320], 9, [9] * 9), Request("b", NAMES["b"][:320], 9, [9] * 9)
    engine.add(running)
    engine.schedule()
    engine.add(waiting)
    engine.abort(waiting)
    engine.abort(running)
    assert pool.eviction.tail is not None
    assert pool.eviction.tail.tagged == 3  # of 20 blocks: ceil((320 - 50) / 16) = 17 stay
    assert pool.free == 63


def test_a_conversation_that_has_ended_goes_first() -> None:
    """63 blocks, of which a, b and c need 60, and d 20: LRU evicts a, but b has ended."""
    engine = replace(CONFIG, ttft_target="9").scheduler(clock=lambda: 1.0)
    ended = f"cmpl-{RESERVATION_PREFIX}{'x' * 22}.{ENDED_MARK}b"
    for name in ("a", ended, "c", "d"):
        answer(engine, name, 320)
    assert answer(engine, "a", 320) == 304
