"""Calls of a gateway, message by message: sent by Google's gRPC, written and read by Google's protobuf."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from tests.support.certificates import certificate
from tests.support.engines.scripted import Engine, engine
from tests.support.engines.simulated import simulated
from tests.support.gateways.ext_proc import (
    BUFFERED,
    FULL_DUPLEX,
    NONE,
    STREAMED,
    Answer,
    Gateway,
    GatewayCall,
    body,
    gateway,
    headers,
    trailers,
)
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.api.listening.server import Sockets
from warmfleet.cli.local.ports import free_port
from warmfleet.main import server
from warmfleet.picker import calls, service, session
from warmfleet.pools import outliers
from warmfleet.settings import Settings
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from warmfleet.picker.port import Port

DUPLEX = (FULL_DUPLEX, FULL_DUPLEX)
ENDPOINT = "x-gateway-destination-endpoint"
SUBSET = f"{ENDPOINT}-subset"
PATH = "/v1/completions"
EVENTS = "text/event-stream; charset=utf-8"


@dataclass
class World:
    replica: Replica
    engine: Engine
    gateway: Gateway
    model: str

    @property
    def address(self) -> str:
        return self.engine.url.removeprefix("http://")

    @property
    def port(self) -> Port:
        """The replica's port for gateways."""
        return cast("Port", self.server._doors.gateways.make.args[0])

    @property
    def server(self) -> Any:
        return self.replica.server

    def body(self, **more: Any) -> bytes:
        return json.dumps({"model": self.model, "prompt": "Once upon a time", "max_tokens": 5, **more}).encode()

    async def outcome(self, word: str) -> float:
        return await self.replica.metric(f'warmfleet_settled_reservations_total{{outcome="{word}"}}')

    async def settled(self, word: str, count: int = 1) -> None:
        """Return once so many reservations had this outcome, and nothing is booked any more."""

        async def seen() -> bool:
            return await self.outcome(word) == count

        await poll(seen, 10, f"{count} {word}")
        await self.replica.unloaded()
        assert len(self.port.connections) == 1

    async def begun(self, modes: tuple[int, int] | None = DUPLEX, *, ends: bool = False, **more: Any) -> GatewayCall:
        """Open a call, and send the headers of a completion."""
        given = more.pop("given", {})
        call = self.gateway.call()
        fields = {"__method": "POST", "__path": PATH, "content_type": "application/json", **given}
        await call.send(request_headers=headers(ends=ends, **fields), modes=modes, **more)
        return call

    async def placed(self, modes: tuple[int, int] = DUPLEX, **more: Any) -> tuple[GatewayCall, Answer]:
        """Send a whole request; return the call, and the answer that names the endpoint."""
        call = await self.begun(modes, **more)
        if modes[0] == BUFFERED:
            assert (await call.read()).kind == "request_headers"
        await call.send(request_body=body(self.body(), ends=True))
        told = await call.read()
        if modes[0] == FULL_DUPLEX:
            assert (await call.read()).piece == (self.body(), True)
        return call, told


@asynccontextmanager
async def made(valkey_url: str, model: str, **settings: Any) -> AsyncIterator[World]:
    port = free_port()
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, epp_port=port, **settings) as router,
        gateway(port) as client,
    ):
        yield World(router, upstream, client, model)


def shared(world: World) -> calls.Calls:
    """Return the state that the replica's calls share."""
    closure = world.port.routes[service.PROCESS].__closure__ or ()
    [found] = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, calls.Calls)]
    return found


@pytest.fixture
async def world(valkey_url: str, model: str) -> AsyncIterator[World]:
    async with made(valkey_url, model) as found:
        yield found


# ---------------------------------------------------------------- full duplex


async def test_a_streamed_answer_message_by_message(world: World) -> None:
    call, told = await world.placed()
    assert told.kind == "request_headers"
    assert told.endpoints == (world.address, world.address)
    assert told.common.clear_route_cache
    assert told.set_headers["x-request-id"].startswith(b"wf-")
    await call.send(response_headers=headers(__status="200", content_type=EVENTS))
    told = await call.read()
    assert told.kind == "response_headers"
    assert told.set_headers["x-warmfleet-reservation"] == b"booked"
    for piece in (b"data: {}\n\n", b"x" * 300, b"y" * 70_000, b"data: [DONE]\n\n"):
        await call.send(response_body=body(piece))
        got = b""
        while len(got) < len(piece):
            found, ends = (await call.read()).piece
            assert len(found) <= 62_000
            assert not ends
            got += found
        assert got == piece
    await call.send(response_body=body(ends=True))
    assert (await call.read()).piece == (b"", True)
    await world.settled("finished")
    await call.half_close()
    assert await call.ended() == grpc.StatusCode.OK


