"""One model as this replica sees it: its workers at the last reading, how prompts are identified, what is open."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from warmfleet.errors import BadRequest, FleetUnavailable, ModelNotFound
from warmfleet.fleet import Ask
from warmfleet.pools.degraded import LastKnown
from warmfleet.pools.fleet_view import MAX_SCHEMES, View
from warmfleet.pools.policy import Switch
from warmfleet.pools.stalled_requests import Tries
from warmfleet.pools.ttft_window import Tail
from warmfleet.prompt import block_hashes as blocks
from warmfleet.prompt import prompt_identity as identity
from warmfleet.prompt import request as prompt
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.popular_prefixes import Uses
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from warmfleet.fleet import Fleet, Renewal
    from warmfleet.fleet.reservations import Outcome
    from warmfleet.pools.degraded import Fallback
    from warmfleet.prompt.block_hashes import Chain, Lora
    from warmfleet.prompt.prefix_trie import Prompt
    from warmfleet.prompt.request import Request

logger = logging.getLogger("warmfleet.pools.pool")

SUSPECT_S = 3.0  # a worker that failed a request is passed over; the fleet needs a TTL to see it
MAX_SUSPECTS = 64
FIRST_READING_S = 2.0
NOT_READ = "The fleet was not read yet: Redis is away or slow."
FALLBACK_BLOCKS = 16  # of the prefix that the fallback's hash looks at


@dataclass(frozen=True, slots=True)
class Shape:
    """A request as a decision needs it. kind: how it was identified: ``exact``, ``engine`` (one told), ``text``,
    ``prefix`` (only its beginning is known) or ``load`` (nothing is); ``reason``: why not all of it.
    ids: every prompt's, if that is ``exact``; ``identity_key`` is what they were made with. barred: workers that
    cannot serve it.
    """

    chains: tuple[Chain, ...]
    prompt_tokens: int
    decode_tokens: int
    kind: str
    reason: str = ""
    prompts: int = 1
    ids: tuple[Prompt, ...] = ()
    identity_key: str = ""
    barred: tuple[str, ...] = ()

    def ask(
        self, reservation: str, pool: Pool, exclude: tuple[str, ...], prefix_tokens: int, order: tuple[str, ...]
    ) -> Ask:
        sizes, name, seed = (self.prompt_tokens, self.decode_tokens), pool.policy.name, 0
        aim_s = pool.tail.in_force_s
        return Ask(reservation, self.chains, *sizes, name, exclude, seed, prefix_tokens, order, aim_s)

    @property
    def prefix(self) -> bytes:
        """What requests with the same beginning have in common: the key of the fallback's hash."""
        return self.chains[0].hashes[: FALLBACK_BLOCKS * 8] if self.chains else b""


