"""A replica as picker behind a real Envoy, in each way in which a gateway may send bodies.

The engines do not report the ends of requests, so that the calls stay open (test_envoy_ended has the others).

Every case asserts the client's status and bytes, the outcome of the reservation, the number of tries that Envoy made,
and that no load is left.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from tests.envoy.gateway_config import ENDPOINT, MODES, OTHERS, Mode
from tests.envoy.world import EVERY_MODE, PATH, World, booked, cut, die, running_world, under_load, whole_answers
from tests.support.polling import poll
from tests.support.requests.http2 import Peer

from warmfleet.picker import frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

NO_OUTCOME = Counter[str]()
#: Modes in which the picker reads the prompt, so that it books the request.
BOOKING = pytest.mark.parametrize("mode", [mode for mode in MODES if booked(mode)], ids=lambda mode: mode.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with running_world(valkey_url, tmp_path_factory.mktemp("envoy"), reports_ends=False) as made:
        yield made


@dataclass
class Accounts:
    """The outcomes of one test. ``load``: what the fleet had booked before."""

    world: World
    before: Counter[str]

    async def are(self, **wanted: int) -> None:
        """Wait until the reservations of this test have these outcomes, and nothing else; then nothing is booked."""

        async def settled() -> bool:
            return (await self.world.outcomes()) - self.before == Counter(wanted)

        await poll(settled, 15, f"outcomes {wanted}")
        await self.world.replica.unloaded()
        assert (await self.world.outcomes()) - self.before == Counter(wanted)

    async def left_to_their_leases(self, count: int) -> None:
        """Assert that so many reservations are left, which nobody renews; end them in place of their leases."""
        fleet = self.world.replica.fleet

        async def all_left() -> bool:  # leases also linger where credit does, until blocks are reported
            return sum(worker.load.in_flight for worker in await fleet.workers.read()) == count

        await poll(all_left, 10, f"{count} reservations are left")
        assert len(self.world.pool.reservations) == 0
        await self.end_leases()

    async def end_leases(self) -> None:
        fleet = self.world.replica.fleet
        for name in cast("list[bytes]", await fleet.redis.zrange(fleet.keys.leases, 0, -1)):
            await fleet.bookings.settle(name.decode(), "finished")


@pytest_asyncio.fixture(loop_scope="module")
async def accounts(world: World) -> Accounts:
    return Accounts(world, await world.outcomes())


# ---------------------------------------------------------------- answers


@EVERY_MODE
async def test_a_plain_answer(world: World, accounts: Accounts, mode: Mode) -> None:
    got = await world.ask(mode, world.body())
    assert got.status == 200
    assert json.loads(got.body)["usage"]["completion_tokens"] == 5
    if booked(mode):
        assert got.headers["x-warmfleet-reservation"] == "booked"
        await accounts.are(finished=1)
    else:
        await accounts.are()


@EVERY_MODE
async def test_a_streamed_answer(world: World, accounts: Accounts, mode: Mode) -> None:
    got = await world.ask(mode, world.body(tokens=200, stream=True))
    assert got.status == 200
    assert got.tokens == 200
    assert (await world.logged(got)).tries == "1"
    if mode.name == "duplex_none":  # nobody tells when the answer ends: the reservation is left to its lease
        await accounts.left_to_their_leases(1)
    await accounts.are(**{"finished": 1} if booked(mode) and mode.name != "duplex_none" else {})


@EVERY_MODE
async def test_a_body_of_1_mib(world: World, accounts: Accounts, mode: Mode) -> None:
    """Envoy holds no more than 1 MiB where it buffers, and refuses the request itself: nothing was booked."""
    got = await world.ask(mode, world.body(user="x" * 2**20))
    if mode.request == "BUFFERED":
        assert got.status == 413
        assert (await world.logged(got)).details == "request_payload_too_large"
        await accounts.are()
        return
    assert got.status == 200
    assert json.loads(got.body)["usage"]["completion_tokens"] == 5
    await accounts.are(**{"finished": 1} if booked(mode) else {})


@EVERY_MODE
async def test_a_list_of_models(world: World, accounts: Accounts, mode: Mode) -> None:
    async with world.client.get(world.envoy.urls[mode.name] + "/v1/models") as answer:
        assert answer.status == 200
        assert [model["id"] for model in (await answer.json())["data"]] == [world.model]
    await accounts.are()


@EVERY_MODE
async def test_paths_that_are_not_for_clients(world: World, accounts: Accounts, mode: Mode) -> None:
    async with world.client.get(world.envoy.urls[mode.name] + "/sim/table") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "not_found"
    async with world.client.get(world.envoy.urls[mode.name] + PATH) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    await accounts.are()


# ---------------------------------------------------------------- refusals


@BOOKING
async def test_mistakes_of_clients(world: World, accounts: Accounts, mode: Mode) -> None:
    """The picker answers them in the dialect of the path."""
    url = world.envoy.urls[mode.name]
    async with world.client.post(url + PATH, data=b"{no json") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "bad_request"
    got = await world.ask(mode, {**world.body(), "model": "another"})
    assert (got.status, got.error["code"]) == (404, "model_not_found")
    async with world.client.post(url + "/v1/messages", data=b"{no json") as answer:
        assert answer.status == 400
        assert (await answer.json())["type"] == "error"
    await accounts.are()


@BOOKING
async def test_an_error_of_the_engine_passes(world: World, accounts: Accounts, mode: Mode) -> None:
    got = await world.ask(mode, world.body(prompt="word " * 20_000))
    assert got.status == 400
    await accounts.are(failed=1)


@BOOKING
async def test_a_full_queue_is_429(world: World, accounts: Accounts, mode: Mode) -> None:
    async with world.busy():
        waits = asyncio.create_task(world.ask(mode, world.body()))
        await world.queued(1)
        got = await world.ask(mode, world.body(prompt="Another prompt"))
        assert (got.status, got.error["code"]) == (429, "overloaded")
        assert int(got.headers["retry-after"]) >= 1
        assert (await world.logged(got)).details == "warmfleet_overloaded"
    assert (await waits).status == 200
    await accounts.are(finished=1)


@pytest.mark.parametrize("name", ["duplex", "default_timeout"])
async def test_a_wait_longer_than_envoys_patience(world: World, accounts: Accounts, name: str) -> None:
    """By default Envoy gives a picker 200 ms in BUFFERED, unless the picker asks for more; else it waits."""
    mode = next(mode for mode in (*MODES, *OTHERS) if mode.name == name)
    async with world.busy():
        waits = asyncio.create_task(world.ask(mode, world.body()))
        await world.queued(1)
        await asyncio.sleep(0.5)
        assert not waits.done()
    assert (await waits).status == 200
    await accounts.are(finished=1)


async def test_an_envoy_that_grants_no_more_time(world: World, accounts: Accounts) -> None:
    impatient = next(mode for mode in OTHERS if mode.name == "impatient")
    async with world.busy():
        got = await world.ask(impatient, world.body())
        assert got.status == 504
        await world.queued(0)
    await accounts.are()


# ---------------------------------------------------------------- subsets


@EVERY_MODE
async def test_only_engines_of_the_subset(world: World, accounts: Accounts, mode: Mode) -> None:
    """Best: the engine that has the prompt, if it is allowed. Partial: the other. None: 503."""
    expected = 0
    prompt = f"{mode.name} {'once upon a time ' * 40}"
    for names, wanted in (("left", "left"), ("left,right", "left"), ("right", "right")):
        listed = ",".join(world.address(name) for name in names.split(","))
        got = await world.ask(mode, world.body(prompt), **{"x-subset": f"10.1.2.3:8000,{listed}"})
        assert got.status == 200
        served = (await world.logged(got)).engine
        if booked(mode):
            assert served == world.address(wanted)
            expected += 1
            await world.replica.unloaded()
        else:
            assert served in listed
    for nobody in ("10.1.2.3:8000", ","):
        got = await world.ask(mode, world.body(prompt), **{"x-subset": nobody})
        assert (got.status, got.error["code"], got.headers["retry-after"]) == (503, "no_worker", "1")
        assert (await world.logged(got)).engine == "-"
    await accounts.are(**{"finished": expected} if expected else {})


async def test_an_ip_address_allows_all_ports(world: World, accounts: Accounts) -> None:
    got = await world.ask(MODES[0], world.body(), **{"x-subset": "127.0.0.1"})
    assert got.status == 200
    await accounts.are(finished=1)


async def test_a_client_cannot_choose_the_engine(world: World, accounts: Accounts) -> None:
    got = await world.ask(MODES[0], world.body(), **{ENDPOINT: "127.0.0.1:9", "X-data-parallel-rank": "3"})
    assert got.status == 200
    await accounts.are(finished=1)


@asynccontextmanager
async def host_behind_the_gateway() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A host that is no engine: its address, and the requests that reached it."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@EVERY_MODE
@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("GET", "/v1/models")])
async def test_trailers_without_a_body_reach_no_host_of_the_clients_choice(
    world: World, accounts: Accounts, mode: Mode, method: str, path: str
) -> None:
    """No message with a body follows the headers, so the gateway sends on what it has when the headers are answered."""
    url = urlsplit(world.envoy.urls[mode.name])
    async with host_behind_the_gateway() as (place, asked):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        client = Peer(reader, writer)
        client.greet()
        fields = {":method": method, ":scheme": "http", ":authority": "a", ":path": path, ENDPOINT: place}
        for block, flags in ((fields, 0), ({"x-trailer": "1"}, frames.END_STREAM)):
            made = client.encoder.encode([*block.items()])
            client.send(frames.frame(frames.HEADERS, frames.END_HEADERS | flags, 1, made))
        answer = await client.until(frames.HEADERS, 1)
        status = dict(client.decoder.decode(answer.payload, raw=True))[b":status"]
        writer.close()
        assert asked == []
    assert status == (b"200" if method == "GET" else b"503" if mode.request == "BUFFERED" else b"400")
    await accounts.are()


# ---------------------------------------------------------------- clients that leave, engines that die


@BOOKING
async def test_a_client_that_leaves_while_the_picker_decides(world: World, accounts: Accounts, mode: Mode) -> None:
    async with world.busy():
        waits = asyncio.create_task(world.ask(mode, world.body()))
        await world.queued(1)
        waits.cancel()
        await world.queued(0)
    await accounts.are()


@BOOKING
async def test_a_client_that_leaves_while_it_is_answered(world: World, accounts: Accounts, mode: Mode) -> None:
    url = world.envoy.urls[mode.name] + PATH
    async with world.client.post(url, json=world.body(tokens=4_000, stream=True)) as answer:
        await answer.content.readany()
        await asyncio.sleep(0.1)
        assert world.running() == 1
    await poll(lambda: world.running() == 0, 10, "the engine stops its work")
    if mode.name == "duplex_none":
        await accounts.left_to_their_leases(1)
        await accounts.are()
    else:  # where no piece passes the picker, an answer that ends and one that breaks off look alike
        await accounts.are(**{"cancelled" if mode.sees_end else "finished": 1})


@BOOKING
async def test_an_engine_that_dies_while_it_answers_is_not_blamed(world: World, accounts: Accounts, mode: Mode) -> None:
    """The gateway does not tell its death from a client that left."""
    url = world.envoy.urls[mode.name] + PATH
    async with world.client.post(url, json=world.body(tokens=4_000, stream=True)) as answer:
        await answer.content.readany()
        await asyncio.sleep(0.1)
        for engine in world.engines.values():
            cut(engine)
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    if mode.name == "duplex_none":
        await accounts.left_to_their_leases(1)
        await accounts.are()
    else:
        await accounts.are(**{"cancelled" if mode.sees_end else "finished": 1})
    assert world.pool.outliers.verdicts == {}


# ---------------------------------------------------------------- under load


@under_load(pytest.mark.long(minutes=2, shows="1,000 streamed answers in each mode of a gateway are whole to the byte"))
async def test_answers_under_load_are_whole(world: World, accounts: Accounts, mode: Mode, count: int) -> None:
    await whole_answers(world, mode, count)
    if mode.name in ("duplex_none", "duplex_trailers"):
        # Nobody tells when the answers end, or only the end of the call tells it, which for short answers looks like a
        # call that was given up: they are left to their leases.
        await poll(lambda: not world.pool.reservations, 15, "no call is open")
        await accounts.end_leases()
        await world.replica.unloaded()
    else:
        await accounts.are(**{"finished": count} if booked(mode) else {})


# ---------------------------------------------------------------- the last test, which leaves one engine dead


async def test_an_engine_that_cannot_be_reached(world: World, accounts: Accounts) -> None:
    """Its request was never sent; where Envoy tells why, other requests avoid it for a moment.

    Not with override_host: there a retry may go to any other engine of Envoy's cluster.
    """
    await die(world.engines["right"])
    only = {"x-subset": world.address("right")}
    for count, name in enumerate(("duplex", "buffered", "buffered_told"), 1):
        mode = next(mode for mode in MODES if mode.name == name)
        got = await world.ask(mode, world.body(), **only)
        logged = await world.logged(got)
        assert (got.status, logged.engine, logged.tries) == (503, world.address("right"), "3")
        await accounts.are(unsent=count)
    assert world.pool.outliers.verdicts == {}
    assert "right.0" in world.pool.avoided()
