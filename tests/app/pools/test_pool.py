"""A replica's models: when it is ready for requests, and how prompts are identified."""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone
from tests.support.fleet.transfers import DECODE, PREFILL

from warmfleet.errors import ModelNotFound
from warmfleet.fleet import Decision, Flag, LoadRow, Question, WorkerState, WorkerView
from warmfleet.metrics import Metrics
from warmfleet.pools import served_models
from warmfleet.pools.capabilities import TokenCapability
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import View, view_of
from warmfleet.pools.identified_prompt import identify_here
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools, ServedModel
from warmfleet.pools.served_names import ServedNames
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prefix_trie import Prompt
from warmfleet.prompt.request import parse
from warmfleet.routing.decider import Decider
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.tracing.request_record import TryRecord

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet
    from warmfleet.prompt.prompt_identity import Identity
    from warmfleet.prompt.request import Request
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Job
    from warmfleet_worker.protocol.transfer import Transfer


def worker(routable: bool) -> WorkerView:
    return WorkerView("a.0", {}, {"url": "http://a"}, LoadRow(), 0.0, state(routable), "proven", "http://a", ["m"])


def state(routable: bool) -> WorkerState:
    return WorkerState.PROVEN if routable else WorkerState.PENDING


def pools() -> Pools:
    return Pools([Pool("m", cast("Fleet", ConstantsAlone()), DegradedMode(1.0))])


def serving(name: str, loras: object, *, routable: bool = True) -> WorkerView:
    server = {"facts": {"loras": loras}}
    return WorkerView(name, {}, server, LoadRow(), 0.0, state(routable), "proven", f"http://{name}", ["m"])


def test_an_adapter_belongs_to_the_workers_that_serve_it() -> None:
    workers = [serving("a", {"one": "/x", "two": "/y"}), serving("b", {"one": "/x"}), serving("c", {"one": "/z"})]
    names = ServedNames(workers)
    assert (names.paths, names.differ) == ({"one": "/x", "two": "/y"}, True)
    assert (names.lacking("one"), names.lacking("two")) == (("c",), ("b", "c"))
    assert names.lacking("m") == names.lacking("nobody's") == ()
    stock = WorkerState.APPROXIMATE
    other = WorkerView("d", {}, None, LoadRow(), 0.0, stock, "approximate", "http://d", ["m", "two"])  # announces "two"
    assert ServedNames([*workers, other]).lacking("two") == ("b", "c")
    alike = ServedNames([serving("a", None), serving("b", {"m": "/base"}), worker(True)])
    assert (alike.paths, alike.differ) == ({}, False)


def test_adapters_are_listed_while_a_worker_serves_them() -> None:
    away = replace(serving("b", {"two": "/y"}), state=WorkerState.SILENT, load=LoadRow(flags=Flag.URL))
    fake = serving("c", {"three": "/z"}, routable=False)
    view = view_of([serving("a", {"one": "/x"}), away, fake], None, (), text=False)
    assert view.names.routable == ("m", "one")
    assert view.names.counts == {"m": 2, "one": 1, "two": 1}, "while it is away a request for it is 503, not 404"
    assert set(view.names.paths) == {"one", "two"}, "a worker that proved nothing adds no name"


async def test_a_name_goes_to_the_model_of_the_operator_and_then_to_most_workers() -> None:
    tags = ("m", "other", "empty")
    first, second, empty = (Pool(tag, cast("Fleet", ConstantsAlone()), DegradedMode(1.0)) for tag in tags)
    both = Pools([first, second, empty])
    liar = replace(serving("liar", {}), models=["m", "other", "alias", "empty"])
    empty.show(view_of([], None, (), text=False))
    first.show(view_of([liar, serving("a", {})], None, (), text=False))
    second.show(view_of([replace(serving(name, {}), models=["other", "alias"]) for name in "bc"], None, (), text=False))
    assert await both.find("other") is second
    assert await both.find("empty") is empty, "though it has no worker"
    assert await both.find("alias") is second
    second.show(view_of([], None, (), text=False))
    assert await both.find("other") is second
    first.show(view_of([serving("a", {})], None, (), text=False))
    assert await both.find("alias") is second, "a restart takes no name away"
    with pytest.raises(ModelNotFound):
        await both.find("nobody")


