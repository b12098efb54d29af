"""The side of a transfer that fetches a computed prompt, into the blocks that its scheduler has taken for a request."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from warmfleet_loadtest.simulator.scheduler import Leg
from warmfleet_loadtest.simulator.transfers.prefill_side import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.transfers.config import TransferConfig
    from warmfleet_loadtest.simulator.transfers.counts import Counts
    from warmfleet_loadtest.simulator.transfers.faults import Faults
    from warmfleet_loadtest.simulator.transfers.scheduler import TransferScheduler

NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
NEEDED_NAMED = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
RELEASE_S = 5.0  # longest time for the message that a prompt is not needed


class LoadError(Exception):
    """The blocks cannot be had. violation: a name of VIOLATIONS, if that is somebody's mistake."""

    def __init__(self, violation: str = "") -> None:
        super().__init__(violation)
        self.violation = violation


@dataclass(frozen=True, slots=True)
class Remote:
    """Where the blocks of a request are: what ``kv_transfer_params`` say. blocks: their number; 0: not told."""

    engine_id: str
    request_id: str
    url: str
    blocks: int

    @classmethod
    def read(cls, params: Mapping[str, Any]) -> Remote | None:
        """Read the parameters of a decode leg; None if some are missing."""
        if not all(params.get(name) for name in NEEDED):
            return None
        url = f"http://{params['remote_host']}:{params['remote_port']}"
        blocks = len(params["remote_block_ids"][0])
        return cls(str(params["remote_engine_id"]), str(params["remote_request_id"]), url, blocks)

    @classmethod
    def named(cls, params: Mapping[str, Any]) -> Remote | None:
        """Read the parameters of a decode leg with Mooncake; None if some are missing."""
        if not all(params.get(name) for name in NEEDED_NAMED):
            return None
        return cls(str(params["remote_engine_id"]), str(params["transfer_id"]), str(params["remote_bootstrap_addr"]), 0)


