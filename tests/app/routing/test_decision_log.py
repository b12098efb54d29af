"""Decisions are explained, logged and replayed; random decisions of all policies come out exactly as they were."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.fleet.keyspace import READY, Keyspace
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.__main__ import main
from warmfleet.api import client_hints as hints
from warmfleet.cli.replay import read
from warmfleet.errors import BadArgument, Unauthorized
from warmfleet.fleet import Decision, Flag, Fleet, Question, QueueLimits, Weights, connect
from warmfleet.fleet.replays import Choice, Replays
from warmfleet.metrics import Metrics
from warmfleet.routing.decision_log import DecisionLog, record
from warmfleet.settings import POLICIES, Settings

if TYPE_CHECKING:
    from pathlib import Path

    import redis.asyncio as aioredis

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
WORKERS = 6


@pytest.fixture
def keyspace(store: aioredis.Redis, fleet: Fleet) -> Keyspace:
    return Keyspace(store, fleet)


async def states(keyspace: Keyspace, rng: random.Random) -> None:
    """A fleet of unequal speed and load; some blocks are missing where a set is not prefix-closed."""
    for number in range(1, WORKERS + 1):
        await keyspace.worker(
            number,
            speed_tps=rng.choice((0, 900, 5_000, 20_000)),
            blocks=rng.randrange(10_000),
            evicted=rng.randrange(3),
            in_flight=rng.choice((0, rng.randrange(30), rng.randrange(200))),
            prefill_tokens=rng.choice((0, 0, rng.randrange(4_000))),
            decode_tokens=rng.randrange(50_000),
            # foreign prefill of less than a second takes no room
            foreign_prefill_tokens=rng.choice((0, rng.randrange(500), rng.randrange(14_000))),
            under_way_tokens=rng.randrange(3_000),
            since_ms=(int(time.time() * 1000) - rng.randrange(500)) % 2**32,
            flags=READY if rng.random() < 0.7 else READY & ~Flag.CLOSED,
        )


async def logged(keyspace: Keyspace, count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Records of random decisions, by each policy in turn."""
    rng, found = random.Random(seed), []
    await keyspace.ticked(median=7_001)
    chains = [keyspace.chain(60) for _ in range(3)]
    names = [f"w{number}.0" for number in range(1, WORKERS + 3)]
    for number in range(count):
        if number % 10 == 0:
            await states(keyspace, rng)
            slot = rng.randint(1, WORKERS)
            await keyspace.hold(slot, rng.choice(chains), rng.randint(1, 60))
            for hole in range(8, 60, 17):
                await keyspace.drop(slot, chains[0][hole * 8 : hole * 8 + 8])
        keyspace.fleet.use(
            weights=replace(
                keyspace.fleet.constants.weights,
                lambda_=rng.choice((1.0, 2.0, 1.7)),
                pressure_price=rng.choice((1.0, 0.3)),
                min_match_tokens=rng.choice((0, 0, 100)),
                decode_price=rng.choice((0.0, 0.1)),
                context_price=rng.choice((0.0, 0.05)),
            )
        )
        objective_s = rng.choice((0.0, 0.0, 0.2))
        head = rng.choice(chains)[: 8 * rng.randint(1, 60)]
        ask = keyspace.ask(
            keyspace.chain(70, head=head),
            extra_tokens=rng.randint(1, 16),
            policy=POLICIES[number % len(POLICIES)],
            prefix_tokens=rng.choice((0, 0, 128)),
            order=tuple(rng.sample(names, len(names))) if rng.random() < 0.5 else (),
            exclude=tuple(rng.sample(names, rng.choice((0, 0, 2)))),
            objective_s=objective_s,
        )
        decision = await decided(keyspace, ask, in_turn=number % 3 == 0 or ask.policy == "cost")
        rings = {"chwbl": rng.sample(names, len(names))}
        found.append(record("m", ask, keyspace.fleet.constants, decision, rings))
    return found


async def decided(keyspace: Keyspace, ask: Question, *, in_turn: bool) -> Decision:
    """in_turn: only workers with room are chosen, if such workers exist."""
    keyspace.fleet.use(limits=QueueLimits(0.001))
    answer = await keyspace.fleet.queue.decide_in_turn(replace(ask, may_wait=False), explain=True) if in_turn else None
    return answer if isinstance(answer, Decision) else await keyspace.fleet.bookings.decide(ask, explain=True)


def write(path: Path, records: list[dict[str, Any]]) -> str:
    """Write the records with the log's own code, and return the path for reading."""
    log = DecisionLog(str(path), Metrics())
    log.open()
    for entry in records:
        log.note(entry)
    log.close()
    return str(path)


