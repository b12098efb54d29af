"""The whole path over real processes, and the load that is left when one of them is killed."""

from __future__ import annotations

import asyncio
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
import redis
from tests.e2e.clients import Clients
from tests.e2e.conftest import chat, engine_of, left_of_requests, load, stages, wait_for_no_load
from tests.support.polling import poll, until

from warmfleet.__main__ import main
from warmfleet.fleet.rows import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.streams import Stream

    from warmfleet.cli.local.stack import Member, Stack

LONG = "Once upon a time there was a router that knew where every prefix lived. " * 40


def test_a_conversation_stays_on_its_engine_whichever_replica_it_meets(stack: Stack) -> None:
    messages = [{"role": "user", "content": f"stays: {LONG}"}]
    first = chat(stack.replicas[0].url, messages)
    messages += [first.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    wait_for_no_load(stack)
    second = chat(stack.replicas[1].url, messages)
    assert second.headers["x-warmfleet-worker"] == first.headers["x-warmfleet-worker"]
    matched = int(second.headers["x-warmfleet-matched-tokens"])
    assert matched > 500
    assert matched == second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_it_started_itself_is_approved(stack: Stack) -> None:
    assert {model["template"] for replica in stack.replicas for model in stack.fleet(replica)} == {"approved"}


def test_both_replicas_answer_behind_one_address(stack: Stack) -> None:
    """The kernel spreads new connections over the replicas, and each replica counts its answers."""

    def answered(operators: str) -> float:
        lines = httpx.get(f"{operators}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("warmfleet_requests_total{"))

    before = [answered(replica.operators) for replica in stack.replicas]
    for number in range(24):
        chat(stack.address, [{"role": "user", "content": f"hello {number}"}])
    gained = [answered(replica.operators) - count for replica, count in zip(stack.replicas, before, strict=True)]
    assert sum(gained) == 24
    assert min(gained) > 0


def test_a_client_killed_in_mid_stream_leaves_no_load(stack: Stack, stream: Callable[..., Stream]) -> None:
    wait_for_no_load(stack)
    clients = [stream(replica.url) for replica in stack.replicas]
    until(lambda: load(stack) > 0, "the streams' load is booked", 5)
    for client in clients:
        client.kill()
    wait_for_no_load(stack)


@pytest.mark.long(
    minutes=1,
    shows="an engine that freezes holds no request for ever, and is taken back once it goes on",
)
def test_a_frozen_engine_holds_nobody_for_ever(stack: Stack, stream: Callable[..., Stream]) -> None:
    wait_for_no_load(stack)
    client = stream(stack.address, LONG)
    [busy] = [worker["worker_id"] for worker in stack.workers() if worker["load"]["in_flight"]]
    frozen = engine_of(stack, busy).child
    assert frozen is not None
    frozen.process.send_signal(signal.SIGSTOP)
    try:
        body = {"model": "demo", "prompt": LONG, "max_tokens": 8}  # its prefix is on the frozen engine
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{stack.address}/v1/completions", json=body, timeout=60)
            rest, code = client.read_to_end()
            assert (b'"upstream_gone"' in rest, code) == (True, 0), "curl gives up after 60 s, the router earlier"
            answer = asked.result()
        assert answer.status_code == 200
        assert answer.headers["x-warmfleet-worker"] != busy
        wait_for_no_load(stack)
    finally:
        frozen.process.send_signal(signal.SIGCONT)
    until(lambda: all(worker["routable"] for worker in stack.workers()), "it is taken back once it goes on", 15)


def test_an_engine_killed_in_mid_stream_leaves_no_load_and_others_serve_on(
    stack: Stack, stream: Callable[..., Stream]
) -> None:
    wait_for_no_load(stack)  # the probes by which the engines joined count as load until they are settled
    client = stream(stack.address)
    [busy] = [worker["worker_id"] for worker in stack.workers() if worker["load"]["in_flight"]]
    victim = engine_of(stack, busy).child
    assert victim is not None
    victim.process.send_signal(signal.SIGKILL)
    rest, code = client.read_to_end()
    assert b"[DONE]" not in rest
    assert code != 0 or b'"error"' in rest, "a cut answer must not look whole"
    wait_for_no_load(stack)
    for number in range(6):
        answer = chat(stack.address, [{"role": "user", "content": f"still there? {number}"}])
        assert answer.headers["x-warmfleet-worker"] != busy
    assert stack.children.newly_dead() == [victim]


async def test_a_killed_replica_leaves_the_address_serving_and_no_load(
    stack: Stack, stream: Callable[..., Stream]
) -> None:
    clients = Clients(list(stack.replicas))
    running = asyncio.create_task(clients.run(6))
    stream(stack.replicas[0].url)  # the request lasts longer than the test
    await poll(lambda: clients.outcomes["whole"] > 10, 20, "requests are under way")
    assert Stage.STARTED in stages(stack)
    victim = clients.replicas.pop(0)
    clients.killed.add(victim.name)
    assert victim.child is not None
    victim.child.process.send_signal(signal.SIGKILL)
    victim.child.process.wait()
    whole = clients.outcomes["whole"]
    await poll(lambda: clients.outcomes["whole"] > whole + 10, 20, "the other one serves on")
    clients.over = True
    await running
    assert clients.failures == []
    until(lambda: Stage.STARTED not in stages(stack), "engines tell that the dead replica's requests have left", 20)
    a_minute_passes(stack)
    until(lambda: load(stack) == 0 and not left_of_requests(stack), "the dead replica's leases expire", 20)


def a_minute_passes(stack: Stack) -> None:
    """Move every lease and tombstone a minute into the past. None of them lasts longer than that."""
    with redis.Redis.from_url(stack.redis_url, decode_responses=True) as store:
        [leases] = store.keys("wf:*:leases")
        now = store.time()[0] * 1_000
        expiries = dict(store.zrange(leases, 0, -1, withscores=True))
        assert expiries
        assert max(expiries.values()) <= now + 62_000
        store.zadd(leases, {lease: expiry - 60_000 for lease, expiry in expiries.items()})


def test_a_replica_that_stops_is_gone_and_one_that_is_killed_is_told_everywhere(
    stack: Stack, capfd: pytest.CaptureFixture[str]
) -> None:
    witness = next(replica for replica in stack.replicas if replica.child is not None and replica.child.alive)
    stops, killed = stack.add_replica(), stack.add_replica()
    assert stops.child is not None
    assert killed.child is not None

    def state(replica: Member) -> str:
        rows = httpx.get(f"{witness.operators}/replicas").json()["replicas"]
        return next((row["state"] for row in rows if row["url"] == replica.operators), "gone")

    until(lambda: {state(replica) for replica in (witness, stops, killed)} == {"serving"}, "all tell of themselves", 30)
    stops.child.process.send_signal(signal.SIGTERM)
    until(lambda: state(stops) == "gone", "its name is gone", 10)
    killed.child.process.send_signal(signal.SIGKILL)
    until(lambda: state(killed) == "silent", "the killed one is silent", 10)
    assert state(witness) == "serving"
    (model,) = httpx.get(f"{witness.operators}/status.json").json()["models"]
    assert {row["url"]: row["state"] for row in model["replicas"]}[killed.operators] == "silent"
    assert main(["replicas", "--url", witness.operators]) == 1
    printed = capfd.readouterr().out
    assert re.search(r"^\S+ +silent ", printed, re.MULTILINE)
    assert "killed, hung, or cut off from Redis" in printed
    assert main(["doctor", "-q", "--redis", stack.redis_url, "--model", stack.models[0]]) == 1
    told = capfd.readouterr().out
    assert re.search(r"FAULT +replicas: \S+ was last heard \d+ s ago: killed, hung", told)