class Pool:
    """Everything of one model tag. ``open``: reservations to renew. ``unsettled``: outcomes that Redis
    did not take yet. ``read`` is set once the fleet was read. ``tail``: how long its clients wait. ``uses``: of common
    prefixes."""

    def __init__(
        self, tag: str, fleet: Fleet, fallback: Fallback, policy: str = "cost", objective_s: float = 0.0
    ) -> None:
        self.tag = tag
        self.name = tag.partition("#")[0]
        self.fleet = fleet
        self.fallback = fallback
        self.policy = Switch(policy)
        self.view = View()
        self.open: dict[str, Renewal] = {}
        self.unsettled: dict[str, Outcome] = {}
        self.tries = Tries()
        self.tail = Tail(objective_s)
        self.uses = Uses()
        self.read = asyncio.Event()
        self._suspects: dict[str, float] = {}
        self.last_known = LastKnown(fleet)

    @property
    def contacted(self) -> bool:
        """The fleet was read at least once."""
        return self.read.is_set()

    @property
    def usable(self) -> bool:
        """Some worker is routable, and prompts can be identified as far as the workers let them be."""
        view = self.view
        brought = any(worker.server for worker in view.workers)
        known = view.identity is not None or view.text or not brought
        return known and any(worker.routable for worker in view.workers)

    @property
    def view_age_s(self) -> float:
        return time.monotonic() - self.view.read_at if self.contacted else float("inf")

    def show(self, view: View) -> None:
        """Take a new reading."""
        self.view = view
        self.fleet.block_tokens = {one.scheme.scheme_id: one.scheme.block_tokens for one in view.hashers}
        self.read.set()
        self.last_known.show(view)

    def suspect(self, worker_id: str, seconds: float = SUSPECT_S) -> None:
        """Pass this worker over for a moment: a request just failed there, or it did not answer a check."""
        if worker_id in self._suspects or len(self._suspects) < MAX_SUSPECTS:
            self._suspects[worker_id] = max(self._suspects.get(worker_id, 0.0), time.monotonic() + seconds)

    def suspects(self) -> tuple[str, ...]:
        if not self._suspects:
            return ()
        now = time.monotonic()
        self._suspects = {worker: until for worker, until in self._suspects.items() if until > now}
        return tuple(self._suspects)

    def serves(self, model: str) -> bool:
        """``model`` is this tag's base model, one of its served names, or an adapter of it."""
        return model == self.name or model in self.view.names

    async def shape(self, request: Request, inline_characters: int, expected_output: int) -> Shape:
        """Token ids and block hashes. Never fails: what cannot be known is routed by load, with the reason."""
        try:
            shape = await self._known(request, inline_characters)
        except NotReproducible as why:
            shape = await self._in_part(request, why.reason)
        except Exception as error:  # noqa: BLE001  a bug in reading it must not cost a request that engines can serve
            shape = self._unknown(request, error)
        return self._booked(shape, request, expected_output)

    def _unknown(self, request: Request, error: Exception) -> Shape:
        place = traceback.extract_tb(error.__traceback__)[-1]  # not its message, which may tell the prompt
        logger.error("%s at %s:%s: a prompt is not known", type(error).__name__, place.filename, place.lineno)
        return Shape((), prompt.estimated_tokens(request), 0, "load", "error")

    def _booked(self, shape: Shape, request: Request, expected_output: int) -> Shape:
        one = 0 if len(request.prompts) > 1 else shape.prompt_tokens
        tokens = max((prompt.tokens for prompt in shape.ids), default=one) + max(1, request.max_tokens or 1)
        return replace(
            shape,
            decode_tokens=prompt.decode_tokens(request, shape.prompt_tokens, expected_output),
            prompts=max(1, len(request.prompts)),
            barred=self.view.barred(request.model, tokens),
        )

    def shape_of(self, request: Request, prompts: list[list[int]], kind: str, expected_output: int) -> Shape:
        """For token ids that came another way."""
        chains, tokens = self._chains(self.view, request, max(prompts, key=len)), sum(map(len, prompts))
        return self._booked(Shape(chains, tokens, 0, kind), request, expected_output)

    async def _in_part(self, request: Request, reason: str) -> Shape:
        """By what the prompt certainly begins with, if there is; its tokens are a guess: an image's are not known."""
        view, tokens = self.view, prompt.estimated_tokens(request)
        chains: tuple[Chain, ...] = ()
        if reason == "parts" and view.identity is not None and request.endpoint == "chat":
            try:
                ids, tokens = await view.identity.beginning(request)
                chains = tuple(chain for chain in self._chains(view, request, ids) if chain.hashes)
            except NotReproducible:
                pass
            except Exception as error:  # noqa: BLE001  a bug of ours, as in shape
                return self._unknown(request, error)
        return Shape(chains, max(tokens, 1), 0, "prefix" if chains else "load", reason)

    def _chains(self, view: View, request: Request, ids: list[int]) -> tuple[Chain, ...]:
        lora = _lora(view, request)
        return tuple(hasher.chain(ids, request.salt, lora) for hasher in view.hashers)

    async def _known(self, request: Request, inline_characters: int) -> Shape:
        """Chains, prompt tokens, ids and kind of identity; raises NotReproducible."""
        view = self.view
        if request.unforeseen:
            raise NotReproducible(request.unforeseen)
        if prompt.too_long(request, view.max_model_len):
            raise NotReproducible("too_long")
        if view.identity is None and not view.text:
            raise NotReproducible("no_identity")
        chains: tuple[Chain, ...] = ()
        made: tuple[Prompt, ...] = ()
        tokens, kind, key = 0, "text", ""
        if view.identity is not None:
            known, kind, key = view.identity, "exact", view.identity.key
            lora = _lora(view, request)
            prompts = await known.prompts(request, view.hashers, lora, inline_characters)
            chains = next(one.chains for one in prompts if one.chains or not view.hashers)
            tokens = max(1, sum(one.tokens for one in prompts))
            made = tuple(prompts)
            if len(made) == 1:
                self.uses.note(made[0], key)
        if view.text:
            texts = identity.canonical_text(request)
            chain = blocks.text_chain(longest := max(texts, key=len))
            if view.identity is not None:  # its blocks are worth what they hold, not what text holds mostly
                chain = replace(
                    chain, block_tokens=blocks.text_block_tokens(len(longest), max(one.tokens for one in made))
                )
            chains = (*chains[: MAX_SCHEMES - 1], chain)
            tokens = tokens or sum(blocks.text_tokens(len(text)) for text in texts)
        return Shape(chains, tokens, 0, kind, ids=made, identity_key=key)


