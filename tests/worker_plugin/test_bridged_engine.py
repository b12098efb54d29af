"""An engine behind the bridge, without threads: its state after its answers and its events."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import zmq
from tests.worker_plugin.test_bridge_table import stored

from warmfleet_worker.bridge import bridged_engine
from warmfleet_worker.bridge.block_table import scheme_of
from warmfleet_worker.bridge.bridged_engine import BYTES_PER_TOKEN, BridgedEngine
from warmfleet_worker.bridge.engine_api import EngineApi, EngineDown, EngineFacts, EventSource, Loads, Reading
from warmfleet_worker.bridge.group_ends import Group
from warmfleet_worker.bridge.options import EngineOptions
from warmfleet_worker.bridge.tokenizer_files import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTS = EngineFacts("sglang", "sglang-0.5.23", ("m",), "m", {}, 8_192, page_tokens=1, capacity_blocks=40_000)
UNRESOLVED = EngineDown("no address is found for gpu1", unresolved=True)


@pytest.fixture
def engine() -> Iterator[BridgedEngine]:
    """An engine that is not started and has no tokenizer. It leaves no socket open."""
    context = zmq.Context[zmq.Socket[bytes]]()
    yield BridgedEngine(EngineOptions("http://gpu1:8000"), "redis://store:6379", context, lambda *_: ({}, {}))
    left_open = [socket for socket in context._sockets if not socket.closed]
    context.destroy(linger=0)
    assert not left_open


def joined(engine: BridgedEngine) -> list[bool]:
    """The engine as if it had joined, and a list of the ``leave`` arguments of its ranks' ``stop``."""
    told: list[bool] = []
    rank = SimpleNamespace(
        stop=lambda leave: told.append(leave),
        stopped=None,
        table=SimpleNamespace(groups_told={}, lookahead=0, tiers_told=dict[str, bool](), scheme=scheme_of(1)),
    )
    engine.ranks, engine._models = [cast("Any", rank)], FACTS.models
    return told


def test_a_cache_of_small_pages_is_known_whole(engine: BridgedEngine) -> None:
    rank = engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0)
    assert rank.config.capacity_blocks == 2_500
    pages = list(range(32_000))
    rank.batch(stored(pages, None, pages, block_size=1))
    assert (rank.counts.blocks, rank.counts.complete) == (2_000, True)


def test_a_table_that_overflows_is_not_complete(engine: BridgedEngine) -> None:
    rank = engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0)
    pages = list(range(90_000))
    rank.batch(stored(pages, None, [0] * 90_000, block_size=1))
    assert (rank.counts.blocks, rank.counts.complete) == (0, False)