class DecodeSide:
    """Fetches blocks. fail: called with a request that it gives up; room_made: when blocks have come."""

    def __init__(
        self, config: TransferConfig, engine_id: str, scheduler: TransferScheduler, counts: Counts, faults: Faults
    ) -> None:
        self.config = config
        self.engine_id = engine_id
        self.same: Mapping[str, str] = {}
        self.fail: Callable[[Request], None] = lambda _request: None
        self.room_made: Callable[[], None] = lambda: None
        self._scheduler, self._counts, self._faults = scheduler, counts, faults
        self._remotes: dict[Request, Remote] = {}
        self._tasks: dict[Request, list[asyncio.Task[None]]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._known: set[str] = set()  # engines with which a handshake was made
        self._free_at = 0.0  # when the link has received all that was asked for so far
        self._http: aiohttp.ClientSession | None = None
        scheduler.fetch = self._fetch

    async def close(self) -> None:
        for tasks in self._tasks.values():
            for task in tasks:
                task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def expect(self, request: Request, remote: Remote) -> None:
        """Note where the blocks of a request are, before its scheduler gets it; keep their lease from then on."""
        request.leg = Leg.DECODE
        self._remotes[request] = remote
        self._tasks[request] = [asyncio.create_task(self._keep_lease(remote))]

    def forget(self, request: Request) -> None:
        """Note that a request has ended. If its blocks have not come, the other engine is told to free them."""
        for task in self._tasks.pop(request, []):
            task.cancel()
        if remote := self._remotes.pop(request, None):
            self.release(remote)

    def release(self, remote: Remote) -> None:
        """Tell the other engine that nobody will read the blocks, without waiting for it."""
        task = asyncio.create_task(self._release(remote))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, remote: Remote) -> None:
        try:
            await self._post(remote, "release", {"request": remote.request_id}, RELEASE_S)
        except LoadError:
            self._counts.failed_notifications += 1

    async def _keep_lease(self, remote: Remote) -> None:
        """Extend the lease. As in vLLM, nothing is sent to an engine before the handshake with it, nor by Mooncake."""
        while not self.config.names_transfers:
            if remote.engine_id in self._known:
                with contextlib.suppress(LoadError):
                    await self._post(remote, "heartbeat", {"request": remote.request_id}, self.config.lease_s)
            await asyncio.sleep(self.config.lease_s / 6)

    # ------------------------------------------------ the transfer

    def _fetch(self, request: Request, held: int) -> None:
        self._tasks[request].append(asyncio.create_task(self._load(request, held)))

    async def _load(self, request: Request, held: int) -> None:
        """Fetch the blocks that are not held here; go on with the request by the failure policy if that fails."""
        remote, local_tokens = self._remotes[request], request.computed
        try:
            await self._shake_hands(remote)
            wrong = await self._read(request, remote, held)
        except LoadError as error:
            self._counts.failed_transfers += 1
            if error.violation:
                self._counts.violation(error.violation, request.request_id)
            self._count_sources(request, local_tokens, 0)
            if not self.config.recomputes:
                self.fail(request)
                return
            self._counts.recomputed += 1
            self._scheduler.loaded(request, came=False)
        else:
            del self._remotes[request]
            self._count_sources(request, local_tokens, request.prompt_tokens - local_tokens)
            self._scheduler.loaded(request, came=True, wrong=wrong)
        self._tasks[request][0].cancel()
        self.room_made()

    def _count_sources(self, request: Request, local: int, remote: int) -> None:
        by_source = self._counts.by_source
        by_source["local_cache_hit"] += local
        by_source["external_kv_transfer"] += remote
        by_source["local_compute"] += request.prompt_tokens - local - remote

    async def _shake_hands(self, remote: Remote) -> None:
        """Compare settings. An address where nobody answers costs as long as in vLLM."""
        if remote.engine_id in self._known:
            return
        loop = asyncio.get_running_loop()
        limit_s = self.config.link.handshake_s
        ends = loop.time() + limit_s
        try:
            there = await self._post(remote, "handshake", {}, limit_s)
        except LoadError:
            await asyncio.sleep(ends - loop.time())
            raise
        if there["same"] != self.same:
            raise LoadError("settings")
        self._known.add(remote.engine_id)

    async def _read(self, request: Request, remote: Remote, held: int) -> bool:
        """Fetch the blocks behind those that are held. Return whether they are wrong."""
        loop, size = asyncio.get_running_loop(), self._scheduler.limits.block_tokens
        started = loop.time()
        blocks = -(-request.prompt_tokens // size)
        count = (blocks - held) * size * self.config.link.token_bytes
        self._free_at = max(started, self._free_at) + count / self.config.link.bytes_per_s
        received = self._free_at + self.config.link.setup_s
        ask = {"engine_id": remote.engine_id, "request": remote.request_id, "by": self.engine_id, "bytes": count}
        ask |= {"prompt": fingerprint(request.prompt), "blocks": blocks}
        verdict = await self._post(remote, "read", ask)
        await asyncio.sleep(received - loop.time())
        self._counts.transfers += 1
        self._counts.bytes += count
        self._counts.seconds += loop.time() - started
        if verdict["violation"]:
            self._counts.violation(verdict["violation"], request.request_id)
        return bool(verdict["wrong"])

    async def _post(self, remote: Remote, path: str, body: Mapping[str, Any], limit_s: float | None = None) -> Any:
        """Ask the side channel. limit_s: None: wait for ever, as vLLM does for blocks. Raises LoadError."""
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        limit = aiohttp.ClientTimeout(limit_s, connect=self.config.link.handshake_s)
        try:
            async with self._http.post(f"{remote.url}/{path}", json=body, timeout=limit) as answer:
                told = await answer.json()
                if answer.status != 200:
                    raise LoadError(told.get("violation", ""))
                return told
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise LoadError from error
