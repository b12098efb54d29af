"""vLLM's KV events of a simulated engine, as other routers would hear them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import zmq
from tests.support.engines.simulated import SCHEME

from warmfleet_loadtest.engine import main
from warmfleet_loadtest.simulator.block_pool import BlockPool
from warmfleet_loadtest.simulator.kv_events import KvEvents
from warmfleet_loadtest.simulator.scheduler import Limits, Request, Scheduler
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator


def listen(port: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 5_000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.subscribe(b"")
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def applied(held: dict[int, tuple[int, ...]], copies: Counter[int], batch: list[Any]) -> None:
    """Apply a batch to the index of a subscriber: block hash -> tokens of the whole prefix. copies: of each block."""
    _time, events, rank = batch
    assert rank == 0
    for event in events:
        if event["type"] == "BlockStored":
            prefix = held[event["parent_block_hash"]] if event["parent_block_hash"] is not None else ()
            for index, block_hash in enumerate(event["block_hashes"]):
                prefix += tuple(event["token_ids"][index * 16 : index * 16 + 16])
                held[block_hash] = prefix
                copies[block_hash] += 1
        elif event["type"] == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                copies[block_hash] -= 1
                if not copies[block_hash]:
                    del held[block_hash]
        else:
            held.clear()
            copies.clear()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(BlockPool(40), SCHEME, Limits(max_model_len=400))


@pytest.fixture
def events(scheduler: Scheduler) -> Iterator[KvEvents]:
    made = KvEvents(scheduler)
    yield made
    made.close()


def serve(scheduler: Scheduler, requests: int) -> Iterator[None]:
    """Serve prompts with common heads and many more blocks than the pool has; yield after every step."""
    generator = random.Random(requests)
    heads = [[generator.randrange(1_000) for _ in range(64)] for _ in range(3)]
    for number in range(requests):
        prompt = generator.choice(heads) + [generator.randrange(1_000) for _ in range(generator.randrange(90))]
        scheduler.add(Request(str(number), prompt, 20, range(5_000, 5_100)))
        while (step := scheduler.schedule()) is not None:
            scheduler.complete(step)
            yield


def table(scheduler: Scheduler) -> set[int]:
    return {int.from_bytes(block_hash, "big") for block_hash in scheduler.pool.held()}


def test_a_subscriber_hears_every_batch_in_order(scheduler: Scheduler, events: KvEvents) -> None:
    subscriber = listen(events.port)
    while not subscriber.poll(20):  # until the subscription is there
        events.cleared()
        events.publish()
    steps = 0
    for _ in serve(scheduler, 30):
        events.publish()
        steps += 1
    held, copies = dict[int, tuple[int, ...]](), Counter[int]()
    numbers: list[int] = []
    while not numbers or numbers[-1] + 1 < events._sequence:
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b""
        numbers.append(int.from_bytes(number, "big"))
        applied(held, copies, msgpack.unpackb(payload))
    subscriber.close()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert 30 < len(numbers) < steps  # a step without changes sends nothing
    assert set(held) == table(scheduler)


def test_after_every_step_what_was_told_is_what_is_held(scheduler: Scheduler, events: KvEvents) -> None:
    held, copies = dict[int, tuple[int, ...]](), Counter[int]()
    for _ in serve(scheduler, 60):
        applied(held, copies, [0.0, events._events, 0])
        events._events = []
        assert set(held) == table(scheduler)
    for block_hash, tokens in held.items():
        assert wire.chain_hashes(SCHEME, list(tokens))[-1][-8:] == block_hash.to_bytes(8, "big")
    assert scheduler.pool.evicted > 100


def test_an_engine_tells_one_listener(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kv-events", "--redis", "redis://127.0.0.1:1"])
    assert "without --redis" in capsys.readouterr().err


def test_packages_that_kv_events_miss_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make run` does not install them."""
    monkeypatch.setitem(sys.modules, "msgpack", None)
    monkeypatch.delitem(sys.modules, "warmfleet_loadtest.simulator.kv_events")
    monkeypatch.setattr("warmfleet_loadtest.engine.uvloop.run", asyncio.run)
    assert main(["--kv-events", "--port", "0"]) == 1
    assert capsys.readouterr().err == (
        "error: msgpack is not installed: pip install './worker_plugin[bridge]' in a checkout of Warmfleet\n"
    )