async def test_a_body_in_pieces_and_its_trailers(world: World) -> None:
    call, whole = await world.begun(), world.body()
    await call.send(request_body=body(whole[:10]))
    await call.send(request_body=body(whole[10:]))
    await call.send(request_trailers=trailers())
    assert (await call.read()).endpoints == (world.address, world.address)
    assert (await call.read()).piece == (whole, False)
    assert (await call.read()).kind == "request_trailers"
    await call.send(response_headers=headers(__status="200"))
    assert (await call.read()).kind == "response_headers"
    await call.send(response_body=body(b"{}"))
    assert (await call.read()).piece == (b"{}", False)
    await call.send(response_trailers=trailers())
    assert (await call.read()).kind == "response_trailers"
    await world.settled("finished")


async def test_a_long_body_goes_back_in_pieces(world: World) -> None:
    call, whole = await world.begun(), world.body(user="x" * 200_000)
    await call.send(request_body=body(whole, ends=True))
    await call.read()
    got = [(await call.read()).piece for _ in range(4)]
    assert b"".join(piece for piece, _ in got) == whole
    assert [ends for _, ends in got] == [False, False, False, True]
    await call.half_close()
    await world.settled("cancelled")


async def test_a_gateway_that_tells_no_modes_is_taken_as_full_duplex(world: World) -> None:
    call = await world.begun(None)
    await call.send(request_body=body(world.body(), ends=True))
    assert (await call.read()).endpoints == (world.address, world.address)
    assert (await call.read()).piece == (world.body(), True)


async def test_an_answer_without_a_body(world: World) -> None:
    call, _ = await world.placed()
    await call.send(response_headers=headers(__status="404", ends=True))
    await call.read()
    await world.settled("failed")


# ---------------------------------------------------------------- other modes


async def test_buffered_and_none(world: World) -> None:
    call, told = await world.placed((BUFFERED, NONE))
    assert told.kind == "request_body"
    assert told.endpoints == (world.address, world.address)
    assert not told.common.body_mutation.body, "the body stays as it is"
    await call.send(response_headers=headers(__status="200", content_type=EVENTS))
    assert (await call.read()).kind == "response_headers"
    assert await world.outcome("finished") == 0
    await call.half_close()
    assert await call.ended() == grpc.StatusCode.OK
    await world.settled("finished")


async def test_a_short_stream_that_passes_the_picker_by(world: World) -> None:
    """A gateway that closes its side tells that the answer ended; a reset so soon tells nothing of its end."""
    for count in (1, 2):
        call, _ = await world.placed((FULL_DUPLEX, NONE))
        await call.send(response_headers=headers(__status="200", content_type=EVENTS))
        await call.read()
        await call.half_close()
        await world.settled("finished", count)
    call, _ = await world.placed((FULL_DUPLEX, NONE))
    await call.send(response_headers=headers(__status="200", content_type=EVENTS))
    await call.read()
    call.cancel()
    await poll(lambda: not shared(world).open, 10, "the call is over")
    assert await world.outcome("finished") == 2
    assert await world.replica.load() > 0


async def test_buffered_and_streamed(world: World) -> None:
    call, _ = await world.placed((BUFFERED, STREAMED))
    await call.send(response_headers=headers(__status="200", content_type=EVENTS))
    await call.read()
    for piece, ends in ((b"one", False), (b"two", True)):
        await call.send(response_body=body(piece, ends=ends))
        told = await call.read()
        assert told.kind == "response_body"
        assert not told.common.HasField("body_mutation"), "the piece passes unchanged"
    await world.settled("finished")


