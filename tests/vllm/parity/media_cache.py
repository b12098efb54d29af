"""Finds the pictures that real vLLM uses for a request, without an engine core. It runs in vLLM's environment.

A request goes through the models and handlers of vLLM's server, its cache of processed media
there, and that of its engine core.
"""

from __future__ import annotations

import asyncio
import functools
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COLOURS = ("red", "green", "blue")


class Engine:
    """Both halves of one engine, as far as they look at media."""

    def __init__(self, model: str) -> None:
        from tests.vllm.parity.oracle import render_state
        from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
        from vllm.multimodal.cache.factories import engine_receiver_cache_from_config

        self.state, config = render_state(model, ["--max-model-len", "4096"])
        self.core_cache = engine_receiver_cache_from_config(config)
        self.pictures: list[str] = []
        client: Any = SimpleNamespace(
            errored=False,
            check_admission=lambda _n: None,
            generate=self._generate,
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8)),
            renderer=self.state.online_renderer.renderer,
            input_processor=None,
            model_config=config.model_config,
        )
        self.state.serving_tokens = ServingTokens(
            client, self.state.openai_serving_models, self.state.online_renderer, request_logger=None
        )

    async def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return ``pictures``, or ``refused`` with vLLM's reason."""
        self.pictures = []
        try:
            made = await self._served(path, body | {"model": self.state.args.model})
        except Exception as error:  # noqa: BLE001  the server would answer 400 or 500
            return {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
        if hasattr(made, "error"):
            return {"refused": str(made.error.message)[:200]}
        return {"pictures": self.pictures}

    async def _served(self, path: str, body: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

        renderer = self.state.online_renderer
        if path == "/inference/v1/generate":
            return await self.state.serving_tokens.serve_tokens(GenerateRequest.model_validate(body))
        if path == "/v1/chat/completions/render":
            made = await self.state.serving_render.render_chat_request(ChatCompletionRequest.model_validate(body))
            for item in made.features.kwargs_data["image"] if getattr(made, "features", None) else ():
                self._look_at(decoded(item))
            return made
        if path == "/v1/responses":
            made = await renderer.render_responses(
                ResponsesRequest.model_validate(body), previous_messages=None, previous_response_outputs=None
            )
            inputs = [made.engine_input] if hasattr(made, "engine_input") else made
        elif path == "/v1/chat/completions/batch":
            batch = BatchChatCompletionRequest.model_validate(body)
            chats = [batch.to_chat_completion_request(messages) for messages in batch.messages]
            inputs = [rendered for chat in chats for rendered in (await renderer.render_chat(chat))[1]]
        else:
            made = await renderer.render_chat(ChatCompletionRequest.model_validate(body))
            inputs = made[1] if isinstance(made, tuple) else made
        if isinstance(inputs, list):
            for rendered in inputs:
                self._core(rendered)
        return inputs

    async def _generate(self, engine_input: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """The input that ``/inference/v1/generate`` hands to the engine core."""
        from vllm.outputs import RequestOutput

        self._core(engine_input)
        yield RequestOutput("r", None, [1], None, outputs=[], finished=True)

    def _core(self, engine_input: Any) -> None:
        hashes = engine_input.get("mm_hashes", {})
        for modality, items in engine_input.get("mm_kwargs", {}).items():
            for item, name in zip(items, hashes[modality], strict=True):
                self._look_at(self.core_cache.get_and_update_item(item, name))

    def _look_at(self, item: Any) -> None:
        red, green, blue = item["pixel_values"].data.float().mean(dim=(-2, -1)).flatten().tolist()
        self.pictures.append(max(zip((red, green, blue), COLOURS, strict=True))[1])


def decoded(item: str) -> Any:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    return decode_mm_kwargs_item(item)


@functools.cache
def engine(model: str) -> Engine:
    return Engine(model)


def looked_at(model: str, path: str, body: str) -> dict[str, Any]:
    """Return the colours of the pictures that the engine would look at, or the reason why vLLM refuses the request."""
    return asyncio.get_event_loop().run_until_complete(engine(model).answer(path, json.loads(body)))
