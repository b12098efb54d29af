"""What vLLM's API server knows and a router needs: effective tokenizer, chat template, facts, address."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from typing import Any

from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher, listens, worker_url


def start_server_half(engine_client: Any, state: Any, redis_url: str, model: str) -> ServerPublisher | None:
    """Announce this API server; of several API server processes of one server only the first does."""
    from vllm.version import __version__

    args, vllm_config = state.args, engine_client.vllm_config
    if getattr(vllm_config.parallel_config, "_api_process_rank", 0) > 0:
        return None
    tokenizer = engine_client.renderer.get_tokenizer()
    config = ServerConfig(
        redis_url=redis_url,
        model=model,
        server_id=os.environ["WARMFLEET_WORKER_ID"],
        url=worker_url(redis_url, args.host, 0 if args.uds else args.port, tls=bool(args.ssl_certfile)),
        models=tuple(path.name for path in state.openai_serving_models.base_model_paths),
        version=f"vllm-{__version__}",
        artifacts=artifacts(tokenizer, state, vllm_config.model_config),
        facts=facts(tokenizer, state, vllm_config),
        ready=functools.partial(listens, args.host, args.port),
        adapters=functools.partial(adapters, state),
    )
    publisher = ServerPublisher(config)
    publisher.start()
    atexit.register(publisher.stop)
    return publisher


def artifacts(tokenizer: Any, state: Any, model_config: Any) -> dict[str, bytes]:
    """The tokenizer as vLLM has loaded it (not always the file's) and the chat template it would use."""
    found = {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        found["tokenizer.json"] = backend.to_str().encode()
    template = chat_template(tokenizer, state, model_config, tools=None)
    if template is not None:
        found["chat_template.jinja"] = template.encode()
    return found


def renders(state: Any) -> dict[str, bool]:
    """How chats become prompts here. jinja: by the template (a tokenizer may bring one that the engine never uses);
    render, tokenize: routes that tell the token ids of a chat. /tokenize knows nothing of harmony."""
    renderer = state.online_renderer
    harmony = bool(getattr(renderer, "use_harmony", False))
    jinja = type(renderer.renderer).__name__ == "HfRenderer" and not harmony
    # The flag came with 0.30; before, the routes were always there.
    return {"jinja": jinja, "render": bool(getattr(state.args, "enable_scale_out", True)), "tokenize": not harmony}


def placeholders(model_config: Any) -> dict[str, str | None]:
    """What stands for an image, a video, a sound in a prompt's text; None: the model puts its tokens elsewhere."""
    found: dict[str, str | None] = {}
    if model_config.is_multimodal_model:
        from vllm.model_executor.model_loader import get_model_cls

        model = get_model_cls(model_config)
        for modality in ("image", "video", "audio"):
            with contextlib.suppress(ValueError, NotImplementedError):  # not a modality of this model
                found[modality] = model.get_placeholder_str(modality, 1)
    return found


def chat_template(tokenizer: Any, state: Any, model_config: Any, tools: list[Any] | None) -> str | None:
    """None if chats do not go by a jinja template here."""
    from vllm.renderers.hf import resolve_chat_template

    if not renders(state)["jinja"]:
        return None
    given = state.online_renderer.chat_template
    template = resolve_chat_template(tokenizer, given, tools, model_config=model_config)
    return template if isinstance(template, str) else None


def facts(tokenizer: Any, state: Any, vllm_config: Any) -> dict[str, Any]:
    """What else decides the token ids of a prompt, and what the answers will tell."""
    from vllm.renderers.hf import resolve_chat_template_content_format

    args, model_config = state.args, vllm_config.model_config
    renderer = state.online_renderer
    plain = chat_template(tokenizer, state, model_config, tools=None)
    return {
        "max_model_len": model_config.max_model_len,
        "content_format": resolve_chat_template_content_format(
            renderer.chat_template, None, args.chat_template_content_format, tokenizer, model_config=model_config
        )
        if renders(state)["jinja"]
        else "string",
        "special_tokens": {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()},
        # vLLM's defaults: completions add them, chats leave that to the template.
        "add_special_tokens": {"completions": True, "chat": False},
        "special_prefix_ids": list(tokenizer("").input_ids),
        "default_chat_template_kwargs": dict(renderer.default_chat_template_kwargs),
        "trust_request_chat_template": bool(args.trust_request_chat_template),
        "same_template_with_tools": plain == chat_template(tokenizer, state, model_config, tools=[]),
        "exclude_tools_when_tool_choice_none": bool(args.exclude_tools_when_tool_choice_none),
        "tool_parser": args.tool_call_parser,
        "reasoning_parser": args.structured_outputs_config.reasoning_parser or None,
        "prompt_tokens_details": bool(args.enable_prompt_tokens_details),
        "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
        "kv_connector": vllm_config.kv_transfer_config is not None,
        "multimodal": bool(model_config.is_multimodal_model),
        "placeholders": placeholders(model_config),
        "renders": renders(state),
        "api_key": bool(args.api_key),
        "token_handoff": token_handoff(state, model_config),
    }


def token_handoff(state: Any, model_config: Any) -> list[str]:
    """The endpoints that take token ids in place of text, and do with them what they do with that text.

    Looked up in this vLLM itself: completions have always had them, chats since 0.32.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers import hf

    if model_config.is_encoder_decoder:  # a text is the encoder's prompt there, ids would be the decoder's
        return []
    able = []
    try:
        CompletionRequest(prompt=[0])
        able.append("completions")
    except ValueError:
        pass
    renderer = state.online_renderer
    # Only this renderer makes prompts of the announced template; with embeddings on it tokenises in another way.
    by_template = type(renderer.renderer) is hf.HfRenderer and not getattr(renderer, "use_harmony", False)
    takes_ids = hasattr(sys.modules[type(renderer).__module__], "_reused_prompt_token_ids")
    if by_template and takes_ids and not model_config.enable_prompt_embeds:
        able.append("chat")
    return able


def adapters(state: Any) -> dict[str, str]:
    """LoRA adapters that are loaded now. ``list`` of a dict is one atomic call: requests load and unload them."""
    return {name: lora.lora_path for name, lora in list(state.openai_serving_models.lora_requests.items())}
