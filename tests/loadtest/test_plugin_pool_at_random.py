"""The order of eviction in the simulated engine, while sessions of random agents end, pause, fork and come back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.simulator.plugin_pool import PluginPool
from warmfleet_loadtest.simulator.scheduler import Limits, Request
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_worker.protocol import wire

BLOCK, BLOCKS, WORDS = 16, 120, 50_000
LIMITS = Limits(max_model_len=(BLOCKS - 1) * BLOCK, max_requests=4, step_tokens=512)
COSTS = StepCosts(base_s=0.0, prefill_token_s=0.001)
SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), BLOCK)


@dataclass(eq=False)
class Session:
    """An agent. gone: a router has said that its blocks may go. last: its latest finished request."""

    text: list[int]
    busy: bool = False
    gone: bool = False
    forked: bool = False
    last: Request | None = None


@dataclass
class Agents:
    """Sessions at one engine, which checks itself after every step."""

    rng: random.Random
    target: str
    sessions: list[Session] = field(default_factory=list)
    running: dict[Request, Session] = field(default_factory=dict)
    parent: dict[bytes, bytes | None] = field(default_factory=dict)
    made: int = 0
    now: float = 0.0
    given: int = 0

    def __post_init__(self) -> None:
        config = EngineConfig(SCHEME, LIMITS, BLOCKS, COSTS, ttft_target=self.target)
        self.engine = config.scheduler(clock=lambda: self.now)
        pool = self.engine.pool
        assert isinstance(pool, PluginPool)
        self.pool = pool
        self.systems = [self.words(blocks * BLOCK + 5) for blocks in (0, 4, 12)]
        self._watch()

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(WORDS) for _ in range(count)]

    def _watch(self) -> None:
        """Compare each allocation with plain LRU: as many blocks lose their content, the others keep their order."""
        pool, allocate = self.pool, self.pool.allocate

        def watched(count: int) -> list[int]:
            before, hashes = list(pool._free), list(pool._hash_of)
            given = pool.eviction.given_up
            taken = allocate(count)
            assert list(pool._free) == [block for block in before if block not in taken]
            lost = {block for block in taken if hashes[block] is not None}
            assert len(lost) == sum(hashes[block] is not None for block in before[:count])
            given = pool.eviction.given_up - given
            self.given += given
            if not self.target:
                first = {block for block in taken[:given] if hashes[block] is not None}
                self._nobody_misses({hash_of for block in first if (hash_of := hashes[block]) is not None})
            return taken

        pool.allocate = watched  # type: ignore[method-assign]

    def _nobody_misses(self, given: set[bytes]) -> None:
        for session in self.sessions:
            if session.last is not None and not (session.gone or session.busy or session.forked):
                assert given.isdisjoint(session.last.hashes), "a session in its place has lost a block"

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.6 and len(self.running) < 6:
            self._ask(self._session())
        elif chance < 0.7 and self.sessions:
            self._pause(self.rng.choice(self.sessions))
        elif chance < 0.73 and self.running:
            request = self.rng.choice(list(self.running))
            self._note(request)
            self.engine.abort(request)
            self.sessions.remove(self.running.pop(request))
        step = self.engine.schedule()
        if step is not None:
            for output in self.engine.complete(step):
                self._note(output.request)
                if output.finished:
                    self._finish(output.request)
        for request in (*self.running, *self.engine.running):
            self._note(request)
        self.now += 1.0

    def _session(self) -> Session:
        idle = [session for session in self.sessions if not session.busy]
        chance = self.rng.random()
        if idle and chance < 0.6:
            return self.rng.choice(idle)
        if idle and chance < 0.7:
            other = self.rng.choice(idle)
            other.forked = True
            session = Session(other.text[: self.rng.randrange(len(other.text) + 1)])
        else:
            session = Session(list(self.rng.choice(self.systems)))
        self.sessions.append(session)
        return session

    def _ask(self, session: Session) -> None:
        prompt = session.text + self.words(self.rng.randrange(2 * BLOCK, 120))
        if len(prompt) + 80 > LIMITS.max_model_len:
            self.sessions.remove(session)
            return
        ends = self.rng.random() < 0.1
        self.made += 1
        answer = self.words(self.rng.randrange(1, 80))
        name = f"cmpl-wf-{self.made:022}.{wire.ENDED_MARK if ends else ''}x-0"
        request = Request(name, prompt, len(answer), answer)
        self.engine.add(request)
        session.busy, session.gone, session.forked = True, ends, False
        self.running[request] = session

    def _pause(self, session: Session) -> None:
        if session.last is not None:
            session.gone = session.gone or not session.busy
            self.pool.eviction.yield_sessions([wire.first_child(session.last.request_id)])

    def _finish(self, request: Request) -> None:
        session = self.running.pop(request)
        answer = list(request.answer)
        if self.rng.random() < 0.5:  # the template repeats the answer in another form
            answer = answer[: self.rng.randrange(len(answer) + 1)] + self.words(self.rng.randrange(30))
        session.text, session.busy, session.last = [*request.prompt, *answer], False, request
        if session.gone:
            self.sessions.remove(session)

    def _note(self, request: Request) -> None:
        before: bytes | None = None
        for block_hash in request.hashes:
            self.parent[block_hash] = before
            before = block_hash

    def check(self) -> None:
        """Every block is used or free, and with plain LRU no block is held without those before it."""
        pool: Any = self.pool
        assert all((block in pool._free) == (pool._references[block] == 0) for block in range(1, BLOCKS))
        if not self.target:
            assert all((before := self.parent[held]) is None or pool.holds(before) for held in pool.held())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("target", ["", "0.2"])
def test_only_what_nobody_needs_goes_first(target: str, seed: int) -> None:
    agents = Agents(random.Random(seed), target)
    for _ in range(300):
        agents.act()
        agents.check()
    assert agents.given > 20