def test_a_name_that_is_not_resolved_is_no_engine_that_is_gone(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unresolved name ends the server's heartbeats, so that replicas check the engine themselves."""

    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(EngineDown) as down:
        EngineApi("http://gpu1:8000").healthy()
    told, silent = joined(engine), engine._server_config(FACTS, 1).silent
    for _ in range(9):
        assert not told
        engine._failed(down.value)
    assert not told
    assert silent()
    monkeypatch.setattr(
        engine, "api", SimpleNamespace(healthy=lambda: None, reading=Reading, names=lambda: (FACTS.models, {}))
    )
    engine._check()
    assert not silent()
    assert engine.state == "reported"


def test_nothing_that_listens_is_an_engine_that_is_gone(engine: BridgedEngine) -> None:
    told = joined(engine)
    for _ in range(bridged_engine.REFUSALS):
        assert not told
        engine._failed(EngineDown("nothing answers", gone=True))
    assert told == [True]


def test_metrics_that_fail_are_no_engine_that_stands_still(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Reading:
        raise EngineDown("/metrics answered 500", status=500)

    joined(engine)
    monkeypatch.setattr(
        engine, "api", SimpleNamespace(healthy=lambda: None, reading=fails, names=lambda: (FACTS.models, {}))
    )
    engine._reading = Reading({0: 3}, {}, work=1_000)
    assert engine._load(0).steps == 1_000
    engine._check()
    assert (engine._load(0).running, engine._load(0).steps) == (3, None)


def test_an_engine_whose_hashes_look_ahead_joins_anew_and_says_so(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = SimpleNamespace(healthy=lambda: None, reading=Reading, names=lambda: (FACTS.models, {}))
    monkeypatch.setattr(engine, "api", api)
    joined(engine)
    engine.ranks[0].table.lookahead = 2
    engine._check()
    assert engine._restarted.is_set()
    scheme = engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0).config.scheme
    assert (scheme.extra_keys, scheme.lookahead) == ("lookahead_2", 2)


def test_an_engine_with_a_tier_joins_anew_with_it_and_tells_how_long_loads_take(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = [Reading(loads=Loads(host_tokens=8_192, load_s=0.1))]
    api = SimpleNamespace(healthy=lambda: None, reading=lambda: readings[-1], names=lambda: (FACTS.models, {}))
    monkeypatch.setattr(engine, "api", api)
    joined(engine)
    assert not engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0).config.sets
    engine.ranks[0].table.tiers_told["cpu"] = True
    engine._check()
    assert engine._restarted.is_set()
    told = engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0).config.sets["cpu"]
    assert told["loads_last"] == 1
    assert engine._ps_per_byte()["cpu"] * int(told["bytes_per_token"]) / 1e12 == pytest.approx(0.1 / 8_192, rel=0.01)
    engine._reading = Reading(loads=Loads(host_tokens=100, load_s=9))
    assert not engine._ps_per_byte(), "too few tokens"
    engine._tiers = {"cpu": True, "disk": True}
    engine._reading = Reading(loads=Loads(host_tokens=5_000, disk_tokens=5_000, load_s=0.1, read_s=0.2))
    seconds = {kind: ps * BYTES_PER_TOKEN / 1e12 for kind, ps in engine._ps_per_byte().items()}
    assert seconds == pytest.approx({"cpu": 1e-5, "disk": 1e-5 + 4e-5}, rel=0.01)


def test_a_tier_of_two_connectors_joins_anew_twice_at_most(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each join loses what is known of the cache, and a new table sees the events of one connector first."""
    api = SimpleNamespace(healthy=lambda: None, reading=Reading, names=lambda: (FACTS.models, {}))
    monkeypatch.setattr(engine, "api", api)
    joined(engine)
    other = SimpleNamespace(table=SimpleNamespace(**vars(engine.ranks[0].table)), stopped="")
    engine.ranks.append(cast("Any", other))
    joins = 0
    for told in ({"cpu": True}, {"cpu": False}, {}, {"cpu": True}, {"cpu": False}, {"cpu": True}):
        engine.ranks[0].table.tiers_told, other.table.tiers_told = told, {"cpu": True} if told else {}
        engine._read_due = 0.0
        engine._check()
        joins += engine._restarted.is_set()
        engine._restarted.clear()
    assert (joins, engine._tiers) == (2, {"cpu": False})


def test_an_engine_that_lists_other_names_joins_anew_and_its_adapters_are_told(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model may answer at its URL, though its process does not tell when it began."""
    listed: list[tuple[tuple[str, ...], dict[str, str]]] = [(FACTS.models, {}), (FACTS.models, {"tuned": "/t"})]
    listed.append((("other",), {}))
    api = SimpleNamespace(healthy=lambda: None, reading=Reading, names=lambda: listed.pop(0))
    monkeypatch.setattr(engine, "api", api)
    monkeypatch.setattr(bridged_engine, "READ_SECONDS", 0.0)
    joined(engine)
    for adapters in ({}, {"tuned": "/t"}):
        engine._check()
        assert (engine._adapters, engine._restarted.is_set()) == (adapters, False)
    engine._check()
    assert engine._restarted.is_set()


def test_a_hub_that_is_away_is_told_each_time_and_tried_again(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = [True, True, False]

    def load(name: str, _template: str) -> tuple[dict[str, bytes], dict[str, Any]]:
        if away.pop(0):
            raise TokenizerError(f"cannot load the tokenizer {name!r}: the hub cannot be reached", later=True)
        return {"tokenizer.json": b"{}"}, {}

    api = SimpleNamespace(healthy=lambda: None, reading=Reading, names=lambda: (FACTS.models, {}), facts=lambda: FACTS)
    monkeypatch.setattr(engine, "api", api)
    monkeypatch.setattr(engine, "_load_tokenizer", load)
    monkeypatch.setattr(bridged_engine, "TOKENIZER_SECONDS", 0.0)
    caplog.set_level("INFO", "warmfleet")
    joined(engine)
    assert engine._tokenizer(FACTS) == ({}, {})
    engine._check()
    assert not engine._restarted.is_set()
    engine._check()
    assert engine._restarted.is_set(), "it joins anew, with its tokenizer"
    assert engine._tokenizer_due == float("inf")
    said = [record.getMessage() for record in caplog.records]
    assert sum("loading the tokenizer m" in line for line in said) == 3
    assert sum("the hub cannot be reached" in line and "trying again in" in line for line in said) == 2
    assert sum("its tokenizer is there now" in line for line in said) == 1


def test_an_engine_that_sleeps_takes_no_requests(engine: BridgedEngine) -> None:
    engine._reading = Reading(asleep=frozenset({1}))
    assert [engine._load(rank).paused for rank in (0, 1)] == [False, True]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "tcp://no-port"])
def test_a_rank_that_ends_closes_its_sockets(engine: BridgedEngine, endpoint: str) -> None:
    """The fixture's end finds those that are open."""
    rank = engine._rank(FACTS, EventSource(endpoint), 0)
    rank.start()
    assert rank.caught_up.wait(10)
    rank.stop(leave=False)
    rank._thread.join(10)
    assert not rank.follows
    assert engine._restarted.is_set() is (endpoint == "tcp://no-port")


@pytest.mark.parametrize("stopping", [False, True])
def test_a_rank_whose_thread_dies(engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch, stopping: bool) -> None:
    """Nothing waits for the dead rank, and the engine joins anew unless it is being stopped."""
    rank = engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0)
    monkeypatch.setattr(rank, "_sequence", None)
    if stopping:
        rank.stop(leave=False)
    rank.start()
    assert rank.caught_up.wait(10)
    rank._thread.join(10)
    assert not rank.follows
    assert engine._restarted.is_set() is not stopping