def _lora(view: View, request: Request) -> Lora:
    """Name and path of the adapter that the request is for: they are in the hash of each of its blocks."""
    adapter = view.adapters.get(request.model)
    return (request.model, adapter.path) if adapter else None


class Pools:
    """All models of this replica."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.all = tuple(pools)
        self._patience_ends: float | None = None
        self._ready_at = float("inf")

    def unready(self) -> str:
        """What a new replica still lacks; "" once it had it all, or after a TTL: then the fleet lacks it."""
        if not self.contacted:
            return "no contact with Redis yet"
        now = time.monotonic()
        wait = 0.0 if all(pool.usable for pool in self.all) else WORKER_TTL_SECONDS
        self._ready_at = min(self._ready_at, now + wait)
        return "" if self._ready_at <= now else "no worker is routable yet, or its tokenizer is not loaded"

    async def find(self, model: str) -> Pool:
        """The pool that serves ``model``; waits for the first reading if that is still to come.

        Raises ModelNotFound, FleetUnavailable while that is not known, BadRequest if none of several is named.
        """
        if not self.contacted:
            await self._first_reading()
        if not model:
            if len(self.all) == 1:
                return self.all[0]
            raise BadRequest("model is required: this router serves several.", "model")
        for pool in self.all:
            if pool.serves(model):
                return pool
        if not self.contacted:
            raise FleetUnavailable(NOT_READ)
        raise ModelNotFound(f"The model `{model[:200]}` does not exist here.", "model")

    async def _first_reading(self) -> None:
        """All wait together: until FIRST_READING_S after the first of them came."""
        if self._patience_ends is None:
            self._patience_ends = asyncio.get_running_loop().time() + FIRST_READING_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._patience_ends):
                for pool in self.all:
                    await pool.read.wait()

    @property
    def contacted(self) -> bool:
        return all(pool.contacted for pool in self.all)

    async def each(self, work: Callable[[Pool], Awaitable[object]]) -> None:
        """``work`` for every model, whatever becomes of the others; then raises the first failure."""
        failures: list[Exception] = []
        for pool in self.all:
            try:
                await work(pool)
            except Exception as error:  # noqa: BLE001  whatever it is, the other models come first; raised below
                failures.append(error)
        if failures:
            raise failures[0]