def test_ready_with_a_worker_and_its_tokenizer_and_for_good() -> None:
    fleet, now = pools(), time.monotonic()
    (only,) = fleet.all
    assert fleet.unready() == "no contact with Redis yet"
    only.show(View((worker(False),), read_at=now))
    assert "no worker is routable" in fleet.unready()
    only.show(View((worker(True),), read_at=now))
    assert "tokenizer" in fleet.unready(), "it would route by load"
    only.show(View((worker(True),), identity=cast("Identity", object()), read_at=now))
    assert fleet.unready() == ""
    only.show(View((), read_at=now))
    assert fleet.unready() == "", "what the fleet lacks another replica lacks, too"


def test_ready_after_a_ttl_even_if_the_fleet_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "WORKER_TTL_SECONDS", 0.02)
    fleet = pools()
    fleet.all[0].show(View((), read_at=time.monotonic()))
    assert fleet.unready()
    time.sleep(0.03)
    assert fleet.unready() == ""


def test_pools_that_leave_or_drain_keep_no_replica_waiting() -> None:
    fleet, now = pools(), time.monotonic()
    taking, drained = (Pool(tag, fleet.all[0].fleet, DegradedMode(1.0)) for tag in ("m#1", "m#2"))
    fleet.change(ServedModel("m", [taking, drained], frozenset(["m#2"])))
    taking.show(View((), read_at=now))
    assert fleet.unready() == "no worker is routable yet, or its tokenizer is not loaded: m#1"
    taking.show(View((worker(True),), text=True, read_at=now))
    assert fleet.unready() == ""

    alone, last = pools(), pools().all[0]
    alone.change(ServedModel("m", [last], frozenset(["m"])))
    last.show(View((), read_at=now))
    assert alone.unready(), "a drained pool serves while there is no other"
    last.show(View((worker(True),), text=True, read_at=now))
    assert alone.unready() == ""


def test_a_pool_that_has_no_worker_yet_keeps_no_replica_waiting() -> None:
    """Every replica lacks the workers of a new pool. An unread pool may have workers, so the replica waits for it."""
    fleet, now = pools(), time.monotonic()
    serving, added = (Pool(tag, fleet.all[0].fleet, DegradedMode(1.0)) for tag in ("m#1", "m#2"))
    fleet.change(ServedModel("m", [serving, added]))
    serving.show(View((worker(True),), text=True, read_at=now))
    assert fleet.unready().endswith(": m#2"), "not read yet"
    added.show(View((worker(False),), read_at=now))
    assert fleet.unready().endswith(": m#2"), "its worker may be routable soon"
    added.show(View((), read_at=now))
    assert fleet.unready() == ""

    nothing = Pools([Pool(tag, fleet.all[0].fleet, DegradedMode(1.0)) for tag in ("m#1", "m#2")])
    for pool in nothing.all:
        pool.show(View((), read_at=now))
    assert nothing.unready().endswith(": m#1, m#2"), "no pool can serve: Redis may have come back empty"