async def check(url: str, records: list[dict[str, Any]]) -> None:
    again = await choices(url, records)
    told = [(entry["worker_id"], entry["why"], entry["cost_s"]) for entry in records]
    assert told == [(new.worker_id, new.why, new.cost_s) for new in again]


async def choices(url: str, records: list[dict[str, Any]]) -> list[Choice]:
    replays = Replays(connect(url, timeout_s=5))
    try:
        return await replays.choices(records)
    finally:
        await replays.close()


async def test_random_decisions_of_all_policies_come_out_as_they_were(keyspace: Keyspace, redis_url: str) -> None:
    records = await logged(keyspace, 400, seed=3)
    await check(redis_url, records)
    for entry in records:
        assert entry["costs"][entry["worker_id"]]["cost"] == float(entry["cost_s"])
        for told in entry["costs"].values():
            assert sum(told.values()) == pytest.approx(2 * told["cost"], abs=1e-5)
    assert len({entry["why"] for entry in records}) >= 9
    assert sum(entry["why"] == "room" for entry in records) >= 3
    assert len({entry["worker_id"] for entry in records}) == WORKERS
    for weight in ("pressure_price", "decode_s_per_token", "lambda_", "wait_price", "decode_price", "context_price"):
        changed = json.loads(json.dumps(records))
        for entry in changed:
            entry["weights"][weight] *= 1.01
        with pytest.raises(AssertionError):
            await check(redis_url, changed)
    with pytest.raises(AssertionError):  # the record contains the time that a prefill has had
        await check(redis_url, [entry | {"now_ms": (entry["now_ms"] + 300) % 2**32} for entry in records])


async def test_a_log_without_the_newest_weights_is_replayed_as_it_was(keyspace: Keyspace, redis_url: str) -> None:
    records = [entry for entry in await logged(keyspace, 60, seed=5) if not entry["weights"]["context_price"]]
    old = [entry for entry in records if not entry["weights"]["decode_price"]]
    assert len(old) >= 5
    for entry in old:
        del entry["weights"]["decode_price"], entry["weights"]["context_price"]
    await check(redis_url, old)


@pytest.mark.long(minutes=1, shows="4,000 random decisions are logged and replayed with the same result")
async def test_thousands_of_random_decisions(keyspace: Keyspace, redis_url: str) -> None:
    for seed in range(2, 6):
        await check(redis_url, await logged(keyspace, 1_000, seed))