async def test_a_buffered_request_loses_the_clients_endpoint(world: World) -> None:
    """If the gateway went on without a body, it would ask the host that the client named."""
    call = await world.begun((BUFFERED, NONE), given={ENDPOINT.replace("-", "_"): "10.0.0.9:22"})
    told = await call.read()
    assert told.kind == "request_headers"
    assert [*told.common.header_mutation.remove_headers] == [ENDPOINT]
    await call.send(request_trailers=trailers())
    assert (await call.read()).message.immediate_response.status.code == 400


@pytest.mark.parametrize("modes", [(mode, NONE) for mode in (FULL_DUPLEX, STREAMED, NONE)])
async def test_trailers_are_answered_behind_the_headers(
    world: World, modes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    picking, chosen = shared(world).picking, asyncio.Event()
    choose = picking.any

    async def slow(*given: Any, **more: Any) -> Any:
        await chosen.wait()
        return await choose(*given, **more)

    monkeypatch.setattr(picking, "any", slow)
    call = world.gateway.call()
    fields: dict[str, Any] = {"__method": "GET", "__path": "/v1/models", ENDPOINT.replace("-", "_"): "10.0.0.9:22"}
    await call.send(request_headers=headers(**fields), modes=modes)
    await poll(lambda: shared(world).open, 10, "the headers came")
    began = [opened.heard_at for opened in shared(world).open]
    await call.send(request_trailers=trailers())
    await poll(lambda: began != [opened.heard_at for opened in shared(world).open], 10, "the trailers came")
    chosen.set()
    assert (await call.read()).endpoints == (world.address, world.address)
    assert (await call.read()).kind == "request_trailers"


async def test_empty_pieces_are_not_kept(world: World) -> None:
    call = await world.begun()
    for _ in range(50):
        await call.send(request_body=body(b""))
    await call.send(request_body=body(world.body()))

    def pieces() -> list[list[bytes]]:
        return [opened._body for opened in shared(world).open if isinstance(opened, session.Session) and opened.held]

    await poll(pieces, 10, "the body came")
    assert pieces() == [[world.body()]]
    await call.send(request_body=body(ends=True))
    assert (await call.read()).endpoints == (world.address, world.address)


@pytest.mark.parametrize("mode", [NONE, STREAMED])
async def test_without_a_body_any_engine_is_taken(world: World, mode: int) -> None:
    """Nothing is booked, so the call ends at once, unless the body passes the picker: its pieces would be lost."""
    call = await world.begun((mode, NONE))
    told = await call.read()
    assert told.endpoints == (world.address, world.address)
    assert told.set_headers["x-request-id"].startswith(b"unbooked.")
    if mode == STREAMED:
        await call.send(request_body=body(b"piece"))
        told = await call.read()
        assert told.kind == "request_body"
        assert not told.common.HasField("body_mutation")
    else:
        assert await call.ended() == grpc.StatusCode.OK
    assert await world.replica.load() == 0


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
async def test_a_call_ends_behind_the_request_if_the_engine_reports_ends(
    valkey_url: str, model: str, mode: int
) -> None:
    """Its reservation is left to the engine: here nobody sends the request, so that it lasts as long as its lease."""
    port = free_port()
    async with (
        simulated(valkey_url, model) as upstream,
        replica(valkey_url, model, epp_port=port) as router,
        gateway(port) as client,
    ):
        await router.routable(1)
        world = World(router, cast("Engine", upstream), client, model)
        call = await world.begun((mode, mode if mode == FULL_DUPLEX else NONE))
        if mode == BUFFERED:
            assert (await call.read()).kind == "request_headers"
        await call.send(request_body=body(world.body(), ends=True))
        assert (await call.read()).endpoints == (world.address, world.address)
        if mode == FULL_DUPLEX:
            sent, ends = (await call.read()).piece
            assert (json.loads(sent)["prompt"], ends) == ("Once upon a time", True)
        assert await call.ended() == grpc.StatusCode.OK
        assert await router.metric("warmfleet_left_reservations_total") == 1
        assert await router.metric('warmfleet_requests_total{endpoint="completions",status="unseen"}') == 1
        assert await router.metric("warmfleet_in_flight_requests") == 0
        assert await router.load() > 0
        store: Any = router.fleet.redis
        [(name, _)] = await store.zrange(router.fleet.keys.leases, 0, -1, withscores=True)
        await store.zadd(router.fleet.keys.leases, {name: 1})
        await router.fleet.bookings.reap()
        assert await router.load() == 0


async def test_a_picker_that_shall_stay_does(valkey_url: str, model: str) -> None:
    """Some gateways may take the end of a call for a failure."""
    async with made(valkey_url, model, epp_leaves=False) as world:
        call = await world.begun((NONE, NONE))
        assert (await call.read()).kind == "request_headers"
        await call.send(response_headers=headers(__status="200", content_type=EVENTS))
        assert (await call.read()).kind == "response_headers"


async def test_a_changed_body_tells_its_length(valkey_url: str, model: str) -> None:
    key = "a secret of the operator"
    async with made(valkey_url, model, tenant_key=key, admin_port=1) as world:
        for modes in ((FULL_DUPLEX, NONE), (BUFFERED, NONE)):
            call = await world.begun(modes, given={"authorization": "Bearer team-a"})
            if modes[0] == BUFFERED:
                await call.read()
            await call.send(request_body=body(world.body(), ends=True))
            told = await call.read()
            changed = told.common.body_mutation.body if modes[0] == BUFFERED else (await call.read()).piece[0]
            assert json.loads(changed).keys() - json.loads(world.body()).keys() == {"cache_salt"}
            assert told.set_headers["content-length"] == b"%d" % len(changed)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "sent", "status", "code"),
    [
        ({}, b"{no json", 400, "bad_request"),
        ({}, b'{"model": "another", "prompt": "a"}', 404, "model_not_found"),
        ({"__path": "/sleep"}, b"{}", 404, "not_found"),
        ({"__path": "//v1/completions"}, b"{}", 400, "bad_request"),
        ({"__method": "DELETE"}, b"{}", 405, "method_not_allowed"),
        ({"content_encoding": "gzip"}, b"{}", 415, "unsupported_coding"),
        ({"x_slo_ttft_ms": "soon"}, b"{}", 400, "bad_request"),
        ({"x_request_timeout_ms": "-1"}, b"{}", 400, "bad_request"),
        ({}, b"[" * 300_000, 413, "body_too_large"),
    ],
)
async def test_what_is_refused(
    valkey_url: str, model: str, given: dict[str, str], sent: bytes, status: int, code: str
) -> None:
    async with made(valkey_url, model, body_max_bytes=200_000) as world:
        call = await world.begun(given=given)
        if not given.keys() & {"__path", "__method", "content_encoding"}:  # these are refused at once
            await call.send(request_body=body(sent, ends=True))
        told = await call.read()
        assert told.kind == "immediate_response"
        refusal = told.message.immediate_response
        assert (refusal.status.code, json.loads(refusal.body)["error"]["code"]) == (status, code)
        assert refusal.details == f"warmfleet_{code}"
        assert told.set_headers["content-type"] == b"application/json"
        assert await call.ended() == grpc.StatusCode.OK
        assert await world.replica.load() == 0


