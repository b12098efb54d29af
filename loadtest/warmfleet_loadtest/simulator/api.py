"""The simulated engine's HTTP API: vLLM's paths, and some for tests only.

For tests are ``/sim/table``, ``/sim/reset``, and with transfers ``/sim/transfers`` and ``/sim/faults``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import orjson
from aiohttp import web

from warmfleet_loadtest.simulator import answers
from warmfleet_loadtest.simulator.exposition import metrics_text
from warmfleet_loadtest.simulator.openai_request import RefusedError, for_model, not_imitated, parse
from warmfleet_loadtest.simulator.scheduler import Leg
from warmfleet_loadtest.simulator.transfers.engine_side import FatalParamsError
from warmfleet_loadtest.simulator.transfers.faults import FaultError
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from warmfleet_loadtest.simulator.openai_request import OpenAIRequest
    from warmfleet_loadtest.simulator.scheduler import Output, Request, Scheduler
    from warmfleet_loadtest.simulator.step_costs import StepCosts
    from warmfleet_loadtest.simulator.transfers.engine_side import Transfers
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

MAX_BODY_BYTES = 64 * 1024 * 1024
VERSION = "0.1.0-sim"
DEATH_S = 0.01  # time between an answer about a fatal request and the engine's end
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass(frozen=True, slots=True)
class Served:
    """The names under which an engine serves its model (models), and the bearer token that requests need (api_key).

    Without api_key no token is needed.
    """

    models: tuple[str, ...]
    api_key: str | None = None


class Core(Protocol):
    """Computes requests: an ``EngineCore``. scheduler: its limits, cache and counters."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def costs(self) -> StepCosts: ...
    @property
    def busy_s(self) -> float: ...
    async def submit(self, request: Request, sink: asyncio.Queue[Output]) -> None: ...
    def abort(self, request: Request) -> None: ...


