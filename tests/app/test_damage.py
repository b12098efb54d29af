"""A worker that sends arbitrary joins and files harms no other worker and no request."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.plugin_worker import SMALL, TEMPLATE
from tests.support.fleet.damaged_announcements import Damage
from tests.support.fleet.keyspace import Keyspace
from tests.support.fleet.reporting_worker import SCHEME
from tests.support.replicas.stepped import stepped_replica
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from warmfleet.background import announced
from warmfleet.fleet import Proof
from warmfleet.prompt import tokenizer as encoder
from warmfleet.prompt.messages import NotReproducible
from warmfleet_worker.protocol import artifacts, wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

EVIL = 24  # damaged workers at a time, beside two healthy ones
FACTS: dict[str, Any] = {
    "max_model_len": 4096, "content_format": "string", "special_tokens": {"bos_token": "<s>"},
    "add_special_tokens": {"completions": True, "chat": False}, "special_prefix_ids": [1],
    "default_chat_template_kwargs": {"x": 1}, "same_template_with_tools": True,
    "exclude_tools_when_tool_choice_none": False, "tool_parser": None, "prompt_tokens_details": True,
    "multimodal": True, "placeholders": {"image": "<i>"},
    "renders": {"jinja": True, "render": True, "tokenize": True}, "token_handoff": ["completions", "chat"],
    "loras": {"adapter": "/path"},
}  # fmt: skip
FILES = {"tokenizer.json": artifacts.split(SMALL), "chat_template.jinja": artifacts.split(TEMPLATE.encode())}
MANIFEST = {name: entry for name, (entry, _) in FILES.items()}


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    return valkey_url


class Evil:
    """A worker and its API server that send damaged joins, heartbeats and facts."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet, name: str, damage: Damage) -> None:
        self.store, self.keys, self.name, self.damage = store, fleet.keys, name, damage
        self.worker = f"{name}.0"

    def server(self) -> dict[str, Any]:
        """The server's join. Some claim the healthy workers' files without bringing any; others announce own files."""
        own = {name: entry | {"sha256": sha256(self.name.encode()).hexdigest()} for name, entry in MANIFEST.items()}
        told = {"schema": 1, "server_id": self.name, "url": "http://127.0.0.1:1", "models": ["m", "other"]}
        told |= {"artifacts": MANIFEST if self.damage.rng.random() < 0.3 else own, "facts": FACTS, "version": "1"}
        return told

    def core(self) -> dict[str, Any]:
        told = {"schema": 1, "worker_id": self.worker, "server_id": self.name, "rank": 0, "scheme": SCHEME.as_dict()}
        told |= {"scheme_id": SCHEME.scheme_id, "capacity_blocks": 100, "max_model_len": 4096, "version": "1"}
        return told | {"closed": True}

    async def send(self, nonce: str) -> None:
        """Write all entries that a worker writes, most of them damaged."""
        bent, rng, keys = self.damage.bent, self.damage.rng, self.keys
        join, core = json.dumps(self.server()), json.dumps(self.core())
        if rng.random() < 0.8:
            join = bent(self.server())
        else:
            core = bent(self.core())
        if rng.random() < 0.2:
            join = join.replace(':"1"', ':"1" ', 1)
        beats = [bent([1, 1, 5, 0, 0, 900, 0]), bent([1, 1, 5, 0, 0, 900, 0, 0, 0, 0]), "[0,0,0,0,0,0,0,0,0,0]"]
        pipe = self.store.pipeline(transaction=False)
        pipe.delete(keys.server(self.name), keys.events(self.worker))
        pipe.xadd(keys.server(self.name), cast("Any", wire.entry(nonce, 1, "join", join.encode("utf-8", "replace"))))
        batches = [("join", core), *[("heartbeat", beat) for beat in beats], ("progress", bent([["wf-x", 16, 32]]))]
        batches += [("begin", bent({"snapshot": "5ea50001", "command": None})), ("end", bent({"snapshot": "5ea50001"}))]
        for number, (operation, data) in enumerate(batches, 1):
            fields = cast("Any", wire.entry(nonce, number, operation, data.encode("utf-8", "replace")))
            pipe.xadd(keys.events(self.worker), fields)
        for name in (f"server:{self.name}", f"events:{self.worker}"):
            pipe.xadd(keys.hello, {"s": name})
        await pipe.execute()

    async def forge(self, nonce: str) -> None:
        """Damage the record of the worker or its server in Redis, in ways that the scripts would not accept."""
        server = self.damage.bent(self.server() | {"nonce": nonce})
        record = {**self.core(), "nonce": nonce, "slot": 7, "proof": "proven", "cause": "", "reason": "", "probed": 1}
        record |= {"truth": {"cause": "gap", "found": 1, "healed": 1, "checked": 1, "resyncs": {"gap": 1}}, "tries": 1}
        record |= {"url": "http://x", "models": ["m"], "suspect": "blocks", "strikes": 1, "shadow": 9}
        text = self.damage.bent(record)
        key, field, value = (
            (self.keys.servers, self.name, server)
            if self.damage.rng.random() < 0.5
            else (self.keys.workers, self.worker, text)
        )
        if await cast("Any", self.store.hexists(key, field)):
            await cast("Any", self.store.hset(key, field, value.encode("utf-8", "replace")))

    async def restore(self) -> None:
        """Remove the forged records, because scripts trust the records in Redis."""
        await cast("Any", self.store.hdel(self.keys.servers, self.name))
        await cast("Any", self.store.hdel(self.keys.workers, self.worker))


