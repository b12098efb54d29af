"""Requests of clients with limits among several pools: one pool counts them, once, whatever is repeated or lost."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.errors import BadArgument
from warmfleet.fleet import ClientLimits, new_reservation

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet import Fleet

LIMITS = ClientLimits("team-a", 2, 1_000_000)


def name_of(limits: ClientLimits = LIMITS) -> str:
    return new_reservation(1, client=limits.tag)


async def answered(send: Any) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def take(answer: Any, error: Exception | None) -> None:
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)

    send(take)
    return await future


async def admit(fleet: Fleet, name: str, limits: ClientLimits = LIMITS, tokens: int = 100) -> Any:
    return await answered(partial(fleet.clients.admit, name, limits, tokens))


async def end(fleet: Fleet, name: str, tokens: int = 0) -> Any:
    return await answered(partial(fleet.clients.end, name, tokens))


async def counted(keyspace: Keyspace) -> set[str]:
    found = await cast("Any", keyspace.store.zrange(f"{keyspace.keys.prefix}client:{LIMITS.tag}", 0, -1))
    return {name.decode() for name in found}


async def test_a_client_has_as_many_requests_in_flight_as_its_limit(keyspace: Keyspace) -> None:
    names = [name_of() for _ in range(3)]
    assert await admit(keyspace.fleet, names[0]) == [1, 100]
    again = await admit(keyspace.fleet, names[0])
    assert (again[0], again[1] <= 100) == (1, True), "the same request again counts once, as does its prompt"
    assert (await admit(keyspace.fleet, names[1]))[0] == 2
    assert await admit(keyspace.fleet, names[2]) == [b"LIMITED", b"CONCURRENCY", 2, 0]
    assert (await admit(keyspace.fleet, names[0]))[0] == 2, "what was let in is not refused"
    assert (await admit(keyspace.fleet, name_of(), LIMITS.of_admitted))[0] == 3, "nor is another attempt at it"
    other = ClientLimits("team-b", 1)
    assert await admit(keyspace.fleet, name_of(other), other) == [1, 0]
    assert await end(keyspace.fleet, names[0], 50) == [1]
    assert await end(keyspace.fleet, names[0], 50) == [0]
    assert await end(keyspace.fleet, names[1]) == [1]
    assert (await admit(keyspace.fleet, names[2]))[0] == 2
    assert names[2] in await counted(keyspace)


async def test_tokens_are_given_back_and_counted_once(keyspace: Keyspace) -> None:
    first, second = name_of(), name_of()
    await admit(keyspace.fleet, first, tokens=600_000)
    assert (await admit(keyspace.fleet, second, tokens=500_000))[:2] == [b"LIMITED", b"TOKENS"]
    for _ in range(2):
        await end(keyspace.fleet, first, -600_000)
    assert (await admit(keyspace.fleet, second, tokens=500_000))[1] == 500_000
    await admit(keyspace.fleet, name := name_of(), tokens=300_000)
    for _ in range(2):
        await end(keyspace.fleet, name, -300_000)
    for _ in range(2):
        await end(keyspace.fleet, second, 100_000)
    refused = await admit(keyspace.fleet, name_of(), tokens=900_000)
    assert refused[:2] == [b"LIMITED", b"TOKENS"]
    assert 450_000 < refused[2] <= 600_000, "each end counts once"


async def test_what_nobody_keeps_expires(keyspace: Keyspace) -> None:
    fleet = keyspace.fleet
    names = [name_of() for _ in range(2)]
    for name in names:
        await admit(fleet, name)
    key = f"{keyspace.keys.prefix}client:{LIMITS.tag}"
    await cast("Any", keyspace.store.zadd(key, dict.fromkeys(names, 1)))
    await fleet.clients.keep(names[:1])
    assert (await admit(fleet, name_of()))[0] == 2, "the other one of a dead replica counts no longer"
    assert names[0] in await counted(keyspace)
    assert names[1] not in await counted(keyspace)


async def test_the_key_of_a_client_expires_with_its_last_request(keyspace: Keyspace) -> None:
    key = f"{keyspace.keys.prefix}client:{LIMITS.tag}"
    await admit(keyspace.fleet, first := name_of())
    assert 29_000 < await keyspace.store.pttl(key) <= 30_000, "a lease lives so long"
    seconds, _ = await keyspace.store.time()
    await cast("Any", keyspace.store.zadd(key, {first: 1_000 * (seconds + 90)}))
    await admit(keyspace.fleet, second := name_of())
    assert 88_000 < await keyspace.store.pttl(key) <= 91_000, "another one lives longer"
    for name in (first, second):
        await end(keyspace.fleet, name)
    assert not await keyspace.store.exists(key)


async def test_what_redis_lost_counts_again_when_it_is_kept(keyspace: Keyspace) -> None:
    name = name_of()
    await admit(keyspace.fleet, name)
    await keyspace.store.delete(
        f"{keyspace.keys.prefix}client:{LIMITS.tag}", f"{keyspace.keys.prefix}tokens:{LIMITS.tag}"
    )
    await keyspace.fleet.clients.keep([name])
    assert await counted(keyspace) == {name}


async def test_an_answer_counts_though_its_prompt_is_paid_back(keyspace: Keyspace) -> None:
    fast = ClientLimits("team-a", tokens_per_minute=60_000_000)
    name = name_of()
    await admit(keyspace.fleet, name, fast, 1)
    record = f"{keyspace.keys.prefix}tokens:{fast.tag}"
    await keyspace.store.pexpire(record, 2_000)
    await keyspace.fleet.clients.keep([name])
    assert await keyspace.store.pttl(record) > 100_000
    await end(keyspace.fleet, name, 50_000_000)
    assert (await admit(keyspace.fleet, name_of(), fast, 1))[1] > 40_000_000


async def test_arguments_are_checked(keyspace: Keyspace) -> None:
    for bad in (
        ["admit", 30_000, "wf-short", LIMITS.record, 1],
        ["admit", 30_000, name_of(), b"1234567", 1],
        ["admit", 30_000, name_of(), LIMITS.record],
        ["keep", 30_000, "wf-short"],
        ["keep", 30_000, *[name_of() for _ in range(201)]],
        ["end", 30_000, name_of()],
        ["end", "x", name_of(), 1],
        ["begin", 30_000, name_of(), 1],
    ):
        with pytest.raises(BadArgument):
            await keyspace.fleet.scripts.run("client", keyspace.keys.prefix, *cast("list[Any]", bad))
    assert await keyspace.fleet.scripts.run("client", keyspace.keys.prefix, "keep", 30_000) == [0]
