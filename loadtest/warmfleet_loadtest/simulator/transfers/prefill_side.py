"""The side of a transfer that has computed a prompt: it pins the blocks, and lets one decode engine read them once.

NIXL reads another engine's memory and checks nothing. This side knows whether the blocks are still those of the prompt,
and tells the reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.transfers.config import TransferConfig
    from warmfleet_loadtest.simulator.transfers.counts import Counts
    from warmfleet_loadtest.simulator.transfers.faults import Faults
    from warmfleet_loadtest.simulator.transfers.scheduler import TransferScheduler

REMEMBERED = 10_000  # number of latest handed-over prompts of which the engine knows how they ended
HELD, READ, EXPIRED, RELEASED = "held", "read", "expired", "released"


def fingerprint(prompt: Sequence[int]) -> str:
    """Return a digest of a prompt's token ids."""
    return hashlib.sha256(array("I", prompt).tobytes()).hexdigest()


@dataclass(slots=True)
class Pin:
    """A handed-over prompt. readers: engines that have begun to read it. wrong: it was made from wrong blocks."""

    request_id: str
    blocks: list[int]
    prompt: str
    tokens: int
    wrong: bool
    expires: float
    state: str = HELD
    readers: list[str] = field(default_factory=list)


class PrefillSide:
    """Pins prompts, and serves the side channel. A pin ends when its blocks were read, or with its lease."""

    def __init__(
        self, config: TransferConfig, engine_id: str, scheduler: TransferScheduler, counts: Counts, faults: Faults
    ) -> None:
        self.config = config
        self.engine_id = engine_id
        self.port = 0
        self.same: Mapping[str, str] = {}
        self.room_made: Callable[[], None] = lambda: None  # called when a pin has ended
        self._scheduler, self._counts, self._faults = scheduler, counts, faults
        self.names: dict[Request, str] = {}  # of transfers, by routers
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._params: dict[Request, dict[str, Any]] = {}
        self._free_at = 0.0  # when the link has sent all that was asked for so far
        scheduler.keep = self._keep

    @property
    def pinned(self) -> list[Pin]:
        return [pin for pin in self._pins.values() if pin.state == HELD]

    def take_params(self, request: Request) -> dict[str, Any] | None:
        """Return the parameters of a finished prefill leg, once."""
        self.names.pop(request, None)
        return self._params.pop(request, None)

    def _keep(self, request: Request, blocks: list[int]) -> None:
        now = asyncio.get_running_loop().time()
        name = self.names.get(request)
        handed = name or f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        pin = Pin(
            handed,
            blocks,
            fingerprint(request.prompt),
            request.tokens - 1,
            request.wrong,
            now + self.config.lease_s,
        )
        self._pins[handed] = pin
        while len(self._pins) > REMEMBERED and next(iter(self._pins.values())).state != HELD:
            self._pins.popitem(last=False)
        self._counts.prefilled += 1
        self._look_at(pin)
        if name is not None:
            return
        self._params[request] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": handed,
            "remote_host": self.config.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": pin.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.cached_tokens,
        }

    def _look_at(self, pin: Pin) -> None:
        """End a pin whose lease has ended, else look again then."""
        loop = asyncio.get_running_loop()
        if pin.state != HELD:
            return
        if pin.expires <= loop.time():
            self._counts.expired += 1
            self._end(pin, EXPIRED)
        else:
            loop.call_at(pin.expires + 0.001, self._look_at, pin)

    def _end(self, pin: Pin, state: str) -> None:
        if pin.state == HELD:
            pin.state = state
            self._scheduler.unpin(pin.blocks)
            self.room_made()

    # ------------------------------------------------ side channel

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faults.gate])
        app.add_routes([web.post("/handshake", self._handshake), web.post("/heartbeat", self._heartbeat)])
        app.add_routes([web.post("/read", self._read), web.post("/release", self._release)])
        return app

    async def _handshake(self, _http: web.Request) -> web.Response:
        await asyncio.sleep(self._faults.handshake_s)
        return web.json_response({"same": dict(self.same)})

    async def _heartbeat(self, http: web.Request) -> web.Response:
        pin = self._pins.get((await http.json())["request"])
        if pin is not None and pin.state == HELD:
            extended = asyncio.get_running_loop().time() + self.config.lease_s * 2 / 3
            pin.expires = max(pin.expires, extended)
        return web.json_response({})

    async def _release(self, http: web.Request) -> web.Response:
        """End a pin whose blocks nobody will read."""
        if pin := self._pins.get((await http.json())["request"]):
            self._end(pin, RELEASED)
        return web.json_response({})

    async def _read(self, http: web.Request) -> web.Response:
        """Let an engine read blocks; answer when the link has sent them. violation: why they are wrong, else empty."""
        ask = await http.json()
        await self._faults.reach("read")
        if ask["engine_id"] != self.engine_id:
            return web.json_response({"violation": "unknown_engine"}, status=409)
        pin = self._pins.get(ask["request"])
        if self.config.names_transfers and (pin is None or pin.state == EXPIRED):
            return web.json_response({}, status=409)  # this side writes, so the other one computes the prompt
        violation = self._verdict(pin, ask)
        if pin is not None:
            pin.readers.append(ask["by"])
        await self._sent(ask["bytes"])
        if pin is None:
            return web.json_response({"violation": violation, "wrong": True})
        if pin.state == EXPIRED:
            self._counts.late += 1
            violation = violation or "expired"  # before, or while the blocks were sent
        self._end(pin, READ)
        return web.json_response({"violation": violation, "wrong": bool(violation) or pin.wrong})

    @staticmethod
    def _verdict(pin: Pin | None, ask: Mapping[str, Any]) -> str:
        if pin is None:
            return "unknown_request"
        if pin.readers:
            return "twice" if ask["by"] in pin.readers else "two_engines"
        if pin.state == RELEASED:  # by a decode engine that was given the parameters
            return "twice"
        return "" if ask["prompt"] == pin.prompt and ask["blocks"] == len(pin.blocks) else "prompt"

    async def _sent(self, count: int) -> None:
        """Wait until the link has sent these bytes, behind all that was asked for before."""
        now = asyncio.get_running_loop().time()
        speed = self._faults.bytes_per_s or self.config.link.bytes_per_s
        self._free_at = max(now, self._free_at) + count / speed
        await asyncio.sleep(self._free_at - now + self.config.link.setup_s)
