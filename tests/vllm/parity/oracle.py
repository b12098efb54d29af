"""Prompt ids and block hashes of requests by real vLLM, without an engine. It runs in vLLM's own environment.

Requests go through vLLM's request models and the handlers of its GPU-less render server; hashes come from its own
request hasher.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

HASH_BYTES = 8


def render_state(model: str, arguments: list[str]) -> tuple[Any, Any]:
    """Return the state and the configuration of vLLM's render server for one model folder."""
    from starlette.datastructures import State
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm import AsyncEngineArgs

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *arguments])
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(model_config=engine_args.create_model_config())
    state = State()
    asyncio.get_event_loop().run_until_complete(init_render_app_state(config, state, args))
    return state, config


class Oracle:
    """Renders requests for one model as vLLM does."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        self.state, self.config = render_state(model, arguments)
        self._media: list[list[Any]] = []  # the images of each prompt of a request
        # The render server's answer has no room for images that share a token, as two of Gemma 3 do side by side.
        self.state.serving_render._extract_mm_features = self._note

    def _note(self, rendered: Any, **_: Any) -> None:
        """Note the offset, the length and the identifier of each image in a rendered prompt."""
        places, items = (rendered.get(name, {}).get("image", []) for name in ("mm_placeholders", "mm_hashes"))
        self._media.append([[place.offset, place.length, item] for place, item in zip(places, items, strict=True)])

    def announced(self) -> dict[str, Any]:
        """Return the facts that the plugin's server half sends to routers, made by the plugin's own code."""
        from warmfleet_worker.vllm_hooks import api_server

        tokenizer = self.state.online_renderer.renderer.get_tokenizer()
        artifacts = api_server.artifacts(tokenizer, self.state, self.config.model_config)
        return {
            "artifacts": {name: base64.b64encode(data).decode() for name, data in artifacts.items()},
            "facts": api_server.facts(tokenizer, self.state, self.config),
        }

    def answer(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return ``prompts`` (token ids, and hashes by scheme in base64), or ``refused`` with vLLM's reason."""
        try:
            prompts = asyncio.get_event_loop().run_until_complete(self._render(line["endpoint"], line["body"]))
        except Exception as error:  # noqa: BLE001  the server would answer 400 or 500
            return {"refused": f"{type(error).__name__}: {str(error)[:300]}"}
        if isinstance(prompts, str):
            return {"refused": prompts}
        salt, lora = line["body"].get("cache_salt"), line.get("lora")
        hashes = [[hashed(ids, scheme, salt, lora, media) for scheme in line["schemes"]] for ids, media in prompts]
        return {"prompts": [ids for ids, _ in prompts], "media": [media for _, media in prompts], "hashes": hashes}

    async def _render(self, endpoint: str, body: dict[str, Any]) -> list[tuple[list[int], list[Any]]] | str:
        """Return each prompt's token ids, and its images with their places; or vLLM's reason for a refusal."""
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        body = body | {"model": self.state.args.model}
        serving, self._media = self.state.serving_render, []
        if endpoint == "chat":
            made = await serving.render_chat_request(ChatCompletionRequest.model_validate(body))
        elif endpoint == "messages":
            made = await serving.render_messages_request(AnthropicMessagesRequest.model_validate(body))
        elif endpoint == "responses":
            made = await serving.render_responses_request(ResponsesRequest.model_validate(body))
        else:
            made = await serving.render_completion_request(CompletionRequest.model_validate(body))
        if hasattr(made, "error"):
            return str(made.error.message)[:300]
        prompts = made if isinstance(made, list) else [made]
        return [(list(item.token_ids), media) for item, media in zip(prompts, self._media, strict=True)]


def hashed(ids: list[int], scheme: list[Any], salt: str | None, lora: list[str] | None, media: list[Any]) -> str:
    """Return the last 8 bytes of every block hash of this prompt, in base64. scheme: [algorithm, tokens]."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(scheme[0])
    kv_cache_utils.init_none_hash(function)
    request = Request(
        request_id="r",
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        cache_salt=salt,
        mm_features=[
            MultiModalFeatureSpec(None, "image", item.encode().decode(), PlaceholderRange(offset, length), item)
            for offset, length, item in media
        ],
        block_hasher=kv_cache_utils.get_request_block_hasher(scheme[1], function),
    )
    return base64.b64encode(b"".join(value[-HASH_BYTES:] for value in request.block_hashes)).decode()


def none_hashes(algorithms: list[str]) -> dict[str, str]:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    found = {}
    for algorithm in algorithms:
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        found[algorithm] = kv_cache_utils.NONE_HASH.hex()
    return found


#: The models of the last ``begin``, by name.
oracles: dict[str, Oracle] = {}


def begin(models: dict[str, tuple[str, list[str]]], algorithms: list[str]) -> dict[str, Any]:
    """Return what our plugin would announce for every model, by its folder and arguments, and the roots of hashes."""
    oracles.clear()
    oracles.update({name: Oracle(folder, arguments) for name, (folder, arguments) in models.items()})
    announced = {name: oracle.announced() for name, oracle in oracles.items()}
    return {"none_hashes": none_hashes(algorithms), "models": announced}


def answers(model: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [oracles[model].answer(line) for line in lines]