class Api:
    """The request handlers of one engine. transfers: None if it hands blocks to no other engine."""

    def __init__(
        self, core: Core, tokenizer: PromptTokenizer, served: Served, transfers: Transfers | None = None
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.served = served
        self.transfers = transfers
        self.started = int(time.time())

    def app(self) -> web.Application:
        outer = [self.transfers.faults.gate] if self.transfers else []
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*outer, self._guard])
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.post("/v1/chat/completions/render", self.render),
                web.post("/tokenize", self.tokenize),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.post("/reset_prefix_cache", self.reset),
                web.get("/sim/table", self.table),
                web.post("/sim/reset", self.reset),
            ]
        )
        if self.transfers is not None:
            app.add_routes([web.get("/sim/transfers", self.counts), web.post("/sim/faults", self.faults)])
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        key = self.served.api_key
        if key and request.path.startswith("/v1/") and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except RefusedError as error:
            return web.json_response(answers.error_body(error), status=error.status)
        except web.HTTPNotFound:
            unknown = RefusedError(f"this simulated engine does not imitate {request.path}", 404)
            return web.json_response(answers.error_body(unknown), status=unknown.status)

    # ------------------------------------------------ prompts

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer("cmpl", request)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer("chatcmpl", request)

    async def _answer(self, kind: str, http: web.Request) -> web.StreamResponse:
        ask = parse(kind, await http.read(), http.headers.get("X-Request-Id"), self.tokenizer)
        if ask.transfer and self.transfers is None:
            raise not_imitated("kv_transfer_params")
        ask, requests = self._admitted(ask)
        sink: asyncio.Queue[Output] = asyncio.Queue()
        try:
            if self.transfers is not None:
                await self.transfers.begin(ask.transfer, requests, exact=ask.exact and not ask.stop)
            try:
                for request in requests:
                    await self.core.submit(request, sink)
            except ValueError as error:
                raise RefusedError(str(error)) from error
            return await self._write(http, answers.Writer(ask, self.tokenizer, requests), sink, requests)
        except FatalParamsError as error:
            raise self._dead(str(error)) from error
        finally:  # also when the client hangs up, for that cancels the handler
            for request in requests:
                self.core.abort(request)
            if self.transfers is not None:
                self.transfers.over(requests)

    def _admitted(self, ask: OpenAIRequest) -> tuple[OpenAIRequest, list[Request]]:
        """Return the request and its sequences. Raises RefusedError, after a transfer's other engine was told."""
        try:
            ask = for_model(ask, self.served.models)
            return ask, ask.requests(self.tokenizer, self.core.scheduler.limits.max_model_len)
        except RefusedError:
            if self.transfers is not None:
                self.transfers.refused(ask.transfer)
            raise

    def _dead(self, reason: str) -> RefusedError:
        """End the engine after this answer."""
        if self.transfers is not None:
            asyncio.get_running_loop().call_later(DEATH_S, self.transfers.faults.die)
        return RefusedError(f"EngineCore encountered an issue: {reason}", 500)

    async def _write(
        self, http: web.Request, writer: answers.Writer, sink: asyncio.Queue[Output], requests: list[Request]
    ) -> web.StreamResponse:
        """Return the answer, whole or as a stream, when all its sequences are finished."""
        stream = web.StreamResponse(headers=EVENTS) if writer.ask.stream else None
        if stream is not None:
            await stream.prepare(http)
        first, open_sequences = True, len(requests)
        while open_sequences:
            output = await sink.get()
            if output.failed:
                return await self._failed(writer, stream, first=first)
            if first:
                await asyncio.sleep(self.core.costs.first_token_s)
            first = False
            open_sequences -= output.finished
            if stream is not None:
                await stream.write(writer.chunk(output))
        if stream is None:
            return await self._whole(http, writer, requests[0])
        await stream.write((writer.usage_chunk() if writer.ask.usage else b"") + answers.DONE)
        await stream.write_eof()
        return stream

    async def _whole(self, http: web.Request, writer: answers.Writer, request: Request) -> web.Response:
        if self.transfers is None:
            return web.Response(body=writer.whole(), content_type="application/json")
        params = self.transfers.prefill.take_params(request)
        answer = web.Response(body=writer.whole(kv_transfer_params=params), content_type="application/json")
        if request.leg is Leg.PREFILL:
            await answer.prepare(http)
            await answer.write_eof()
            await self.transfers.faults.reach("answered")
        return answer

    async def _failed(
        self, writer: answers.Writer, stream: web.StreamResponse | None, *, first: bool
    ) -> web.StreamResponse:
        """End an answer that the engine gave up. Raises RefusedError if it is not streamed."""
        error = RefusedError("Internal server error", 500)
        if stream is None:
            raise error
        await stream.write(writer.failure(error, first=first))
        await stream.write_eof()
        return stream

    async def render(self, http: web.Request) -> web.Response:
        """Return the token ids of a chat, the only field of vLLM's answer that routers need."""
        return web.json_response({"token_ids": self._ids(await http.read())})

    async def tokenize(self, http: web.Request) -> web.Response:
        ids = self._ids(await http.read())
        limit = self.core.scheduler.limits.max_model_len
        return web.json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    def _ids(self, data: bytes) -> list[int]:
        try:
            body = orjson.loads(data)
            return (
                self.tokenizer.chat_ids(body) if "messages" in body else self.tokenizer.completion_ids(body["prompt"])
            )
        except (orjson.JSONDecodeError, PromptError, KeyError, TypeError) as error:
            raise RefusedError(f"neither a prompt nor messages: {error}") from error

    # ------------------------------------------------ about the engine

    async def models(self, _http: web.Request) -> web.Response:
        limit = self.core.scheduler.limits.max_model_len
        head = {"object": "model", "created": self.started, "owned_by": "vllm", "parent": None, "max_model_len": limit}
        data = [{"id": name, "root": self.served.models[0], **head} for name in self.served.models]
        return web.json_response({"object": "list", "data": data})

    async def health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _http: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def metrics(self, _http: web.Request) -> web.Response:
        counts = self.transfers.counts if self.transfers else None
        text = metrics_text(self.core.scheduler, self.served.models[0], self.core.busy_s, counts)
        return web.Response(text=text)

    async def counts(self, _http: web.Request) -> web.Response:
        """Return counters of transfers: violations by kind, wrong answers, pinned blocks."""
        return web.json_response(self.transfers.as_dict() if self.transfers else {})

    async def faults(self, http: web.Request) -> web.Response:
        """Order a fault (see ``Faults.order``)."""
        try:
            order = orjson.loads(await http.read())
            if self.transfers is not None:
                self.transfers.faults.order(order)
        except (orjson.JSONDecodeError, FaultError) as error:
            raise RefusedError(str(error)) from error
        return web.json_response({})

    async def table(self, _http: web.Request) -> web.Response:
        """Return every block hash in the cache. The fleet's index must have exactly these for this engine."""
        held = sorted(block_hash.hex() for block_hash in self.core.scheduler.pool.held())
        return web.json_response({"count": len(held), "hashes": held})

    async def reset(self, _http: web.Request) -> web.Response:
        done = self.core.scheduler.pool.reset()
        return web.json_response({"reset": done}, status=200 if done else 409)