async def healthy(keyspace: Keyspace) -> None:
    """Two healthy workers, whose files are compared with those of other workers."""
    for server in ("w1", "w2"):
        await bring(keyspace.fleet, server, FILES)
    await keyspace.workers(2, scheme=SCHEME.scheme_id)
    for number in (1, 2):
        told: dict[str, Any] = {"nonce": "s1", "url": f"http://10.0.0.{number}:8000", "models": ["m"], "version": "1"}
        told |= {"artifacts": MANIFEST, "facts": FACTS}
        await cast("Any", keyspace.store.hset(keyspace.keys.servers, f"w{number}", wire.dumps(told)))
        await keyspace.store.zadd(keyspace.keys.alive_servers, {f"w{number}": 2**41})
        await keyspace.store.zadd(keyspace.keys.alive, {f"w{number}.0": 2**41})
        record = {"nonce": "n1", "server_id": f"w{number}", "rank": 0, "slot": number, "scheme": SCHEME.as_dict()}
        await cast("Any", keyspace.store.hset(keyspace.keys.workers, f"w{number}.0", wire.dumps(record)))
        await keyspace.fleet.probes.prove(f"w{number}.0", "n1", Proof("proven", ""))


async def _besiege(store: aioredis.Redis, fleet: Fleet, seed: int, rounds: int) -> None:
    keyspace, damage = Keyspace(store, fleet), Damage(seed)
    await healthy(keyspace)
    evil = [Evil(store, fleet, f"evil{number}", damage) for number in range(EVIL)]
    async with stepped_replica(fleet) as replica:
        await replica.look()
        await replica.loaded()
        seen = unreadable = 0
        for number in range(rounds):
            for attacker in evil:
                await attacker.send(f"n{number}")
            await replica.applied()
            for attacker in evil:
                if damage.rng.random() < 0.7:  # as if the worker had passed a probe
                    await fleet.probes.prove(attacker.worker, f"n{number}", Proof("proven", ""))
                if damage.rng.random() < 0.4:
                    await attacker.forge(f"n{number}")
            shown = await replica.look()
            await replica.loaded()
            for worker in damage.rng.sample(replica.pool.view.workers, 2):
                if worker.worker_id.startswith("evil") and worker.server:
                    await replica.probed(worker)
            seen, unreadable = seen + len(shown["workers"]) - 2, unreadable + fleet.workers.records.unreadable
            routable = {worker["worker_id"]: worker["url"] for worker in shown["workers"] if worker["routable"]}
            assert {"w1.0", "w2.0"} <= routable.keys(), f"seed {seed}, round {number}"
            assert all(url for url in routable.values())
            assert {"w1.0", "w2.0"} <= replica.pool.view.handoff.keys()
            assert await replica.asked() == {"exact", "prefix"}
            for attacker in evil:
                await attacker.restore()
        counts = await fleet.index.counts()
        assert counts["malformed"] > rounds * EVIL, "most of it was refused"
        assert seen > rounds * EVIL / 4, "some of it was not"
        assert unreadable > rounds, "and some only here"


async def test_damaged_joins_harm_no_other_worker(store: aioredis.Redis, fleet: Fleet) -> None:
    await _besiege(store, fleet, 1, 12)


async def bring(fleet: Fleet, server: str, files: dict[str, tuple[dict[str, Any], dict[str, bytes]]]) -> None:
    for digest, piece in [chunk for _, chunks in files.values() for chunk in chunks.items()]:
        await fleet.redis.set(fleet.keys.artifact(server, digest), piece)


