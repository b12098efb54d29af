"""apply_server, through the public door: XADD, then Upkeep.apply_server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_server import MANIFEST, ReportingServer
from tests.support.fleet.reporting_worker import SHA, ReportingWorker

from warmfleet.fleet import Flag, Fleet, Proof, Question
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
async def server(store: aioredis.Redis, fleet: Fleet) -> ReportingServer:
    return ReportingServer(store, fleet)


@pytest.fixture
async def reporter(store: aioredis.Redis, fleet: Fleet) -> ReportingWorker:
    """A worker of that server, proved and reachable."""
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await reporter.applied()
    await fleet.probes.prove("s.0", "n1", Proof("proven", ""))
    return reporter


async def test_join_keeps_what_the_server_said_and_brings_its_workers_up(
    server: ReportingServer, reporter: ReportingWorker
) -> None:
    await server.join()
    await server.applied()
    assert await server.record() == {"nonce": "m1"} | server.announcement()
    assert abs(cast("float", await server.alive_ms()) - time.time() * 1000) < 10_000
    assert (await reporter.row()).flags & Flag.SERVER
    assert await server.store.xlen(server.stream) == 0


async def test_a_new_nonce_has_proved_nothing(server: ReportingServer, reporter: ReportingWorker, fleet: Fleet) -> None:
    await server.join()
    await server.applied()
    await fleet.probes.prove("s.0", "n1", Proof("proven", ""))
    assert (await reporter.row()).flags == Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
    await server.join("m1", url="http://elsewhere:1")
    await server.applied()
    assert (await server.record())["url"] == "http://10.0.0.7:8000", "a repeated join changes nothing"
    assert (await reporter.row()).flags & Flag.PROVEN
    await server.join("m2", url="http://elsewhere:1")
    await server.applied()
    assert (await server.record())["url"] == "http://elsewhere:1"
    assert (await reporter.row()).flags == Flag.SERVER | Flag.CLOSED
    assert (await reporter.record())["proof"] == "pending"


@pytest.mark.parametrize(
    ("models", "adapters", "misnamed"),
    [
        (["{pool}"], {}, False),
        (["other", "{pool}"], {}, False),
        (["/{pool}/"], {}, False),
        (["other"], {"{pool}": "/tuned"}, False),
        (["other"], {}, True),
        (["other"], {"tuned": "/{pool}"}, True),
        (["{pool}x"], {}, True),
    ],
)
async def test_a_process_that_tells_other_names_has_proved_what_it_proved(
    server: ReportingServer,
    reporter: ReportingWorker,
    fleet: Fleet,
    models: list[str],
    adapters: dict[str, str],
    misnamed: bool,
) -> None:
    pool = fleet.keys.tag.replace("~", "/")
    await server.join()
    await server.applied()
    await fleet.probes.prove("s.0", "n1", Proof("proven", ""))
    proven = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
    loras = {name.format(pool=pool): path.format(pool=pool) for name, path in adapters.items()}
    told = {"models": [name.format(pool=pool) for name in models], "facts": {"loras": loras}}
    await server.join("m1", **told)
    await server.applied()
    assert (await reporter.row()).flags == proven | (Flag.MISNAMED if misnamed else 0)
    assert (await server.record())["models"] == told["models"]
    assert (await fleet.index.counts())["announced"] == 2, "readers are told of the change"
    await reporter.join("n2")  # a new incarnation of the core takes its server's state
    await reporter.applied()
    assert bool((await reporter.row()).flags & Flag.MISNAMED) is misnamed
    await server.join("m1")
    await server.join("m1")
    await server.applied()
    assert not (await reporter.row()).flags & Flag.MISNAMED
    assert (await fleet.index.counts())["announced"] == 3, "a repeated join changes nothing"


async def test_a_process_whose_join_was_lost_finds_no_stream(
    server: ReportingServer, reporter: ReportingWorker, fleet: Fleet
) -> None:
    """A failover, or MAXLEN while no router ran, has taken the join; the predecessor's stream and record are there."""
    await server.join()
    await server.applied()
    server.nonce = "m2"
    await server.send("heartbeat")
    await server.applied()
    assert await server.store.exists(server.stream), "its predecessor still lives: the later join counts, not this"
    await server.store.zadd(fleet.keys.alive_servers, {"s": time.time() * 1000 - 20_000})
    await server.send("heartbeat")
    await server.applied()
    assert not await server.store.exists(server.stream)
    await server.join("m2")
    await server.applied()
    assert (await server.record())["nonce"] == "m2"
    assert (await reporter.row()).flags & Flag.SERVER