async def test_a_message_above_the_limit_is_413_before_it_came(valkey_url: str, model: str) -> None:
    async with made(valkey_url, model, body_max_bytes=200_000) as world:
        call = await world.begun((BUFFERED, NONE))
        await call.read()
        await call.send(request_body=body(b"x" * 10_000_000, ends=True))
        told = await call.read()
        assert told.message.immediate_response.status.code == 413


async def test_bodies_together_have_a_bound(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest unfinished body gives way."""
    monkeypatch.setattr(calls, "BODIES", 1)
    async with made(valkey_url, model, body_max_bytes=100_000) as world:
        large, small = await world.begun(), await world.begun()
        await large.send(request_body=body(b"x" * 80_000))
        await small.send(request_body=body(world.body(user="x" * 30_000), ends=True))
        assert (await large.read()).message.immediate_response.status.code == 503
        assert (await small.read()).endpoints == (world.address, world.address)


async def test_no_worker_is_503_with_retry_after(world: World) -> None:
    for listed in ("10.0.0.9:8000", "", ["10.0.0.9", "10.0.0.10:1"]):
        metadata = {"envoy.lb.subset_hint": {SUBSET: listed}}
        call = await world.begun(metadata=metadata)
        await call.send(request_body=body(world.body(), ends=True))
        told = await call.read()
        assert told.message.immediate_response.status.code == 503
        assert told.set_headers["retry-after"] == b"1"


@pytest.mark.parametrize("listed", ["{address}", "10.0.0.9:8000, {address}", ["127.0.0.1"]])
async def test_a_subset_in_any_message(world: World, listed: Any) -> None:
    told = [text.format(address=world.address) for text in ([listed] if isinstance(listed, str) else listed)]
    metadata = {"envoy.lb.subset_hint": {SUBSET: told if isinstance(listed, list) else told[0]}}
    call = await world.begun()
    await call.send(request_body=body(world.body(), ends=True), metadata=metadata)
    assert (await call.read()).endpoints == (world.address, world.address)


async def test_messages_that_break_the_protocol_end_their_call_alone(world: World) -> None:
    other, _ = await world.placed()
    for fields in ({"request_body": body(b"x")}, {"request_headers": headers()}):
        call = world.gateway.call() if "request_body" in fields else (await world.placed())[0]
        await call.send(**fields)
        assert await call.ended() == grpc.StatusCode.INVALID_ARGUMENT
    call = world.gateway.call()
    await call.send_raw(b"\xff\xff\xff")
    assert await call.ended() == grpc.StatusCode.INVALID_ARGUMENT
    await other.send(response_headers=headers(__status="200"))
    assert (await other.read()).kind == "response_headers"


# ---------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("status", "attributes", "metadata", "outcome"),
    [
        ("503", {}, {}, "unsent"),
        ("413", {}, {}, "unsent"),
        ("404", {}, {}, "failed"),
        ("503", {"upstream.address": "{address}"}, {}, "failed"),
        ("503", {"upstream.address": "10.0.0.9:1"}, {}, "unsent"),
        ("200", {"upstream.address": "10.0.0.9:1"}, {}, "unsent"),
        ("503", {"upstream.address": "{address}", "response.flags": 32.0}, {}, "unsent"),
        ("500", {}, {"x-gateway-destination-endpoint-served": "{address}"}, "failed"),
        ("200", {}, {"x-gateway-destination-endpoint-served": "10.0.0.9:1"}, "unsent"),
    ],
)
async def test_whose_answer_it_is(
    world: World, status: str, attributes: dict[str, Any], metadata: dict[str, Any], outcome: str
) -> None:
    """A gateway's own answer, and that of another engine, are none of the chosen engine's."""
    call, _ = await world.placed()

    def filled(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v.format(address=world.address) if isinstance(v, str) else v for k, v in values.items()}

    more: dict[str, Any] = {}
    if attributes:
        more["attributes"] = {session.FILTER: filled(attributes)}
    if metadata:
        more["metadata"] = {"envoy.lb": filled(metadata)}
    await call.send(response_headers=headers(__status=status), **more)
    await call.read()
    await call.send(response_body=body(b"{}", ends=True))
    assert (await call.read()).piece == (b"{}", True)
    await world.settled(outcome)
    pool = world.server._doors.unready.__self__.all[0]
    assert pool.outliers.verdicts == {}
    assert bool(pool.avoided()) == ("response.flags" in attributes), (
        "an engine out of reach is passed over for a moment"
    )


@pytest.mark.parametrize(("proof", "judged"), [("attributes", True), ("metadata", True), (None, False)])
async def test_an_engine_that_fails_everything_is_judged(world: World, proof: str | None, judged: bool) -> None:
    """Where the gateway tells that the engine gave the answers, they count as at a replica's own port."""
    told = {
        "attributes": {session.FILTER: {"upstream.address": world.address}},
        "metadata": {"envoy.lb": {session.SERVED_KEY: world.address}},
    }
    more: dict[str, Any] = {proof: told[proof]} if proof else {}
    pool = world.server._doors.unready.__self__.all[0]
    for _ in range(outliers.FAILURES):
        call, _ = await world.placed()
        assert pool.outliers.verdicts == {}
        await call.send(response_headers=headers(__status="500", ends=True), **more)
        await call.read()
    assert [*pool.outliers.verdicts.values()] == [False] * judged


async def test_a_gateway_that_cancels(world: World) -> None:
    call, _ = await world.placed()
    call.cancel()
    await world.settled("cancelled")


async def test_a_silent_gateway_keeps_load_for_a_bounded_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = await world.placed()
    monkeypatch.setattr(calls, "SILENT_MAX_S", 0.0)
    await world.settled("cancelled")
    assert await call.ended() == grpc.StatusCode.OK
    assert world.port.streams == 0


async def test_a_silent_gateway_keeps_no_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a call that was never placed, or whose answer has ended."""
    begun, _ = await world.begun(), await world.begun((NONE, NONE))
    done, _ = await world.placed()
    await done.send(response_headers=headers(__status="200", ends=True))
    await done.read()
    await world.settled("finished")
    monkeypatch.setattr(calls, "SILENT_MAX_S", 0.0)
    await poll(lambda: world.port.streams == 0, 10, "no call is open")
    assert await begun.ended() == grpc.StatusCode.OK
    assert await done.ended() == grpc.StatusCode.OK


async def test_long_metadata_are_not_remembered(world: World) -> None:
    [shared] = [
        cell.cell_contents
        for cell in world.port.routes[service.PROCESS].__closure__ or ()
        if isinstance(cell.cell_contents, calls.Calls)
    ]
    for listed in (world.address, f"{world.address}, {'x' * calls.KEPT_METADATA_BYTES}"):
        call = await world.begun(metadata={"envoy.lb.subset_hint": {SUBSET: listed}})
        await call.send(request_body=body(world.body(), ends=True))
        assert (await call.read()).endpoints == (world.address, world.address)
    assert [len(kept) < 200 for kept in shared._subsets] == [True]


async def test_request_max_ends_a_call(valkey_url: str, model: str) -> None:
    """Before its answer begins the client gets a 504; later only the end of the call can break the answer off."""
    async with made(valkey_url, model, request_max_s=1.5) as world:
        before, _ = await world.placed()
        after, _ = await world.placed()
        await after.send(response_headers=headers(__status="200", content_type=EVENTS))
        await after.read()
        told = await before.read()
        assert told.message.immediate_response.status.code == 504
        assert await after.ended() == grpc.StatusCode.UNAVAILABLE
        await world.replica.unloaded()


# ---------------------------------------------------------------- clients


async def test_the_flow_is_that_of_the_fairness_id(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    picking = shared(world).picking
    place = picking.place

    async def noted(call: Any, *rest: Any, **more: Any) -> Any:
        seen.append(call)
        return await place(call, *rest, **more)

    monkeypatch.setattr(picking, "place", noted)
    for given in (
        {"x_gateway_inference_fairness_id": "team-a", "x_slo_ttft_ms": "250", "x_request_timeout_ms": "900"},
        {"x_llm_d_inference_fairness_id": "team-a"},
        {"x_gateway_inference_fairness_id": "team-b"},
    ):
        await world.placed(given=given)
    assert seen[0].flow == seen[1].flow != seen[2].flow
    assert (seen[0].hints.ttft_s, seen[0].patience_s) == (0.25, 0.9)


async def test_clients_keys(valkey_url: str, model: str, tmp_path: Any) -> None:
    """Keys are checked as on the clients' port, and no engine learns one."""
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(json.dumps({"name": "team", "sha256": digest}))
    async with made(valkey_url, model, client_keys_file=str(file), admin_port=1) as world:
        call = await world.begun()
        assert (await call.read()).message.immediate_response.status.code == 401
        _, told = await world.placed(given={"authorization": "Bearer secret", "x_data_parallel_rank": "3"})
        removed = {*told.common.header_mutation.remove_headers}
        assert removed == {"authorization", "x-data-parallel-rank"}


@pytest.mark.parametrize(
    ("settings", "given", "key"),
    [
        ({"worker_api_key": "engines"}, {"x_api_key": "mine"}, b"Bearer engines"),
        ({"worker_api_key": "engines"}, {"authorization": "Bearer mine", "x_api_key": "mine"}, b"Bearer engines"),
        ({}, {"x_api_key": "mine"}, b"Bearer mine"),
        ({}, {"authorization": "Bearer mine", "x_api_key": "other"}, None),
    ],
)
async def test_engines_get_no_keys_of_clients(
    valkey_url: str, model: str, settings: dict[str, str], given: dict[str, str], key: bytes | None
) -> None:
    """They get the headers that they get from a replica's own port: no second key, and no operator's."""
    async with made(valkey_url, model, answer_headers="all", **settings) as world:
        _, told = await world.placed(given={**given, "x_warmfleet_explain": "operator"})
        assert {*told.common.header_mutation.remove_headers} == {"x-api-key", "x-warmfleet-explain"}
        assert told.set_headers.get("authorization") == key


# ---------------------------------------------------------------- health, the end


async def test_health(world: World) -> None:
    for name in ("", "readiness", "liveness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert await world.gateway.health(name) == 1
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await world.gateway.health("other")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    world.server._health.draining = True
    assert await world.gateway.health("liveness") == 1
    assert await world.gateway.health("readiness") == 2
    assert await world.gateway.health("") == 2


async def test_a_stop_lets_open_calls_end(valkey_url: str, model: str) -> None:
    """First not serving, then no new calls; a call that is open ends in peace, and then the replica does."""
    async with made(valkey_url, model, drain_s=0.3, shutdown_grace_s=20.0) as world:
        call, _ = await world.placed()
        await call.send(response_headers=headers(__status="200", content_type=EVENTS))
        await call.read()
        world.replica.server.handle_exit(signal.SIGTERM, None)
        assert await world.gateway.health("") == 2
        late, _ = await world.placed()  # for those that have not noticed
        await late.half_close()
        port = world.port
        await poll(lambda: all(cast("Any", connection)._leaving for connection in port.connections), 10, "GOAWAY")
        await call.send(response_body=body(b"data: [DONE]\n\n"))
        assert (await call.read()).piece == (b"data: [DONE]\n\n", False)
        await call.send(response_body=body(ends=True))
        assert (await call.read()).piece == (b"", True)
        await call.half_close()
        assert await call.ended() == grpc.StatusCode.OK
        await poll(lambda: not port.connections, 10, "the connection is closed")
        await world.replica.unloaded()


async def test_a_stop_settles_calls_that_take_too_long(valkey_url: str, model: str) -> None:
    async with made(valkey_url, model, drain_s=0.0, shutdown_grace_s=1.0) as world:
        call, _ = await world.placed()
        world.replica.server.handle_exit(signal.SIGTERM, None)
        await world.replica.unloaded()
        call.cancel()


async def test_tls_with_the_replicas_certificate(valkey_url: str, model: str, tmp_path: Path) -> None:
    """ALPN h2, and a new certificate once its file changes; kubelets ask for health without TLS."""
    authority = certificate(tmp_path, "authority")
    pair = certificate(tmp_path, "replica", authority)
    port, plain = free_port(), free_port()
    settings: dict[str, Any] = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key), "epp_health_port": plain}
    async with engine(model) as upstream, running(valkey_url, model, upstream.url, epp_port=port, **settings):
        trusted = authority.certificate.read_bytes()
        async with gateway(port, trusted) as client:
            assert await client.health("liveness") == 1
        async with gateway(plain) as client:
            assert await client.health("liveness") == 1
            assert await client.call().ended() == grpc.StatusCode.UNIMPLEMENTED
        other = certificate(tmp_path, "other authority")
        pair.replace(certificate(tmp_path, "replica 2", other))

        async def renewed() -> bool:
            async with gateway(port, other.certificate.read_bytes()) as client:
                try:
                    return await client.health("liveness") == 1
                except grpc.aio.AioRpcError:
                    return False

        await poll(renewed, 15, "the new certificate is used", every_s=0.2)


@asynccontextmanager
async def running(valkey_url: str, model: str, engine_url: str, **settings: Any) -> AsyncIterator[None]:
    """A replica whose ports for HTTP are not asked, because they have TLS."""
    sockets = [
        socket.create_server(("127.0.0.1", port)) for port in (0, settings["epp_port"], settings["epp_health_port"])
    ]
    chosen = Settings(redis_url=valkey_url, models=(model,), static_workers=(engine_url,), admin_port=0, **settings)
    made = server(chosen, Sockets(sockets[:1], (), sockets[1:2], sockets[2:]), None, Timing(files_interval_s=0.1))
    task = asyncio.create_task(made._serve())
    try:
        await poll(lambda: made.started or task.done(), 60, "the replica starts")
        yield
    finally:
        made.should_exit = True
        await task
