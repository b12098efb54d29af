"""Real processes: two replicas behind one address, simulated engines, one store."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import redis
from tests.e2e.streams import Stream
from tests.support.polling import until

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.demo import BLOCKS
from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.stack import Plan, Stack
from warmfleet.fleet.rows import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from warmfleet.cli.local.stack import Member


#: A decision that takes longer than the default of 50 ms falls back, and the machine of a test may be busy.
PATIENT = {"WARMFLEET_DECIDE_TIMEOUT_S": "2"}


@contextmanager
def patient() -> Iterator[None]:
    """Every replica that is started meanwhile waits longer for its decisions."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replicas that these tests start wait longer for their decisions; commands find the stacks of their test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with patient():
        yield


def started(left: ExitStack, plan: Plan) -> Stack:
    """A stack that ends with ``left``. It is started again if another test's server took one of its ports."""
    try:
        return left.enter_context(Stack(plan))
    except CommandError as error:
        if "address already in use" not in str(error).lower():
            raise
    return left.enter_context(Stack(plan))


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Four engines and two replicas for the whole session.

    test_demo.py uses them first, while no engine's speed is known. The last tests of test_stack.py kill some.
    """
    with patient(), ExitStack() as left:
        yield started(left, Plan(engines=EngineOptions(count=4, blocks=BLOCKS)))


@pytest.fixture
def stream() -> Iterator[Callable[..., Stream]]:
    """Starts client processes, each of which reads one long streamed answer; kills those that are left."""
    opened: list[Stream] = []

    def start(url: str, prompt: str = "Tell me a long story.", max_tokens: int = 2_000) -> Stream:
        opened.append(Stream.open(url, prompt, max_tokens))
        return opened[-1]

    yield start
    for client in opened:
        client.kill()


def load(stack: Stack) -> int:
    """The sum of all tokens and requests that are booked in the fleet; -1 while no replica answers."""
    workers = stack.workers()
    parts = ("prefill_tokens", "decode_tokens", "in_flight")
    return sum(worker["load"][part] for worker in workers for part in parts) if workers else -1


def stages(stack: Stack) -> list[int]:
    """How far each reservation of the fleet has come: ``Stage``."""
    with redis.Redis.from_url(stack.redis_url) as store:
        return [Lease.unpack(lease).stage for key in store.keys("wf:*:lease") for lease in store.hvals(key)]


def left_of_requests(stack: Stack) -> list[str]:
    """The keys in Redis that exist only while requests run: leases, the blocks they will make, their chains."""
    with redis.Redis.from_url(stack.redis_url) as store:
        kinds = {key: key.partition(b"}:")[2].partition(b":")[0] for key in store.scan_iter("wf:*", count=1_000)}
    return sorted(repr(key) for key, kind in kinds.items() if kind in (b"lease", b"leases", b"x", b"c"))


def wait_for_no_load(stack: Stack, seconds: float = 15.0) -> None:
    until(lambda: load(stack) == 0, "no load left in the fleet", seconds)


def chat(url: str, messages: list[dict[str, str]], model: str = "demo") -> httpx.Response:
    """Ask for a chat answer of 8 tokens, not streamed; fails unless the status is 200."""
    body = {"model": model, "messages": messages, "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def engine_of(stack: Stack, worker_id: str) -> Member:
    """The engine that runs this worker."""
    [url] = [worker["url"] for worker in stack.workers() if worker["worker_id"] == worker_id]
    [engine] = [engine for engine in stack.engines if engine.url == url]
    return engine