async def test_a_join_changes_only_its_own_workers(
    server: ReportingServer, store: aioredis.Redis, fleet: Fleet
) -> None:
    others = [
        ReportingWorker(store, fleet, "s", 1),
        ReportingWorker(store, fleet, "s.0", 0),
        ReportingWorker(store, fleet, "t", 0),
    ]
    for other in others:
        await other.join()
        await other.applied()
    await server.join()
    await server.applied()
    assert [bool((await other.row()).flags & Flag.SERVER) for other in others] == [True, False, False]


async def test_heartbeat_and_leave(server: ReportingServer, reporter: ReportingWorker) -> None:
    then = int(time.time() * 1000) - 60_000
    await server.send("join", wire.dumps(server.announcement()), at=f"{then}-0")
    await server.send("heartbeat", at=f"{then + 1}-0")
    await server.applied()
    assert await server.alive_ms() == then + 1
    assert not (await reporter.row()).flags & Flag.SERVER, "it was last heard of a minute ago"
    await server.send("heartbeat")
    await server.applied()
    assert (await reporter.row()).flags & Flag.SERVER
    await server.send("leave")
    await server.applied()
    assert await server.alive_ms() is None
    assert not (await reporter.row()).flags & Flag.SERVER
    assert (await server.record())["nonce"] == "m1"


async def test_a_heartbeat_from_the_future_was_seen_now(server: ReportingServer) -> None:
    await server.join()
    await server.send("heartbeat", at=f"{int(time.time() * 1000) + 600_000}-0")
    await server.applied()
    assert cast("float", await server.alive_ms()) < time.time() * 1000 + 10_000


async def test_another_nonce_is_dropped_and_counted(server: ReportingServer, fleet: Fleet) -> None:
    await server.join()
    server.nonce = "old"
    await server.send("leave")
    await server.applied()
    assert await server.alive_ms()
    assert await fleet.index.counts() == {"announced": 1, "nonce": 1}


async def test_pieces_that_a_new_manifest_does_not_name_are_deleted(
    server: ReportingServer, store: aioredis.Redis
) -> None:
    for sha256 in MANIFEST["tokenizer.json"]["chunks"]:  # type: ignore[attr-defined]
        await store.set(server.keys.artifact("s", sha256), b"x")
    await server.join()
    await server.applied()
    await server.join("m2", artifacts={"t": {"sha256": SHA, "bytes": 5, "chunks": [SHA]}})
    await server.applied()
    assert await store.exists(server.keys.artifact("s", SHA))
    assert not await store.exists(server.keys.artifact("s", "cd" * 32))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"server_id": "t"},
        {"nonce": "m2"},
        {"url": "ftp://x"},
        {"url": 'http://x"y'},
        {"url": "http://x y"},
        {"url": "http://" + "x" * 600},
        {"url": "http://x\\y"},
        {"url": "http://x\x00y"},
        {"url": None},
        {"models": []},
        {"models": "base"},
        {"models": [1]},
        {"models": ["m"] * 257},
        {"facts": 1},
        {"facts": [1]},
        {"facts": None},
        {"artifacts": 1},
        {"artifacts": {"../x": MANIFEST["tokenizer.json"]}},
        {"artifacts": [MANIFEST["tokenizer.json"]]},
        {"artifacts": {"t": {"sha256": SHA, "bytes": 5}}},
        {"artifacts": {"t": {"sha256": SHA, "bytes": -5, "chunks": [SHA]}}},
        {"artifacts": {"t": {"sha256": SHA, "bytes": 0.5, "chunks": [SHA]}}},
        {"artifacts": {"t": {"sha256": SHA, "bytes": 5, "chunks": {"1": SHA}}}},
        {"artifacts": {"t": {"sha256": SHA, "bytes": 5, "chunks": ["*"]}}},
        {"artifacts": {"t": {"sha256": SHA, "bytes": 5, "chunks": [SHA] * 2049}}},
        {"artifacts": {str(n): MANIFEST["tokenizer.json"] for n in range(9)}},
        {"version": 1},
        {"facts": {"long": "x" * 262_144}},
    ],
    ids=lambda change: str(change)[:60],
)
async def test_a_malformed_join_joins_nobody(server: ReportingServer, fleet: Fleet, change: dict[str, Any]) -> None:
    await server.send("join", wire.dumps(server.announcement(**change)))
    await server.applied()
    assert await server.record() == {}
    assert await fleet.index.counts() == {"malformed": 1}
    assert not await server.store.exists(server.stream)


