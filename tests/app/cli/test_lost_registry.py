"""Commands that name a model while the master with its registry of pools is away, and those of its pools answer."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.cli.test_artifacts_command import DIGEST, approved, joined
from tests.support.redis.topology import whole_cluster

from warmfleet.__main__ import main
from warmfleet.cli.pools import command, served
from warmfleet.fleet import Fleet, Proof, connect
from warmfleet.fleet.connection.pool_masters import next_tag
from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
from warmfleet.protocol.wire import model_tag

if TYPE_CHECKING:
    import redis.asyncio as aioredis

CLUSTER = "redis+cluster://127.0.0.1:1"


class Masters:
    """A Cluster as commands see it: one store has all keys, but those of the models and pools in ``away``."""

    def __init__(self, url: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self.model, self.capsys = url, model, capsys
        self.away: set[str] = set()
        self.pools = [f"{model}#{number}" for number in (1, 2)]

    def connect(self, _url: str, tag: str, **options: Any) -> aioredis.Redis:
        lost = tag in map(model_tag, self.away)
        return connect("redis://127.0.0.1:1/0" if lost else self.url, tag, **options)

    def __call__(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Standard output and standard error of a command that names the model."""
        assert main([*words, "--model", self.model, "--redis", CLUSTER]) == status
        printed = self.capsys.readouterr()
        return printed.out, printed.err

    def register(self, *pools: str) -> None:
        async def write() -> None:
            client = connect(self.url, timeout_s=5)
            await PoolRegistry(client, self.model).write(map(PoolEntry, pools))
            await client.aclose()

        asyncio.run(write())

    def policies(self) -> list[str]:
        """The policy that each pool was switched to."""

        async def ask(pool: str) -> str:
            fleet = Fleet(connect(self.url, timeout_s=2), pool)
            try:
                return await fleet.operator.switched()
            finally:
                await fleet.close()

        return [asyncio.run(ask(pool)) for pool in self.pools]


