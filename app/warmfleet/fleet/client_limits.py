"""The limits of a client's API key, which all replicas enforce together. If a model has several pools, one of them
counts for the client, by the calls in ``ClientCounts`` (lua/client.lua)."""

from __future__ import annotations

import hashlib
import math
import struct
from base64 import urlsafe_b64encode
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from warmfleet.errors import RateLimited, TokensLimited
from warmfleet.fleet.client import argv
from warmfleet.fleet.connection.packing import pack
from warmfleet.protocol.wire import CLIENT_TAG_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet.client import Scripts
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.fleet.connection.packing import Argument

MAX_LIMIT = 4_294_967_295
RETRY_AFTER_S = 1  # seconds after which a client with too many requests in flight may try again
_LIMITS = struct.Struct(">II")
_ADMITTED = b"+"  # added to the packed limits of a request that was admitted before, so must not be refused


@dataclass(frozen=True)
class ClientLimits:
    """The limits of one API key. name: the key's name. concurrency: most requests in flight (0: no limit).
    tokens_per_minute: 0: no limit.

    admitted: an earlier attempt at the same request was within the limits, so this attempt counts, but is not refused.
    """

    name: str
    concurrency: int = 0
    tokens_per_minute: int = 0
    admitted: bool = False

    @cached_property
    def of_admitted(self) -> ClientLimits:
        """The same limits, for a further attempt at a request that was admitted before."""
        return replace(self, admitted=True)

    @cached_property
    def tag(self) -> str:
        """The word for the client in ids of reservations and keys of Redis, which must not reveal the key's name."""
        digest = hashlib.sha256(b"client:" + self.name.encode()).digest()
        return urlsafe_b64encode(digest)[:CLIENT_TAG_LENGTH].decode()

    @cached_property
    def packed(self) -> bytes:
        """The argument ``limits`` of decide, in the protocol of Redis."""
        return pack(self.record)

    @property
    def record(self) -> bytes:
        """The limits as the scripts unpack them."""
        return _LIMITS.pack(self.concurrency, self.tokens_per_minute) + _ADMITTED * self.admitted

    def refusal(self, answer: Sequence[Any], prompt_tokens: int) -> RateLimited:
        """Return the error for the answer LIMITED of decide."""
        _, which, used, wait_ms = answer
        if which == b"CONCURRENCY":
            why = f"{used} requests in flight, of {self.concurrency} that it may have at a time"
            return self._error(RateLimited, why, RETRY_AFTER_S, ClientUse(used, None))
        why = f"used {used:,} of the {self.tokens_per_minute:,} tokens that it may use in a minute"
        why += f", and this request has {prompt_tokens:,} more"
        return self._error(TokensLimited, why, math.ceil(wait_ms / 1_000), ClientUse(None, used))

    def _error(self, kind: type[RateLimited], why: str, seconds: int, use: ClientUse) -> RateLimited:
        headers = {name.decode(): value.decode() for name, value in self.headers(use)}
        error = kind(f"The API key {self.name} has {why}: try again in {seconds} s.", headers)
        error.retry_after_s = seconds
        return error

    def headers(self, use: ClientUse | None) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit headers; -requests counts those in flight. use: the used part; None: unknown."""
        told: list[tuple[bytes, bytes]] = []
        in_flight, tokens = (use.in_flight, use.tokens) if use else (None, None)
        for kind, limit, used in (
            (b"requests", self.concurrency, in_flight),
            (b"tokens", self.tokens_per_minute, tokens),
        ):
            if limit:
                told.append((b"x-ratelimit-limit-" + kind, b"%d" % limit))
            if limit and used is not None:
                told.append((b"x-ratelimit-remaining-" + kind, b"%d" % max(0, limit - used)))
                if kind == b"tokens":
                    told.append((b"x-ratelimit-reset-tokens", b"%.3fs" % (used * 60 / limit)))
        return told


@dataclass(frozen=True, slots=True)
class ClientUse:
    """How much of a client's limits is used, with the present request. None: not known."""

    in_flight: int | None
    tokens: int | None


KEEP_AT_ONCE = 200  # most requests in one call of lua/client.lua


class ClientCounts:
    """Counts a client's requests and tokens in one pool of the model, though all pools may serve the requests.

    name: a reservation's id with the tag of its client at the end. ``scripts`` runs on the keys of that one pool.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def admit(self, name: str, limits: ClientLimits, prompt_tokens: int, on_answer: OnAnswer) -> None:
        """Count a request as in flight, unless a limit refuses it. ``on_answer`` gets the script's raw answer."""
        command = self._command("admit", name, limits.record, prompt_tokens)
        self._scripts.send("client", command, self._scripts.timeouts.request_s, on_answer)

    async def keep(self, names: Sequence[str]) -> None:
        """Keep at most KEEP_AT_ONCE requests counted as in flight for one more lease. Raises FleetUnavailable."""
        await self._scripts.call("client", self._command("keep", *names), self._scripts.timeouts.upkeep_s)

    def end(self, name: str, tokens: int, on_answer: OnAnswer) -> None:
        """End a request's count as in flight, and count its answer's ``tokens``. A repeated call changes nothing."""
        command = self._command("end", name, tokens)
        self._scripts.send("client", command, self._scripts.timeouts.upkeep_s, on_answer, patient=True)

    def _command(self, verb: str, *words: Argument) -> bytes:
        scripts = self._scripts
        args = argv("client", words, prefix=scripts.prefix, verb=verb, lease_ms=scripts.constants.spans.lease_ms)
        return scripts.packed["client"].call(args)