def test_told_to_stop_while_it_reads_an_engine_it_joins_nothing(
    engine: BridgedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may take long to load; no thread would report a worker that joined after the stop."""
    started: list[str] = []
    monkeypatch.setattr(engine.api, "healthy", lambda: None)
    monkeypatch.setattr(engine, "_facts", lambda: FACTS)
    monkeypatch.setattr(engine, "_sources", lambda _facts: {})
    monkeypatch.setattr(engine, "_read", Reading)
    monkeypatch.setattr(engine, "_server_config", lambda *_: engine._stopping.set())
    publisher = SimpleNamespace(start=lambda: started.append("server"))
    monkeypatch.setattr(bridged_engine, "ServerPublisher", lambda _config: publisher)
    engine._join()
    assert not started
    assert engine._server is None


@pytest.mark.parametrize(
    ("group", "known"),
    [
        (Group("sliding_window", 128, 16), True),
        (Group("sliding_window", 0, 16), False),
        (Group("mamba", 0, 16), True),
        (Group("mamba", 0, 32), False),
        (Group("full_attention", 0, 16), True),
        (Group("chunked_local_attention", 0, 16), False),
        (Group("", 0, 16), False),
    ],
    ids=str,
)
def test_an_engine_with_other_groups_joins_anew_and_promises_what_all_support(
    engine: BridgedEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    group: Group,
    known: bool,
) -> None:
    api = SimpleNamespace(healthy=lambda: None, reading=Reading, names=lambda: (FACTS.models, {}))
    monkeypatch.setattr(engine, "api", api)
    joined(engine)
    engine.ranks[0].table.groups_told[1] = group
    engine.ranks[0].table.tiers_told["cpu"] = True
    engine._check()
    assert engine._restarted.is_set()
    assert ("no prefix is promised" in caplog.text) == (not known)
    rank = engine._rank(FACTS, EventSource("tcp://127.0.0.1:9"), 0)
    assert not rank.config.closed
    assert rank.config.sets == {"ends": {"promises_all": 0}}, "no tier: it has blocks of some groups only"
    ids = list(range(32))
    rank.batch(stored(ids, None, ids, block_size=1))
    assert (rank.counts.blocks, rank.table.ends is not None and len(rank.table.ends.table)) == (2, 0)
