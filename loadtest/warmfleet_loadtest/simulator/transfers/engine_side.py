"""Transfers of one engine, as its API and its core use them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.simulator.scheduler import Leg
from warmfleet_loadtest.simulator.transfers.counts import Counts
from warmfleet_loadtest.simulator.transfers.decode_side import DecodeSide, Remote
from warmfleet_loadtest.simulator.transfers.prefill_side import PrefillSide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet_loadtest.simulator.engine_core import EngineCore
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.transfers.config import TransferConfig
    from warmfleet_loadtest.simulator.transfers.faults import Faults
    from warmfleet_loadtest.simulator.transfers.scheduler import TransferScheduler
    from warmfleet_worker.protocol.transfer import Transfer


class FatalParamsError(Exception):
    """``kv_transfer_params`` that end the engine."""


class Transfers:
    """Both sides of an engine. same: what partners must have in common beside the version, by name."""

    def __init__(
        self,
        config: TransferConfig,
        core: EngineCore,
        scheduler: TransferScheduler,
        faults: Faults,
        same: Mapping[str, str],
    ) -> None:
        self.config, self.faults, self.counts = config, faults, Counts()
        self.engine_id = config.engine_id or str(uuid.uuid4())
        self._scheduler = scheduler
        self._same = same
        self.prefill = PrefillSide(config, self.engine_id, scheduler, self.counts, faults)
        self.decode = DecodeSide(config, self.engine_id, scheduler, self.counts, faults)
        self.prefill.room_made = self.decode.room_made = core.wake
        self.decode.fail = core.fail
        self.prefill.same = self.decode.same = dict(self.announced().same)
        scheduler.spoilt = self._spoilt

    def announced(self) -> Transfer:
        """Return what the engine tells the fleet."""
        return self.config.announced(self.engine_id, self.prefill.port, self._same)

    async def begin(self, params: Mapping[str, Any] | None, requests: list[Request], *, exact: bool) -> None:
        """Give the sequences of a request their leg, before the core gets them. exact: no token ends the answer.

        Raises FatalParamsError.
        """
        if params is None:
            return
        role = self.config.role
        if params.get("do_remote_prefill"):
            remote = self._remote(params)
            self._check_role(role == "kv_producer", requests)
            if remote is None:
                raise self._fatal("incomplete", requests)
            if remote.blocks and -(-requests[0].prompt_tokens // self._scheduler.limits.block_tokens) > remote.blocks:
                raise self._fatal("longer_prompt", requests)
            told = params.get("remote_prefill_cached_tokens")
            for request in requests:
                request.prefill_cached = told if isinstance(told, int) else None
                self.decode.expect(request, remote)
        elif params.get("do_remote_decode"):
            self._check_role(role == "kv_consumer", requests)
            if not exact:
                self.counts.violation("may_end", requests[0].request_id)
            for request in requests:
                request.leg = Leg.PREFILL
                if self.config.names_transfers:
                    self.prefill.names[request] = str(params.get("transfer_id") or "")
            await self.faults.reach("prefill")

    def refused(self, params: Mapping[str, Any] | None) -> None:
        """Free the blocks of a decode leg that the API server refuses, as vLLM does once the body is valid."""
        remote = self._remote(params) if params else None
        if remote is not None:
            self.decode.release(remote)

    def over(self, requests: list[Request]) -> None:
        """Note that a request has been answered, or was given up."""
        for request in requests:
            self.decode.forget(request)
            self.prefill.take_params(request)

    def as_dict(self) -> dict[str, Any]:
        """Return counters and pins, for tests."""
        pinned = self.prefill.pinned
        told = {"role": self.config.role, "engine_id": self.engine_id, "side_channel": self.prefill.port}
        told |= {"pinned_requests": len(pinned), "pinned_blocks": sum(len(pin.blocks) for pin in pinned)}
        return told | self.counts.as_dict()

    def _remote(self, params: Mapping[str, Any]) -> Remote | None:
        return Remote.named(params) if self.config.names_transfers else Remote.read(params)

    def _check_role(self, wrong: bool, requests: list[Request]) -> None:
        if wrong:
            self.counts.violation("role", requests[0].request_id)

    def _fatal(self, kind: str, requests: list[Request]) -> FatalParamsError:
        self.counts.violation(kind, requests[0].request_id)
        return FatalParamsError(kind)

    def _spoilt(self, _request: Request) -> None:
        self.counts.wrong_answers += 1