async def _brought(store: aioredis.Redis, fleet: Fleet, seed: int, cases: int) -> None:
    """A worker brings damaged files and facts; two workers without files stay routable in every case."""
    keyspace, damage = Keyspace(store, fleet), Damage(seed)
    names = await keyspace.workers(3, scheme=SCHEME.scheme_id)
    await store.zadd(fleet.keys.alive, dict.fromkeys(names, 2**41))  # alive however long the cases take
    async with stepped_replica(fleet) as replica:
        for number in range(cases):
            which = damage.rng.randrange(3)
            words, template = SMALL, TEMPLATE.encode()
            if which == 0:
                words = damage.content(SMALL)
            elif which == 1:
                template = damage.content(TEMPLATE.encode())
            files = {"tokenizer.json": artifacts.split(words), "chat_template.jinja": artifacts.split(template)}
            await bring(fleet, "w1", files)
            told: dict[str, Any] = {"nonce": f"s{number}", "url": "http://10.0.0.1:8000", "models": ["m"]}
            told |= {
                "artifacts": {name: entry for name, (entry, _) in files.items()},
                "facts": FACTS | {"special_prefix_ids": [number]},
            }
            text = wire.dumps(told)
            if which == 2:
                text = text[: text.rindex("}")] + f',"facts":{damage.bent(FACTS)}}}'
            await cast("Any", store.hset(fleet.keys.servers, "w1", text.encode("utf-8", "replace")))
            before = replica.refused
            await replica.look()
            await replica.loaded()
            await replica.look()
            kinds = await replica.asked()
            assert kinds <= {"exact", "prefix", "load"}
            one, *others = replica.pool.view.workers
            assert [worker.routable for worker in others] == [True, True]
            if one.server and one.server["artifacts"]:
                built = replica.identities.known(announced.identity_key(one)) is not None
                assert built != (replica.refused == before + 1), f"seed {seed}, case {number}: built, or counted"
        assert cases / 5 < replica.refused < cases * 0.9, "some are no identities, some are, after all"


async def test_damaged_files_of_a_worker_harm_no_other_worker(store: aioredis.Redis, fleet: Fleet) -> None:
    await _brought(store, fleet, 1, 40)


def test_a_tokenizer_without_ids_for_some_texts() -> None:
    """The tokenizer has ids for all texts of its trial, but not for a letter in a request."""
    letters = sorted({*"".join(encoder._samples(())), *"a"})
    made = encoder.Encoder.load(
        Tokenizer(Unigram([(letter, -1.0) for letter in letters], None, False)).to_str().encode()
    )
    assert len(made.plain("abc")) == 3
    with pytest.raises(NotReproducible, match="tokenizer"):
        made.plain("\u046b")


async def test_a_worker_that_announces_the_files_of_others_hides_them_from_no_replica(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    """The first worker by name announces the others' files, brings wrong ones, and says every prompt is too long."""
    keyspace = Keyspace(store, fleet)
    await healthy(keyspace)
    await keyspace.worker(0, scheme=SCHEME.scheme_id)
    told: dict[str, Any] = {"nonce": "s1", "url": "http://10.0.0.9:1", "models": ["m"], "artifacts": MANIFEST}
    told |= {"facts": FACTS | {"max_model_len": 1}}
    for digest in (digest for entry in MANIFEST.values() for digest in entry["chunks"]):
        await cast("Any", store.set(fleet.keys.artifact("w0", digest), b"wrong"))
    await cast("Any", store.hset(fleet.keys.servers, "w0", wire.dumps(told)))
    async with stepped_replica(fleet) as replica:
        await replica.look()
        await replica.loaded()
        await replica.look()
        assert await replica.asked() == {"exact", "prefix"}


async def test_files_that_cannot_be_read_give_way(store: aioredis.Redis, fleet: Fleet) -> None:
    """Of two workers with different files the first by name counts, unless its file is no tokenizer."""
    keyspace = Keyspace(store, fleet)
    await healthy(keyspace)
    files = FILES | {"tokenizer.json": artifacts.split(b"{}")}
    await bring(fleet, "w1", files)
    told: dict[str, Any] = {"nonce": "s1", "url": "http://10.0.0.1:8000", "models": ["m"], "facts": FACTS}
    told |= {"artifacts": {name: entry for name, (entry, _) in files.items()}}
    await cast("Any", store.hset(fleet.keys.servers, "w1", wire.dumps(told)))
    async with stepped_replica(fleet) as replica:
        for _ in range(3):
            await replica.look()
            await replica.loaded()
        assert replica.refused == 1
        assert await replica.asked() == {"exact", "prefix"}


@pytest.mark.long(minutes=5, shows="120,000 joins with anything at all in any field: no other worker notices")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 22))
async def test_many_more_damaged_joins_harm_no_other_worker(store: aioredis.Redis, fleet: Fleet, seed: int) -> None:
    await _besiege(store, fleet, seed, 250)


@pytest.mark.long(minutes=4, shows="2,000 damaged tokenizer and template files: no other worker notices")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 6))
async def test_many_more_damaged_files_harm_no_other_worker(store: aioredis.Redis, fleet: Fleet, seed: int) -> None:
    await _brought(store, fleet, seed, 500)