@pytest.fixture
def masters(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Masters:
    made = Masters(valkey_url, model, capsys)
    monkeypatch.setattr(served, "connect", made.connect)
    monkeypatch.setenv("WARMFLEET_MODELS", ",".join(made.pools))
    made.register(*made.pools)
    return made


async def proved(url: str, pool: str, worker_id: str) -> None:
    """Let this worker take requests from now on."""
    fleet = Fleet(connect(url, timeout_s=2), pool)
    [worker] = [worker for worker in await fleet.workers.read() if worker.worker_id == worker_id]
    assert await fleet.probes.prove(worker_id, worker.record["nonce"], Proof("proven", "")) == "OK"
    await fleet.close()


async def switched(url: str, pool: str) -> None:
    """Let Redis hold a key of this pool from now on: its policy."""
    async with connect(url, timeout_s=2) as client:
        await Fleet(client, pool).operator.switch("sticky")


def test_the_pools_of_the_settings_are_used_with_a_warning(masters: Masters) -> None:
    masters.away.add(masters.model)
    printed, warned = masters("policy", "sticky")
    assert printed == "".join(f"{pool}: sticky\n" for pool in masters.pools)
    assert f"the registry of {masters.model}'s pools cannot be read" in warned
    assert f"only those that WARMFLEET_MODELS names are known, {', '.join(masters.pools)}" in warned
    assert masters.policies() == ["sticky", "sticky"]
    with joined(masters.url, masters.pools[1], "w"):
        printed, warned = masters("artifacts")
        assert DIGEST in printed
        assert "cannot be read" in warned
        printed, warned = masters("drain", "w")
        assert printed.startswith("w.0 gets no new requests")
        assert "cannot be read" in warned


def test_without_a_pool_in_the_settings_the_error_says_to_name_one(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_MODELS", masters.model)
    masters.away.add(masters.model)
    for words in (("policy",), ("artifacts",), ("drain", "w")):
        printed = masters(*words, status=2)[1]
        assert f"name pools that may be on other masters, by --model '{masters.model}#1' or in WARMFLEET" in printed


def test_a_pool_that_is_away_as_well_is_told_and_keeps_no_other_from_its_orders(masters: Masters) -> None:
    lost, other = masters.pools
    masters.away |= {masters.model, lost}
    printed, warned = masters("policy", "sticky", status=2)
    assert printed == f"{other}: sticky\n"
    assert f"{lost} is left out" in warned
    assert f"{lost} may go by another policy: call this again" in warned
    assert masters.policies() == ["", "sticky"]
    assert json.loads(masters("policy", "--json")[0]) == {other: "sticky"}
    with joined(masters.url, other, "w"):
        assert DIGEST in masters("artifacts")[0]
        printed, warned = masters("artifacts", "approve", DIGEST, status=2)
        assert f"{DIGEST} approved" in printed
        assert f"nothing has changed in {lost}: call this again" in warned
    assert asyncio.run(approved(masters.url, other)) == {DIGEST}
    masters.away.add(other)
    assert masters("policy", status=2)[0] == ""


def test_the_registry_tells_the_pools_of_a_model_that_settings_name(masters: Masters) -> None:
    """The environment of a router names some of them, for the time when the registry is away."""
    third = f"{masters.model}#3"
    masters.register(third)
    assert main(["policy", "--json", "--redis", CLUSTER]) == 0
    assert [*json.loads(masters.capsys.readouterr().out)] == [*masters.pools, third]


def test_a_worker_that_two_pools_know_is_drained_in_each_which_are_named(masters: Masters) -> None:
    """The worker has moved from the first pool to the second."""
    with joined(masters.url, masters.pools[0], "w"), joined(masters.url, masters.pools[1], "w"):
        lines = masters("drain", "w.0")[0].splitlines()
        assert [line.partition(";")[0] for line in lines] == [
            f"w.0 gets no new requests in {tag}" for tag in masters.pools
        ]
        assert masters("drain", "nobody", status=2)[1].count("w.0") == 1


def test_the_pools_of_the_settings_are_listed_with_a_warning(masters: Masters) -> None:
    masters.away |= {masters.model, masters.pools[1]}
    printed, warned = masters("pools")
    assert "cannot be read" in warned
    assert f"{masters.model}  2 pools\n" in printed
    assert f"{masters.pools[1]}: Redis is away" in printed
    assert main(["pools", "list", "--redis", CLUSTER]) == 0
    assert masters.pools[0] in masters.capsys.readouterr().out


def test_a_pool_whose_master_is_away_is_removed_as_far_as_that_goes(
    masters: Masters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LET_GO_S", 0.01)
    other, lost = masters.pools
    with joined(masters.url, other, "w"):
        asyncio.run(proved(masters.url, other, "w.0"))
        masters.away.add(lost)
        printed = masters("pools", "remove", lost, status=2)[1]
        assert f"the Redis that has {lost} does not answer" in printed
        assert f"`warmfleet pools drain {lost} --move` works all the same" in printed
        assert "move to other pools" in masters("pools", "drain", lost, "--move")[0]
        printed = masters("pools", "remove", lost, "--force")[0]
        assert f"{lost} is out of the registry; its Redis does not answer: call again when it is there" in printed
        printed = masters("pools", "remove", lost, "--force", status=2)[1]
        assert f"no pool {lost} in the registry; its Redis does not answer" in printed
        masters.away.clear()
        asyncio.run(switched(masters.url, lost))
        assert masters("pools", "remove", lost)[0].startswith(f"no pool {lost} in the registry; deleted what was left")
        assert masters("pools", "remove", lost)[0].startswith(f"no pool {lost} in the registry; Redis has nothing")


@pytest.mark.long(
    minutes=1,
    shows=(
        "a Cluster that has lost the master with the registry of a model's pools, and its replica: `warmfleet policy`, "
        "`artifacts` and `drain` by the model's name work on the pools of the other masters"
    ),
)
def test_a_cluster_that_has_lost_the_master_with_the_registry(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with whole_cluster() as cluster:
        tags: list[str] = []
        while len(tags) < 3:
            tags.append(next_tag(model, tags, cluster.ranges))
        home = cluster.number_of(model_tag(model))
        tags.sort(key=lambda tag: cluster.number_of(model_tag(tag)) == home)
        *others, lost = tags
        monkeypatch.setenv("WARMFLEET_MODELS", ",".join(tags))
        assert main(["pools", "add", *tags, "--redis", cluster.url]) == 0
        with joined(cluster.url, others[1], "w"):
            for node in (cluster.masters[home], cluster.replicas[home]):
                node.kill()
            capsys.readouterr()
            named = ["--model", model, "--redis", cluster.url]
            assert main(["policy", "sticky", *named]) == 2
            printed = capsys.readouterr()
            assert printed.out == "".join(f"{tag}: sticky\n" for tag in tags if tag != lost)
            assert f"{lost} may go by another policy" in printed.err
            assert main(["drain", "w", *named]) == 0
            assert main(["artifacts", *named]) == 0
            printed = capsys.readouterr()
            assert "w.0 gets no new requests" in printed.out
            assert DIGEST in printed.out
            assert printed.err.count("cannot be read") == 2
            print(printed.err)
