"""The step scheduler: vLLM's order, budget, admission and preemption."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engines.simulated import SCHEME

from warmfleet_loadtest.simulator.block_pool import BlockPool
from warmfleet_loadtest.simulator.fcfs_scheduler import FcfsScheduler
from warmfleet_loadtest.simulator.scheduler import Limits, Output, Request, Scheduler
from warmfleet_worker.protocol import wire

ANSWER = tuple(range(5_000, 6_000))


def scheduler(blocks: int = 65, step_tokens: int = 128, max_requests: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks), SCHEME, Limits(step_tokens, max_requests, (blocks - 1) * 16, 16))


def request(name: str, prompt: list[int], max_tokens: int = 1) -> Request:
    return Request(name, prompt, max_tokens, ANSWER)


def step(engine: Scheduler) -> tuple[dict[str, int], list[Output]]:
    """Run one step; return the tokens per request, and the output."""
    planned = engine.schedule()
    if planned is None:
        return {}, []
    return {request.request_id: tokens for request, tokens in planned.tokens}, engine.complete(planned)


def drain(engine: Scheduler) -> list[Output]:
    outputs: list[Output] = []
    while engine.busy:
        planned, out = step(engine)
        assert planned, "waiting requests, and nothing is done for them"
        outputs += out
    return outputs


def test_a_second_turn_computes_what_is_new_and_hits_what_was_said() -> None:
    engine = scheduler()
    first = request("a", list(range(40)), max_tokens=30)
    engine.add(first)
    drain(engine)
    second = request("b", [*range(40), *ANSWER[:30], *range(100, 120)])
    engine.add(second)
    drain(engine)
    # 70 tokens, of which the last has no KV: four full blocks
    assert second.cached_tokens == 64
    assert (engine.totals.queries, engine.totals.hits) == (40 + 90, 64)
    assert engine.pool.free == engine.pool.blocks - 1


def test_an_engine_that_sorts_takes_the_lowest_priority_first_and_equal_ones_as_they_came() -> None:
    limits = Limits(1_024, 1, 1_024, 16, sorts=True)
    for engine in (Scheduler(BlockPool(65), SCHEME, limits), FcfsScheduler(BlockPool(65), SCHEME, limits)):
        for index, priority in enumerate((5, 7, -2, 5, 0)):
            queued = request(f"{priority}.{index}", [index] * 20)
            queued.priority = priority
            engine.add(queued)
        ended = []
        while engine.busy:
            ended += [output.request.request_id for output in step(engine)[1] + engine.collect(9.0)]
        assert ended == ["-2.2", "0.4", "5.0", "5.3", "7.1"]


def test_the_last_token_is_always_computed() -> None:
    engine = scheduler()
    for name in ("a", "b"):
        engine.add(request(name, list(range(64))))
        drain(engine)
    assert engine.totals.hits == 48


def test_hashes_are_those_of_the_wire() -> None:
    engine = scheduler()
    engine.add(request("a", list(range(48)), max_tokens=20))
    drain(engine)
    ids = [*range(48), *ANSWER[:19]]
    assert sorted(engine.pool.held()) == sorted(digest[-8:] for digest in wire.chain_hashes(SCHEME, ids))


def test_a_salt_keeps_tenants_apart() -> None:
    engine = scheduler()
    for salt in (None, "t1", "t2", "t1"):
        engine.add(Request("a", list(range(40)), 1, ANSWER, salt))
        drain(engine)
    assert engine.totals.hits == 32


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    engine = scheduler(step_tokens=64)
    engine.add(request("decoding", list(range(20)), max_tokens=5))
    assert step(engine)[0] == {"decoding": 20}
    engine.add(request("long", list(range(1_000, 1_100))))
    engine.add(request("short", list(range(2_000, 2_030))))
    assert step(engine)[0] == {"decoding": 1, "long": 63}
    planned = engine.schedule()
    assert planned is not None
    assert {request.request_id: tokens for request, tokens in planned.tokens} == {
        "decoding": 1,
        "long": 37,
        "short": 26,
    }
    assert (planned.work.prefill_tokens, planned.work.prefill_requests) == (63, 2)
    assert (planned.work.decode_requests, planned.work.decode_context) == (1, 22)
    assert planned.work.prefill_pairs == 37 * (63 + 18.5) + 26 * 13


def test_a_request_of_the_same_step_already_hits() -> None:
    engine = scheduler()
    for name in ("a", "b"):
        engine.add(request(name, list(range(50))))
    assert step(engine)[0] == {"a": 50, "b": 2}


def test_only_so_many_run_at_once() -> None:
    engine = scheduler(max_requests=2)
    for name in "abc":
        engine.add(request(name, [ord(name)] * 10, max_tokens=2))
    assert set(step(engine)[0]) == {"a", "b"}
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    assert {output.request.request_id for output in drain(engine) if output.finished} == {"a", "b", "c"}


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = scheduler(blocks=9, step_tokens=16)  # 8 blocks
    engine.add(request("a", list(range(80)), max_tokens=40))
    step(engine)
    engine.add(request("b", list(range(500, 564))))  # 4 blocks, 3 are not yet given to anyone ... but a needs them
    assert set(step(engine)[0]) == {"a"}


def test_the_last_admitted_gives_way_and_is_computed_again() -> None:
    engine = scheduler(blocks=7, max_requests=4)  # 6 blocks of 16
    old, new = request("old", list(range(32)), max_tokens=40), request("new", list(range(100, 132)), max_tokens=40)
    engine.add(old)
    engine.add(new)
    outputs = drain(engine)
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert engine.totals.preemptions == 1
    answer = [token for output in outputs if output.request is new for token in output.token_ids]
    assert answer == list(ANSWER[:40])
    assert [output.first for output in outputs if output.request is new].count(True) == 1


def test_abort_frees_blocks_wherever_the_request_is() -> None:
    engine = scheduler(step_tokens=16, max_requests=1)
    running, waiting = request("a", list(range(64)), max_tokens=9), request("b", list(range(64)), max_tokens=9)
    engine.add(running)
    engine.add(waiting)
    planned = engine.schedule()
    assert planned is not None
    engine.abort(running)
    engine.abort(waiting)
    assert engine.complete(planned) == []
    engine.abort(running)  # again: nothing
    assert not engine.busy
    assert engine.pool.free == engine.pool.blocks - 1


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 1), (1_020, 10), (10, 0)])
def test_what_can_never_run_is_refused(prompt: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        scheduler().add(request("a", [1] * prompt, max_tokens))


def test_a_cache_must_hold_one_request() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        Scheduler(BlockPool(4), SCHEME, Limits(max_model_len=1_024))
    with pytest.raises(ValueError, match="block size"):
        Scheduler(BlockPool(4), SCHEME, Limits(block_tokens=32))


PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=12
)


@settings(max_examples=150)
@given(plan=PROMPTS, step_tokens=st.integers(1, 64), limit=st.integers(1, 6), fcfs=st.booleans())
def test_every_request_says_everything_once(
    plan: list[tuple[int, int, int, int]], step_tokens: int, limit: int, fcfs: bool
) -> None:
    """For any arrivals, budgets hold, blocks balance, and each answer is complete and in order."""
    limits = Limits(step_tokens, limit, 8 * 16, 16)
    engine = (FcfsScheduler if fcfs else Scheduler)(BlockPool(9), SCHEME, limits)
    answers: dict[str, list[int]] = {}
    pending = [
        (arrives, request(f"{k}", [family] * length, out)) for k, (family, length, out, arrives) in enumerate(plan)
    ]
    now = 0
    while pending or engine.busy:
        for _at, arrived in [entry for entry in pending if entry[0] <= now]:
            engine.add(arrived)
        pending = [entry for entry in pending if entry[0] > now]
        planned = engine.schedule()
        outputs = engine.collect(float(now))
        if planned is not None:
            tokens = [count for _one, count in planned.tokens]
            assert all(count > 0 for count in tokens)
            assert fcfs or sum(tokens) <= step_tokens
            assert len(engine.running) <= limit
            outputs += engine.complete(planned, float(now))
        for output in outputs:
            answers.setdefault(output.request.request_id, []).extend(output.token_ids)
        now += 1
        assert now < 5_000
    assert answers == {f"{k}": list(ANSWER[:out]) for k, (_family, _length, out, _at) in enumerate(plan)}
    assert engine.pool.free == engine.pool.blocks - 1
    assert engine.totals.finished == len(plan)


def test_fcfs_prefills_one_at_a_time_and_decodes_for_nothing() -> None:
    engine = FcfsScheduler(BlockPool(65), SCHEME, Limits(max_model_len=1_024), decode_s=0.5)
    first, second = request("a", list(range(40)), max_tokens=4), request("b", list(range(100)))
    engine.add(first)
    engine.add(second)
    planned = engine.schedule()
    assert planned is not None
    assert [request for request, _tokens in planned.tokens] == [first]
    (output,) = engine.complete(planned, 10.0)
    assert (output.first, output.finished) == (True, False)
    assert engine.next_due() == 11.5
    planned = engine.schedule()
    assert planned is not None
    assert [(request, tokens) for request, tokens in planned.tokens] == [(second, 100 - 32)]
    assert engine.collect(11.0) == []
    (rest,) = engine.collect(11.5)
    assert (list(rest.token_ids), rest.finished) == (list(ANSWER[1:4]), True)
