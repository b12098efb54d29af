"""The API-server half of the plugin announces the address, the tokenizer, the chat template and the facts.

Facts are settings of this server that a router must know to compute the token ids that the engine will see.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from warmfleet_worker.pool_assignment import server_assignment
from warmfleet_worker.server_address import Bound, healthy, worker_url
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.vllm_hooks.compatibility import (
    Part,
    missing,
    missing_state,
    parameters_differ,
    refuse,
    version,
)
from warmfleet_worker.vllm_hooks.engine_core import model_tag, ranks_of, server_id_of
from warmfleet_worker.vllm_hooks.images import images
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The modules that have imported ``init_app_state`` and call it: since vLLM 0.29, in 0.28, and in 0.28 started with
#: ``python -m``.
SERVER_MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server", "__main__")

#: The header in which routers send a request's priority, in lower case.
ROUTERS_PRIORITY_HEADER = "x-vllm-priority"


def hook_api_server(redis_url: str) -> None:
    """Announce this process's API server, if it is one, when its state has been made."""
    if missing(Part.BLOCKS):
        return  # the engine core logs it; a server whose cores report nothing gets no requests
    for module in loaded_server_modules():
        if not first_time(module):
            continue
        differs = parameters_differ(module.init_app_state, "engine_client, state, ...")
        if differs:
            refuse(Part.SERVER, f"{module.__name__}.init_app_state takes {differs}")
            continue

        async def init_app_state(original: Any, engine_client: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            await original(engine_client, state, *args, **kwargs)
            with swallow_errors("could not ask how this server switches thinking off"):
                await find_disabled_thinking_effort(state)
            with swallow_errors("could not announce this API server"):
                announce(engine_client, state, redis_url)

        wrap(module, "init_app_state", init_app_state)


def loaded_server_modules() -> Iterator[Any]:
    """List the server modules that this process has loaded: only an API server has any, before it loads plugins."""
    found = False
    for name in SERVER_MODULES:
        module = sys.modules.get(name)
        if hasattr(module, "build_and_serve") and hasattr(module, "init_app_state"):
            found = True
            yield module
    loaded = [name for name in list(sys.modules) if name.startswith("vllm.entrypoints.") and "api_server" in name]
    if loaded and not found and first_time(sys.modules[loaded[0]]):
        refuse(Part.SERVER, f"no module has build_and_serve and init_app_state, not {loaded[0]} either")


def announce(engine_client: Any, state: Any, redis_url: str) -> ServerPublisher | None:
    """Start the publisher of this API server. Of several API server processes of one server only the first has one.

    Returns None without a publisher, for example if this vLLM lacks an internal, which is then logged.
    """
    differs = missing(Part.SERVER) or missing_state(state)
    if differs:
        refuse(Part.SERVER, differs)
        return None
    args, vllm_config = state.args, engine_client.vllm_config
    if getattr(vllm_config.parallel_config, "_api_process_rank", 0) > 0:
        return None
    tokenizer = engine_client.renderer.get_tokenizer()
    config = ServerConfig(
        redis_url=redis_url,
        model=model_tag(vllm_config),
        server_id=server_id_of(vllm_config),
        url=worker_url(redis_url, args.host, 0 if args.uds else args.port, tls=bool(args.ssl_certfile)),
        models=tuple(path.name for path in state.openai_serving_models.base_model_paths),
        version=f"vllm-{version()}",
        artifacts=artifacts(tokenizer, state, vllm_config.model_config),
        facts=facts(tokenizer, state, vllm_config),
        ready=functools.partial(healthy, Bound(args.host, args.port, args.uds, tls=bool(args.ssl_certfile))),
        adapters=functools.partial(adapters, state),
    )
    publisher = ServerPublisher(config, server_assignment(redis_url, config.model, config.server_id))
    publisher.start()
    leave_first(engine_client, publisher)
    atexit.register(publisher.stop)  # for a server that ends without ``shutdown``
    return publisher


def leave_first(engine_client: Any, publisher: ServerPublisher) -> None:
    """Say goodbye before the engine core is told to end.

    On SIGTERM and SIGINT vLLM shuts its engine client down before anything else. Without ``--shutdown-timeout`` the
    core is killed, else it finishes its requests and refuses new ones. After the goodbye routers send none.
    """

    def shutdown(original: Any, *args: Any, **kwargs: Any) -> Any:
        with swallow_errors("could not say goodbye"):
            publisher.stop()
        return original(*args, **kwargs)

    wrap(engine_client, "shutdown", shutdown)


def artifacts(tokenizer: Any, state: Any, model_config: Any) -> dict[str, bytes]:
    """Return, as files by name, the tokenizer that vLLM has loaded (its file may differ) and the chat template."""
    found = {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        found["tokenizer.json"] = backend.to_str().encode()
    template = chat_template(tokenizer, state, model_config, tools=None)
    if template is not None:
        found["chat_template.jinja"] = template.encode()
    return found


def renders(state: Any) -> dict[str, bool]:
    """Tell how this server makes a prompt of a chat.

    jinja: it uses the chat template (some engines have a renderer of their own and never use the template).
    render, tokenize: the server has an API route that answers with the token ids of a chat. The route /tokenize is
    wrong for models with the harmony format, hence it is not offered for those.
    """
    renderer = state.online_renderer
    harmony = bool(getattr(renderer, "use_harmony", False))
    jinja = type(renderer.renderer).__name__ == "HfRenderer" and not harmony
    # The flag came with vLLM 0.30; before that the routes were always there.
    return {"jinja": jinja, "render": bool(getattr(state.args, "enable_scale_out", True)), "tokenize": not harmony}


def placeholders(model_config: Any) -> dict[str, str | None]:
    """Return the text that stands for an image, a video or a sound in a prompt.

    None: the model has no such text and puts the media's tokens elsewhere.
    """
    found: dict[str, str | None] = {}
    if model_config.is_multimodal_model:
        from vllm.model_executor.model_loader import get_model_cls

        model = get_model_cls(model_config)
        for modality in ("image", "video", "audio"):
            with contextlib.suppress(ValueError, NotImplementedError):  # the model lacks this modality
                found[modality] = model.get_placeholder_str(modality, 1)
    return found


def chat_template(tokenizer: Any, state: Any, model_config: Any, tools: list[Any] | None) -> str | None:
    """Return the chat template for requests with these tools; None if this server renders chats without a template."""
    from vllm.renderers.hf import resolve_chat_template

    if not renders(state)["jinja"]:
        return None
    given = state.online_renderer.chat_template
    template = resolve_chat_template(tokenizer, given, tools, model_config=model_config)
    return template if isinstance(template, str) else None


def facts(tokenizer: Any, state: Any, vllm_config: Any) -> dict[str, Any]:
    """Collect the settings that decide the token ids of a prompt, and the forms in which this server takes prompts."""
    from vllm.renderers.hf import resolve_chat_template_content_format

    args, model_config = state.args, vllm_config.model_config
    renderer = state.online_renderer
    plain = chat_template(tokenizer, state, model_config, tools=None)
    pictures = None
    if model_config.is_multimodal_model:
        with swallow_errors("could not find out how this server hashes images"):
            pictures = images(renderer.renderer, model_config)
    return ({"images": pictures} if pictures else {}) | {
        "max_model_len": model_config.max_model_len,
        "content_format": resolve_chat_template_content_format(
            renderer.chat_template, None, args.chat_template_content_format, tokenizer, model_config=model_config
        )
        if renders(state)["jinja"]
        else "string",
        "special_tokens": {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()},
        # vLLM's defaults: completions add special tokens, chats leave that to the template.
        "add_special_tokens": {"completions": True, "chat": False},
        "special_prefix_ids": list(tokenizer("").input_ids),
        "default_chat_template_kwargs": dict(renderer.default_chat_template_kwargs),
        "same_template_with_tools": plain == chat_template(tokenizer, state, model_config, tools=[]),
        "exclude_tools_when_tool_choice_none": bool(args.exclude_tools_when_tool_choice_none),
        "multimodal": bool(model_config.is_multimodal_model),
        "placeholders": placeholders(model_config),
        "renders": renders(state),
        "merges_inline_system": merges_inline_system(renderer),
        "disabled_thinking_effort": getattr(
            getattr(state, "anthropic_serving_messages", None), "_disabled_thinking_effort", None
        ),
        "token_handoff": token_handoff(state, model_config),
        "takes_priority": takes_priority(vllm_config),
        "ranks": ranks_of(vllm_config),
    }


def takes_priority(vllm_config: Any) -> bool:
    """Tell whether the scheduler goes by priorities, and this vLLM reads them from the header that routers send."""
    if getattr(vllm_config.scheduler_config, "policy", "fcfs") != "priority":
        return False
    try:
        from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER
    except ImportError:
        return False
    return bool(PRIORITY_HEADER.lower() == ROUTERS_PRIORITY_HEADER)


def merges_inline_system(renderer: Any) -> bool | None:
    """Tell whether system messages amid a /v1/messages request move to its front; None if this vLLM cannot tell."""
    try:
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

        return bool(AnthropicServingMessages._should_merge_inline_system(renderer))  # noqa: SLF001  vLLM offers no other way
    except (ImportError, AttributeError):
        return None


async def find_disabled_thinking_effort(state: Any) -> None:
    """Let the server find out now what it tells its template when a client of /v1/messages switches thinking off.

    The server keeps the result, which it would otherwise compute at the first such request.
    """
    serving = getattr(state, "anthropic_serving_messages", None)
    if serving is not None and hasattr(serving, "_get_disabled_thinking_effort"):
        await serving._get_disabled_thinking_effort()  # noqa: SLF001  as above


def token_handoff(state: Any, model_config: Any) -> list[str]:
    """List the kinds of request (``completions``, ``chat``) that may carry token ids, not text, with equal answers.

    Completions have always taken token ids, chats at least since vLLM 0.28. The code tries both with this vLLM.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers import hf

    if model_config.is_encoder_decoder:  # text would be the encoder's prompt, but ids would be the decoder's
        return []
    takes_ids = []
    try:
        CompletionRequest(prompt=[0])
        takes_ids.append("completions")
    except ValueError:
        pass
    renderer = state.online_renderer
    # Only this renderer uses the announced template, and with prompt embeddings on it tokenises in another way.
    by_template = type(renderer.renderer) is hf.HfRenderer and not getattr(renderer, "use_harmony", False)
    reuses_ids = hasattr(sys.modules[type(renderer).__module__], "_reused_prompt_token_ids")
    if by_template and reuses_ids and not model_config.enable_prompt_embeds:
        takes_ids.append("chat")
    return takes_ids


def adapters(state: Any) -> dict[str, str]:
    """Return the paths of the LoRA adapters that are loaded now, by name.

    Requests load and unload adapters meanwhile; ``list`` of a dict is one atomic call.
    """
    return {name: lora.lora_path for name, lora in list(state.openai_serving_models.lora_requests.items())}
