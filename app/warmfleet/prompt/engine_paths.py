"""The paths of engines that clients may use, and what a request to each of them asks of an engine. Pure.

A path that is not here, and that no pattern of the operator covers, is answered with 404. The paths of ``NEVER`` are
refused whatever the operator's patterns say, because they steer or show one engine, and a router has many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from warmfleet.errors import BadArgument
from warmfleet.prompt.response_ids import is_ours

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The way in which a body makes a prompt. ``unknown``: the engine computes a prompt that the router does not read.
#: ``none``: the engine computes no prompt at all.
Form = Literal["completions", "chat", "messages", "responses", "generate", "unknown", "none"]
#: The content of a good answer in JSON: one object; one value of any type; or anything, such as a stream of values.
#: An answer of other content counts as the engine's fault.
Answer = Literal["object", "value", "any"]


@dataclass(frozen=True, slots=True)
class EnginePath:
    """A path of engines. name: its label in the metrics. generates: the engine answers with tokens that it generates.

    takes_salt: the engine reads the body's ``cache_salt``. answer: content of an answer with status 200 in JSON.
    takes_all_types: the request's body may be a form, or anything else. response: the id in the path of the answer that
    the request is about, which one engine keeps.
    """

    path: str
    name: str
    form: Form = "unknown"
    generates: bool = False
    takes_salt: bool = True
    methods: tuple[str, ...] = ("POST",)
    answer: Answer = "value"
    takes_all_types: bool = False
    response: str = ""


_KNOWN = (
    EnginePath("/v1/completions", "completions", "completions", generates=True, answer="object"),
    EnginePath("/v1/chat/completions", "chat", "chat", generates=True, answer="object"),
    EnginePath("/v1/chat/completions/batch", "chat_batch", generates=True, answer="object"),
    EnginePath("/v1/responses", "responses", "responses", generates=True, answer="object"),
    EnginePath("/v1/messages", "messages", "messages", generates=True, answer="object"),
    EnginePath("/v1/messages/count_tokens", "count_tokens", "none", takes_salt=False),
    EnginePath("/inference/v1/generate", "generate", "generate", generates=True, answer="object"),
    EnginePath("/invocations", "invocations", generates=True, answer="any"),
    EnginePath("/v1/audio/transcriptions", "audio", generates=True, takes_salt=False, takes_all_types=True),
    EnginePath("/v1/audio/translations", "audio", generates=True, takes_salt=False, takes_all_types=True),
    EnginePath("/v1/embeddings", "embeddings"),
    EnginePath("/v2/embed", "embeddings", takes_salt=False),
    EnginePath("/pooling", "pooling"),
    EnginePath("/classify", "classify"),
    EnginePath("/score", "score"),
    EnginePath("/v1/score", "score"),
    EnginePath("/rerank", "rerank"),
    EnginePath("/v1/rerank", "rerank"),
    EnginePath("/v2/rerank", "rerank"),
    EnginePath("/generative_scoring", "score"),
    EnginePath("/v1/systemone", "score"),
    EnginePath("/tokenize", "tokenize", "none", takes_salt=False),
    EnginePath("/detokenize", "tokenize", "none", takes_salt=False),
    EnginePath("/v1/completions/render", "render", "none", takes_salt=False),
    EnginePath("/v1/completions/derender", "render", "none", takes_salt=False),
    EnginePath("/v1/chat/completions/render", "render", "none", takes_salt=False),
    EnginePath("/v1/chat/completions/derender", "render", "none", takes_salt=False),
    EnginePath("/v1/messages/render", "render", "none", takes_salt=False),
    EnginePath("/v1/responses/render", "render", "none", takes_salt=False),
)
KNOWN: dict[str, EnginePath] = {known.path: known for known in _KNOWN}
#: A request's target, as it was sent, on a path of Anthropic's API.
_ANTHROPIC = re.compile(rb"(?:https?://[^/?#]*)?/v1/messages(?=[/?#]|$)", re.IGNORECASE)
#: Paths that the router answers itself (``api/service_routes``, ``why_routes``, ``gateway_routes``, ``status_page``).
OWN = frozenset(
    {
        *("/v1/models", "/health", "/ping", "/version", "/livez", "/readyz", "/metrics"),
        *("/workers", "/replicas", "/explain", "/why", "/favicon.ico", "/route", "/settle", "/renew", "/openapi.json"),
        *("/status", "/status.json", "/status/page.css", "/status/page.js"),
        *("/status/dom.js", "/status/plots.js", "/status/tables.js"),
    }
)
#: Paths among OWN that are for operators.
OPERATORS = frozenset(
    {"/metrics", "/workers", "/replicas", "/explain", "/why", "/route", "/settle", "/renew", "/status.json"}
)
#: Paths among OWN that change a reservation, or show single requests. Without an admin key a replica may answer them
#: only to its own host.
OWN_HOST = frozenset({"/explain", "/why", "/route", "/settle", "/renew"})
#: Paths of vLLM's server that change one engine, report on it, or need a connection of another kind.
NEVER = frozenset(
    {
        *("/abort_requests", "/inference/v1/abort_requests", "/pause", "/resume", "/is_paused"),
        *("/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory"),
        *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
        *("/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
        *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
        *("/weight_info", "/weight_checker", "/get_world_size", "/collective_rpc"),
        *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply", "/fault_tolerance/status"),
        *("/start_profile", "/stop_profile", "/server_info", "/load", "/kv_event_sources", "/tokenizer_info"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/static"),
        "/v1/realtime",
    }
)
#: Paths that begin like this go to no engine, either, whatever the operator's patterns allow. Of those below RESPONSES
#: only answers go that have a router's id.
RESPONSES = "/v1/responses/"
NEVER_BELOW = ("/v1/models/", RESPONSES, "/adapters/", "/fault_tolerance/", "/static/", "/docs/")
#: Segments of letters, digits and ``_~:@-``, with dots inside: nothing that two servers could read in two ways.
SEGMENT = r"[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*"
_PLAIN = re.compile(rf"(?:/{SEGMENT})+")


def is_anthropic(target: bytes) -> bool:
    """Return whether clients of this path of a request line speak Anthropic's API; else they speak OpenAI's."""
    return _ANTHROPIC.match(target) is not None


class EnginePaths:
    """The paths of one replica: the known ones, and those that the operator's patterns add."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """patterns: paths; one that ends in ``/*`` covers every path below it. Raises BadArgument."""
        texts = tuple(patterns)
        for text in texts:
            if not _PLAIN.fullmatch(text.removesuffix("/*")) and text != "/*":
                raise BadArgument(
                    f"WARMFLEET_PASSED_PATHS: {text[:80]!r} is no path such as /v1/images/* or /v1/moderations"
                )
        self._single = frozenset(text for text in texts if not text.endswith("/*"))
        self._above = tuple(text[:-1] for text in texts if text.endswith("/*"))

    def find(self, path: str) -> EnginePath | None:
        """Return the entry of a request's decoded path; None if the path does not go to engines."""
        known = KNOWN.get(path)
        if known is not None:
            return known
        if path.startswith(RESPONSES):
            name, _, action = path.removeprefix(RESPONSES).partition("/")
            return _response(name, action) if action in ("", "cancel") and is_ours(name) else None
        if path not in self._single and not path.startswith(self._above):
            return None
        if path in NEVER or path in OWN or path.startswith(NEVER_BELOW) or not _PLAIN.fullmatch(path):
            return None
        return _other(path)

    def all(self) -> list[EnginePath]:
        """Return all paths. The paths below a pattern stand here as one path that ends in ``{path}``."""
        kept = (_response("{response_id}", ""), _response("{response_id}", "cancel"))
        return [*_KNOWN, *kept, *map(_other, (*sorted(self._single), *(f"{above}{{path}}" for above in self._above)))]


def _response(name: str, action: str) -> EnginePath:
    """Return a path about an answer that an engine keeps. action: empty or ``cancel``."""
    path, method = (f"{RESPONSES}{name}/{action}", "POST") if action else (RESPONSES + name, "GET")
    return EnginePath(path, "response", "none", takes_salt=False, methods=(method,), answer="object", response=name)


def _other(path: str) -> EnginePath:
    """Return a path that only a pattern of the operator covers."""
    return EnginePath(
        path, "other", generates=True, takes_salt=False, methods=("GET", "POST"), answer="any", takes_all_types=True
    )