def test_decisions_know_roles_only_while_some_pair_can_split_requests(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(ConstantsAlone):
        uses = 0

        def use(self, **changes: Any) -> None:
            self.uses += 1
            super().use(**changes)

    def engine(name: str, slot: int, transfer: Transfer | None) -> WorkerView:
        record, row = {"transfer": transfer}, LoadRow(slot=slot)
        return WorkerView(f"{name}.0", record, None, row, 0.0, WorkerState.PROVEN, "proven", f"http://{name}", ["m"])

    store = Counting()
    pool = Pool("m", cast("Fleet", store), DegradedMode(1.0))
    able = {name: TokenCapability("k", frozenset({"chat"}), 4_096) for name in ("p.0", "d.0")}
    plain, prefill, decode = engine("x", 3, None), engine("p", 1, PREFILL), engine("d", 2, DECODE)
    for _ in range(3):
        pool.show(view_of([plain], None, (), text=False))
    assert (store.uses, pool.view.pairing, pool.view.splits) == (0, None, None)
    for _ in range(3):
        pool.show(view_of([plain, prefill, decode], None, (), text=False, handoff=able))
    assert (store.uses, dict(store.constants.roles)) == (1, {1: (1, 0, False), 2: (0, 1, True)})
    assert pool.view.splits is not None
    pool.show(view_of([engine("p", 9, PREFILL), decode], None, (), text=False, handoff=able))
    assert set(store.constants.roles) == {9, 2}, "after a resync"
    for _ in range(3):
        pool.show(view_of([plain, decode], None, (), text=False, handoff=able))
    assert (store.uses, dict(store.constants.roles)) == (3, {})
    assert pool.view.pairing is not None
    pool.show(view_of([prefill, decode], None, (), text=False, handoff=able, may_split=False))
    assert store.uses == 3
    assert caplog.text.count("cannot be split") == 1


def test_every_model_counts() -> None:
    fleet = Pools([*pools().all, *pools().all])
    for pool in fleet.all:
        assert fleet.unready()
        pool.show(View((worker(True),), text=True, read_at=time.monotonic()))
    assert fleet.unready() == ""


@pytest.mark.parametrize("failing", ["prompts", "beginning"])
async def test_a_mistake_of_ours_costs_a_log_line(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        max_model_len, key = 4_096, ""

        async def prompts(self, *_: object) -> list[Prompt]:
            raise KeyError("secret") if failing == "prompts" else NotReproducible("parts")

        async def beginning(self, *_: object) -> None:
            raise RecursionError("secret")

    (only,) = pools().all
    only.show(View((worker(True),), cast("Identity", Broken()), (), text=False, read_at=time.monotonic()))
    request = parse("chat", b'{"messages": [{"role": "user", "content": "four characters a token"}]}')
    prompt = await identify_here(request, only)
    assert (prompt.kind, prompt.reason, prompt.prompt_tokens, prompt.chains) == ("load", "error", 5, ())
    assert "a prompt is not known" in caplog.text
    assert "secret" not in caplog.text


async def test_workers_that_cannot_serve_are_those_of_the_newest_reading() -> None:
    """While identifying waits for a thread, a worker without the adapter may join."""
    (only,) = pools().all

    class Slow:
        max_model_len, key = 4_096, ""

        async def prompts(self, *_: object) -> list[Prompt]:
            only.show(view_of([serving("a", {"one": "/x"}), serving("b", {})], known, (), text=False))
            raise NotReproducible("template")

    known = cast("Identity", Slow())
    only.show(view_of([serving("a", {"one": "/x"})], known, (), text=False))
    prompt = await identify_here(
        parse("chat", b'{"model": "one", "messages": [{"role": "user", "content": "x"}]}'), only
    )
    assert prompt.unable_workers == ("b",)


async def test_a_text_block_is_worth_no_more_than_it_holds() -> None:
    """64 bytes of Chinese may be more or fewer than 16 tokens; known token ids limit their count."""

    class Known:
        def __init__(self) -> None:
            self.loras: dict[str, str] = {}
            self.max_model_len, self.key = 4_096, ""
            self.ids = [0]

        async def prompts(self, _request: Request, *_: object) -> list[Prompt]:
            return [Prompt((array("I", self.ids),), len(self.ids), ())]

    known = Known()
    (only,) = pools().all
    only.show(View((worker(True),), cast("Identity", known), (), text=True, read_at=time.monotonic()))
    for count, text in (100, "中" * 1_000), (1_000, "中" * 1_000), (5, "x" * 1_000):
        known.ids = list(range(count))
        prompt = await identify_here(parse("completions", json.dumps({"prompt": text}).encode()), only)
        (chain,) = prompt.chains
        held = len(chain.hashes) // 8 * chain.block_tokens
        assert held <= max(count, len(chain.hashes) // 8)
        assert (count, chain.block_tokens) in {(100, 2), (1_000, 16), (5, 1)}


async def test_a_prompt_counts_as_a_use_of_its_prefix_when_it_is_decided_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probes and requests to /explain make no prefix popular."""
    (only,) = pools().all
    noted: list[Prompt] = []
    monkeypatch.setattr(only.uses, "note", lambda prompt, _: noted.append(prompt))

    class Known:
        loras: ClassVar[dict[str, str]] = {}
        max_model_len, key = 4_096, "k"

        async def prompts(self, *_: object) -> list[Prompt]:
            return [Prompt((array("I", [1, 2]),), 2, ())]

    only.show(View((worker(True),), cast("Identity", Known()), (), read_at=time.monotonic()))
    prompt = await identify_here(parse("completions", b'{"prompt": "x"}'), only)
    assert noted == []
    metrics = Metrics()
    decider = Decider(DecisionLog("", metrics), metrics)
    call = SimpleNamespace(record=SimpleNamespace(request_id="r"), path=SimpleNamespace(name="completions"))
    booking = SimpleNamespace(pool=only, prompt=prompt, log_line=None, asked_at=0.0)
    booking.question = Question("wf-0", (), 2, 3)
    attempt = cast("Attempt", SimpleNamespace(chosen=booking, record=TryRecord()))
    decision = Decision("wf-0", "booked", "w.0", "w", "http://w", 0, 2, False, False, 0.1, 0, False, 2, 3)
    decider.keep(cast("Job", SimpleNamespace(call=call)), attempt, decision)
    assert noted == [prompt.prompts[0]]