async def test_the_log_is_written_rotated_and_replayed_by_the_command(
    store: aioredis.Redis, keyspace: Keyspace, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = await logged(keyspace, 30, seed=7)
    path = write(tmp_path / "log", records)
    assert read(path) == (records, [])
    keys = await store.dbsize()
    assert await asyncio.to_thread(main, ["replay", path, "--policy", "all", "--redis", redis_url]) == 0
    said = capsys.readouterr().out
    assert "30 of 30 decisions came out exactly as they were" in said
    assert all(f"\n{policy} " in said for policy in POLICIES)
    assert await store.dbsize() == keys, "no key is touched"
    records[4]["weights"]["decode_s_per_token"] *= 2
    path = write(tmp_path / "changed", records)
    assert await asyncio.to_thread(main, ["replay", path, "--redis", redis_url]) == 1
    assert "29 of 30" in capsys.readouterr().out
    for text in ("", "{}\n", json.dumps({**records[0], "weights": 1})):
        (tmp_path / "bad").write_text(text)
        assert await asyncio.to_thread(main, ["replay", str(tmp_path / "bad"), "--redis", redis_url]) == 2
        assert "has no record of a decision log" in capsys.readouterr().err


async def test_damaged_lines_of_a_log_are_left_out_and_counted(
    keyspace: Keyspace, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = await logged(keyspace, 4, seed=3)
    whole = [json.dumps(entry) for entry in records]
    lacking = {name: value for name, value in records[0].items() if name != "now_ms"}
    wrong: list[Any] = [lacking, {**records[0], "prompt_tokens": "9"}, {**records[0], "seed": None}]
    wrong += [{**records[0], "weights": {**records[0]["weights"], "kappa": True}}, {**records[0], "policy": 1}, [], 1]
    lines = [*map(json.dumps, wrong), "", "[" * 100_000, whole[0][:-9], whole[0] + whole[1]]
    (tmp_path / "log").write_text("\n".join(lines + whole))
    assert (
        await asyncio.to_thread(main, ["replay", str(tmp_path / "log"), "--policy", "all", "--redis", redis_url]) == 1
    )
    said = capsys.readouterr()
    assert "4 of 4 decisions" in said.out
    assert f"left out: {len(lines)} lines that are not records of a decision log: 1, 2, 3, 4, 5, …" in said.err
    (tmp_path / "other").write_text(json.dumps({**records[0], "policy": "newest"}))
    assert await asyncio.to_thread(main, ["replay", str(tmp_path / "other"), "--redis", redis_url]) == 2
    assert "cannot be replayed" in capsys.readouterr().err


def test_the_file_is_bounded_and_lost_records_are_counted(tmp_path: Path) -> None:
    path, metrics = tmp_path / "log", Metrics()
    log = DecisionLog(str(path), metrics, max_bytes=1_000)
    log.open()
    for number in range(100):
        log.note({"number": number, "pad": "x" * 80})
    log.close()
    assert path.stat().st_size <= 1_000
    assert (tmp_path / "log.1").stat().st_size <= 1_000
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 99
    full = DecisionLog(str(path), metrics)  # no line is written, as if the disk hangs
    for number in range(1_010):
        full.note({"number": number})
    page = metrics.render().decode()
    assert 'warmfleet_decision_log_records_total{result="written"} 100.0' in page
    assert 'warmfleet_decision_log_records_total{result="dropped"} 10.0' in page
    with pytest.raises(BadArgument, match="WARMFLEET_DECISION_LOG"):
        DecisionLog(str(tmp_path / "nowhere" / "log"), metrics)
    assert not DecisionLog("", metrics).wants()


async def test_a_replica_logs_and_explains_its_decisions(valkey_url: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    async with (
        engine(model) as one,
        engine(model) as two,
        replica(valkey_url, model, one.url, two.url, decision_log=str(path)) as router,
    ):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
        for given in ("1", "0", ""):
            told = {"X-Warmfleet-Explain": given} if given else {}
            status, headers, _ = await router.post(body, **told, **{"X-Session-ID": "private"})
            assert status == 200
            assert ("x-warmfleet-explain" in headers) == (given == "1")
            if given == "1":
                shown = json.loads(headers["x-warmfleet-explain"])
                assert (shown["policy"], shown["of"], len(shown["candidates"])) == ("cost", 2, 2)
                assert shown["candidates"][0]["worker"] == headers["x-warmfleet-worker"]
                assert shown["why"] in ("home", "lowest")
                assert shown["weights"] == asdict(Weights())
                for row in shown["candidates"]:
                    assert sum(row["terms"].values()) == pytest.approx(row["cost"], abs=1e-5)
        assert all("x-warmfleet-explain" not in seen.headers for seen in one.seen + two.seen)
        await poll(lambda: path.exists() and path.read_bytes().count(b"\n") == 3, 30, "three records")
    text = path.read_text()
    assert "quick" not in text
    assert "private" not in text
    await check(valkey_url, read(str(path))[0])


def test_explaining_is_the_operators_where_a_key_guards() -> None:
    for given in (b"1", b"wrong", "é".encode()):
        with pytest.raises(Unauthorized):
            hints.read_hints({hints.EXPLAIN: given}, b"", "secret")
    assert hints.read_hints({hints.EXPLAIN: b"secret"}, b"", "secret").explain
    assert hints.read_hints({hints.EXPLAIN: b"1"}, b"", "").explain
    for no in (b"", b"0", b"false", b"False", b"no", b" "):
        assert not hints.read_hints({hints.EXPLAIN: no}, b"", "secret").explain
        assert not hints.read_hints({hints.EXPLAIN: no}, b"", "").explain


def test_without_an_operators_key_no_client_gets_an_explanation() -> None:
    tenants = {"WARMFLEET_TENANT_KEY": "t" * 32}
    clients = {"WARMFLEET_CLIENT_KEYS_FILE": "/some/keys"}
    for guarded in (tenants, clients, {"WARMFLEET_ANSWER_HEADERS": "request_id"}):
        apart = Settings.from_environment(guarded | {"WARMFLEET_ADMIN_PORT": "9090"})
        with pytest.raises(Unauthorized):
            hints.read_hints({hints.EXPLAIN: b"1"}, b"", apart.explain_key)
        with_key = Settings.from_environment(guarded | {"WARMFLEET_ADMIN_KEY": "k" * 32})
        assert hints.read_hints({hints.EXPLAIN: b"k" * 32}, b"", with_key.explain_key).explain
    assert Settings.from_environment({}).explain_key == ""


async def test_redis_tells_what_a_choice_saw_only_if_it_is_asked_to(keyspace: Keyspace, fleet: Fleet) -> None:
    await keyspace.workers(2)
    assert (await fleet.bookings.decide(keyspace.ask(keyspace.chain(3)))).seen is None
