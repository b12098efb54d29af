"""One frozen dataclass from the environment: every field has its unit in its name, a default and a reason."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from warmfleet.errors import BadArgument
from warmfleet.per_model import PerModel
from warmfleet.pools.policy import policies

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "WARMFLEET_"
MIN_SECRET = 16
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
#: Variables with our prefix that belong to workers (worker_plugin/README.md) or to the command line.
FOREIGN = frozenset({"WARMFLEET_MODEL", "WARMFLEET_WORKER_ID", "WARMFLEET_WORKER_URL"})


def engine_url(text: str) -> str:
    """The base URL of an engine: what comes before ``/v1``. Raises BadArgument."""
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise BadArgument(f"{text!r} is not the URL of an engine, such as http://10.0.0.7:8000")
    return url


def _setting(default: Any, why: str) -> Any:
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True, slots=True)
class Settings:
    """Read with ``Settings.from_environment()``. Lists are separated by commas."""

    redis_url: str = _setting("redis://127.0.0.1:6379/0", "where the fleet meets")
    redis_ca: str = _setting("", "PEM file of the authority that signed Redis' certificate; needs a `rediss` URL")
    models: tuple[str, ...] = _setting((), "model tags to serve, `name` or `name#pool`; required")
    host: str = _setting("127.0.0.1", "address to listen on; not open to the network unless asked")
    port: int = _setting(8080, "port to listen on")
    policy: str = _setting(
        "cost", 'how to choose (`lua/README.md`, "Policies"); for single models: `cost,modelA=sticky`'
    )
    ttft_objective_s: PerModel[float] = _setting(  # noqa: RUF009  what it calls makes a field
        PerModel(0.0), "time to first token that is quick enough; `0.5,modelA=1.2` for some models; 0 = none"
    )
    min_match_tokens: int = _setting(0, "what a worker holds beyond all others counts for the choice from there on")
    decision_log: str = _setting(
        "", "file for a sample of decisions, to be replayed; one for each replica; empty = none"
    )
    decision_sample: float = _setting(0.01, "share of the decisions that goes there")
    static_workers: tuple[str, ...] = _setting((), "URLs of engines without the plugin, served as approximate workers")
    worker_api_key: str = _setting("", "sent to workers in place of the client's Authorization")
    admin_key: str = _setting(
        "", "wanted as bearer token by `/workers`, `/explain` and `/metrics`; empty = open to all"
    )
    tenant_key: str = _setting(
        "", "a secret of 16 characters and more: tenants never share cached blocks; empty = one cache for all"
    )
    tenant_header: str = _setting(
        "Authorization",
        "whose value names the tenant: in the queue always, in the caches where `WARMFLEET_TENANT_KEY` is set",
    )
    answer_headers: str = _setting("all", "`all`, or `request_id`: answers do not tell worker and matched tokens")
    tokenizer: str = _setting("", "path or hub name that overrides the tokenizer the workers bring")
    worker_addresses: tuple[str, ...] = _setting(
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "100.64.0.0/10", "fc00::/7", "::1/128"),
        "address ranges that announced URLs may point to: a forged join must not send requests elsewhere",
    )
    decide_timeout_s: float = _setting(
        0.05,
        "longest wait for a decision, counted while the event loop is on time (at most 1 s more); "
        "then the fallback chooses",
    )
    redis_retry_s: float = _setting(1.0, "after two failed decisions, Redis is not asked again for this long")
    connect_timeout_s: float = _setting(2.0, "longest wait for a connection to a worker; then another is tried")
    allowed_fields: tuple[str, ...] = _setting(
        (), "request fields that are refused unless named here: `chat_template`, `kv_transfer_params`"
    )
    body_timeout_s: float = _setting(60.0, "longest time for a client to send its request body")
    body_max_bytes: int = _setting(33_554_432, "longest request body; beyond: 413")
    buffer_max_bytes: int = _setting(1_048_576, "of a plain answer read before its headers go out, so a death is a 502")
    header_timeout_s: float = _setting(10.0, "longest time for a client to send its request headers")
    max_connections: int = _setting(4_096, "open client connections of one replica")
    shutdown_grace_s: float = _setting(30.0, "running answers may go on this long after a stop signal")
    drain_s: float = _setting(0.0, "`/readyz` says no for this long before a stop, so that balancers notice")
    expected_output_tokens: int = _setting(256, "answer length that is booked when the request names none or more")
    apply_interval_s: float = _setting(0.05, "time between two rounds of applying worker events")
    view_interval_s: float = _setting(1.0, "time between two readings of the fleet's workers")
    renew_interval_s: float = _setting(10.0, "time between two renewals of open reservations, which live 30 s")
    audit_interval_s: float = _setting(3600.0, "time between two audits of a worker's part of the index; 0 = none")
    health_interval_s: float = _setting(
        5.0, "time between two health checks of an approximate worker; of all while heartbeats are not heard"
    )
    probe_timeout_s: float = _setting(5.0, "a probe's blocks must show in its worker's stream within this")
    probe_interval_s: float = _setting(
        600.0, "time between two probes of a proven worker, all replicas together; 0 = only when it is suspected"
    )
    warm_prefixes: int = _setting(
        0, "a worker that joins empty is given this many of the prefixes in use before it takes requests; 0 = none"
    )
    ask_engines: bool = _setting(True, "ask an engine for token ids that only it can tell, where its routes are on")
    ask_timeout_s: float = _setting(
        0.25, "longest wait for that, besides 5 µs for each byte of the request; then it is routed by load"
    )
    inline_characters: int = _setting(2_000, "longer new texts are tokenised in a thread; x20 with the fast engine")
    trie_bytes: int = _setting(268_435_456, "bound of the prompt trie: ids and hashes of earlier prompts, about")
    mirror_checkpoints: int = _setting(20_000, "checkpoints remembered for one approximate worker")
    approved_templates: tuple[str, ...] = _setting(
        (), "sha256 of chat templates that may run in this process, besides those of `warmfleet artifacts approve`"
    )
    trust_templates: bool = _setting(
        False, "all chat templates that workers bring may run in this process, and their tokenizers are loaded untried"
    )
    max_engine_wait_s: float = _setting(
        2.0,
        "while this much work is booked on every worker, requests wait in their replica, in an order that the fleet "
        "shares; 0 = never",
    )
    queue_max: int = _setting(1_024, "requests of one model that may wait, in all replicas together; then 429")
    queue_max_bytes: int = _setting(
        67_108_864, "bodies that may wait in one replica, of a tenant as much as is free; then 429"
    )
    queue_timeout_s: float = _setting(
        30.0, "longest wait there; then 503. A request may shorten it: header `X-Request-Timeout-Ms`"
    )
    queue_priority: bool = _setting(
        False, "a request's field `priority` (lower goes first) counts in the queue: any client can send it"
    )
    token_handoff: bool = _setting(
        True, "engines that can are given the token ids made here, and do not tokenise again"
    )

    def engine_wait_s(self, tag: str) -> float:
        """max_engine_wait_s of a model: who waits in an engine for longer than a TTFT objective has missed it."""
        return min(self.max_engine_wait_s, self.ttft_objective_s.of(tag) or math.inf)

    @property
    def explain_key(self) -> str | None:
        """What a request must say to be told of its decision: empty: anything; None: nobody is told, since clients are
        not to know of workers and there is no operator's key."""
        kept = self.answer_headers == "request_id" or self.tenant_key
        return None if kept and not self.admin_key else self.admin_key

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Raises BadArgument naming the variable that cannot be read."""
        environment = os.environ if environment is None else environment
        values = {}
        for item in fields(cls):
            name = PREFIX + item.name.upper()
            if name in environment:
                values[item.name] = _cast(name, environment[name], item.default)
        if "static_workers" in values:
            values["static_workers"] = tuple(map(engine_url, values["static_workers"]))
        settings = cls(**values)
        try:
            policies(settings.policy)
        except BadArgument as error:
            raise BadArgument(f"{PREFIX}POLICY={settings.policy!r}: {error}") from error
        if settings.decision_sample > 1:
            raise BadArgument(f"{PREFIX}DECISION_SAMPLE={settings.decision_sample} is a share: 0 to 1")
        if settings.answer_headers not in ("all", "request_id"):
            raise BadArgument(f"{PREFIX}ANSWER_HEADERS={settings.answer_headers!r}: known are all, request_id")
        if 0 < len(settings.tenant_key) < MIN_SECRET:
            raise BadArgument(f"{PREFIX}TENANT_KEY must have at least {MIN_SECRET} characters")
        if not _HEADER.fullmatch(settings.tenant_header):
            raise BadArgument(f"{PREFIX}TENANT_HEADER={settings.tenant_header[:80]!r} is not the name of a header")
        if wrong := [digest for digest in settings.approved_templates if not _SHA256.match(digest)]:
            raise BadArgument(f"{PREFIX}APPROVED_TEMPLATES: {wrong[0][:80]!r} is not a sha256 of 64 hex digits")
        return settings


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that nothing reads: a typing error, most likely."""
    environment = os.environ if environment is None else environment
    known = {PREFIX + item.name.upper() for item in fields(Settings)} | FOREIGN
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def _cast(name: str, text: str, default: Any) -> Any:
    each = isinstance(default, PerModel)
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        value = default.read(text, type(default.default)) if each else type(default)(text)
    except (KeyError, ValueError) as error:
        what = f"{type(default.default).__name__} for each model" if each else type(default).__name__
        raise BadArgument(f"{name}={text!r} is not a {what}") from error
    for one in value.values() if each else (value,):
        if isinstance(one, int | float) and not 0 <= one < math.inf:
            raise BadArgument(f"{name}={text!r} must be a finite number, not negative")
    return value