@pytest.mark.parametrize(
    "value",
    [
        *("0x10", "01", "NaN", "nan", "Infinity", "1.", "+1", "1e5", '"\xe9"', "'a'", "[" * 600 + "]" * 600),
        *("9" * 5_000, "-" + "9" * 24, "0." + "1" * 23, '"\\ud800"'),
    ],
    ids=lambda value: value[:9],
)
async def test_what_parsers_disagree_on_is_refused(server: ReportingServer, fleet: Fleet, value: str) -> None:
    text = wire.dumps(server.announcement(facts={"it": "here"})).replace('"here"', value)
    await server.send("join", text)
    await server.applied()
    assert await server.record() == {}
    assert await fleet.index.counts() == {"malformed": 1}


async def test_a_decision_names_the_url_that_was_proved(
    server: ReportingServer, reporter: ReportingWorker, fleet: Fleet
) -> None:
    """The URL is not the first one in the text of the join: facts with another URL come before it."""
    await server.join(facts={"url": "http://10.9.9.9:1", "float": -0.00012345678901234567})
    await server.applied()
    await fleet.probes.prove("s.0", "n1", Proof("proven", ""))
    (worker,) = await fleet.workers.read()
    decision = await fleet.bookings.decide(Question("wf-url", (), prompt_tokens=5, decode_tokens=6))
    assert decision.url == worker.url == "http://10.0.0.7:8000"


async def test_junk_is_counted_and_skipped(server: ReportingServer, fleet: Fleet) -> None:
    await server.join()
    await server.store.xadd(server.stream, {"x": "1"})
    await server.send("stored", b"12345678")
    for _ in range(40):
        await server.send("heartbeat")
    first = await fleet.upkeep.apply_server("s")
    assert (first.entries, first.more) == (16, True)
    await server.applied()
    assert await fleet.index.counts() == {"announced": 1, "malformed": 2}
    assert await server.store.xlen(server.stream) == 0


async def test_a_stream_that_breaks_the_rules_is_deleted(
    server: ReportingServer, reporter: ReportingWorker, fleet: Fleet
) -> None:
    await server.join()
    await server.send("heartbeat", at="18446744073709551615-1")
    await server.applied()
    assert not await server.store.exists(server.stream)
    assert not (await reporter.row()).flags & Flag.SERVER
    await server.store.set(server.stream, "no stream")
    await server.applied()
    assert not await server.store.exists(server.stream)
    assert (await fleet.index.counts())["hostile"] == 2
    await server.join("m2")
    await server.applied()
    assert (await reporter.row()).flags & Flag.SERVER


async def test_a_goodbye_of_either_half_is_noted_until_one_joins(
    server: ReportingServer, reporter: ReportingWorker
) -> None:
    async def left() -> bool:
        return bool((await reporter.record()).get("left"))

    await server.join()
    await server.applied()
    assert not await left()
    await server.send("leave")
    await server.applied()
    assert await left()
    assert not (await reporter.row()).flags & Flag.SERVER
    await server.join()  # the same process: it had moved to another pool and is back
    await server.applied()
    assert not await left()
    await reporter.send("leave")
    await reporter.applied()
    assert await left()
    await server.join("m2")
    await server.applied()
    assert not await left(), "the engine starts again"
    await server.send("leave")
    await server.join("m3")
    await server.applied()
    assert not await left(), "the last of a page counts"
