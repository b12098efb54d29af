"""The settings of one replica: a frozen dataclass that is read from ``WARMFLEET_*`` environment variables.

Every field has its unit in its name, a default, and a sentence for ``app/docs/settings.md``, which is generated from
here. A value becomes a setting only if an operator with a reason would turn it. Any other is a constant beside its
reason in the module that uses it, or a time of ``timing``.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from warmfleet.errors import BadArgument
from warmfleet.protocol.labels import read_labels
from warmfleet.protocol.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

PREFIX = "WARMFLEET_"
LIKE = 0.85  # least similarity, 0 to 1, at which a setting is suggested for a mistyped name; both include WARMFLEET_
NUMBERS = {"int": "whole number", "float": "number"}  # type -> its name in messages
#: The placement policies by name. lua/parts/decide implements them; lua/README.md says where each comes from.
POLICIES = (
    *("cost", "sticky", "two_state", "prefix_affinity", "chwbl", "session"),
    *("least_loaded", "power_of_two", "round_robin", "random"),
)
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MIN_SECRET_CHARACTERS = 16
MAX_SECRET_BYTES = 65_536  # largest file that is accepted as a secret
MAX_PORT = 65_535
MAX_TICKETS = 2**32 - 1  # largest queue limit, because scripts get the number of waiting requests in 32 bits
#: Longest timeout of a decision: a third of a reservation's 30 s, so that a late decision's reservation still lives.
MAX_DECIDE_TIMEOUT_S = 10.0
MAX_PREFER_S = 3_600.0  # most seconds that WARMFLEET_PREFER adds to a worker's cost for a missing label
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_SECONDS = re.compile(r"[0-9]*\.?[0-9]+")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
#: Variables with our prefix that belong to workers (worker_plugin/README.md) or to the command line.
FOREIGN = frozenset(
    {
        *(
            "WARMFLEET_LABELS",
            "WARMFLEET_MODEL",
            "WARMFLEET_TTFT_TARGET_S",
            "WARMFLEET_WORKER_ID",
            "WARMFLEET_WORKER_URL",
        ),
        *("WARMFLEET_ADMIN_REDIS_URL", "WARMFLEET_ADMIN_REDIS_URL_FILE"),
    }
)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PerModel(Generic[Value]):
    """A value that may differ by model, written ``0.5,modelA=1.2``.

    ``named`` holds the exceptions; a key is a model's name, for all its pools, or a whole tag ``name#pool``.
    """

    default: Value
    named: Mapping[str, Value] = field(default_factory=dict)

    def of(self, tag: str) -> Value:
        """Return the value for a model tag: that of the tag, else that of the model's name, else the default."""
        for name in (tag, tag.partition("#")[0]):
            if name in self.named:
                return self.named[name]
        return self.default

    def strangers(self, tags: Sequence[str]) -> list[str]:
        """Return the names that belong to none of these model tags, which are most likely typing errors."""
        return sorted(self.named.keys() - {*tags, *(tag.partition("#")[0] for tag in tags)})

    def values(self) -> list[Value]:
        """Return the default and all exceptions."""
        return [self.default, *self.named.values()]

    def read(self, text: str, cast: Callable[[str], Value]) -> PerModel[Value]:
        """Return a copy of this value, changed by the entries of ``text``. Raises ValueError, also from ``cast``."""
        default, named, seen = self.default, dict(self.named), set[str]()
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = map(str.strip, part.rpartition("="))
            if name in seen or (equals and not name):
                raise ValueError(f"{part!r}: a model, or the default, twice or without a name")
            seen.add(name)
            if name:
                named[name] = cast(value)
            else:
                default = cast(value)
        return PerModel(default, named)

    def __str__(self) -> str:
        """Return the text that an environment variable would have for this value."""
        return ",".join([str(self.default), *(f"{name}={value}" for name, value in self.named.items())])


DEFAULT_PORTS = {"http": 80, "https": 443}


def without_userinfo(url: str) -> str:
    """Return a URL, even a wrong one, without user and password, for logs and messages."""
    return re.sub(r"^(\s*[\w+.-]*://)?.*@", r"\1", url, flags=re.DOTALL)


def engine_url(text: str) -> str:
    """Return the base URL of an engine (the part before ``/v1``) in one spelling, however it was written.

    Scheme and host are in small letters, the port of the scheme and a dot behind the host are left out, and an address
    is written as briefly as it can be. Raises BadArgument.
    """
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
        usable = parts.scheme in ("http", "https") and host and port != 0
        host.encode("idna")  # fails as every look-up would, for a label that is empty or above 63 characters
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise BadArgument(f"{without_userinfo(text)!r} is not the URL of an engine, such as http://10.0.0.7:8000")
    user, at, _ = parts.netloc.rpartition("@")
    place = _brief(host) if port in (None, DEFAULT_PORTS[parts.scheme]) else f"{_brief(host)}:{port}"
    return f"{parts.scheme}://{user}{at}{place}{parts.path}"


def _brief(host: str) -> str:
    """Return the host as it stands in a URL; an IPv4 address written as IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or f"[{address}]")
    return host


class EngineSource(NamedTuple):
    """An entry of ``WARMFLEET_STATIC_WORKERS``: where engines without the plugin are found.

    kind: ``url`` (where: of one engine), ``dns`` (where: a URL, and every address behind its host is an engine) or
    ``file`` (where: the path of a file with one engine per line). cache_tokens: cache size of each engine; 0: the size
    that the engine reports. labels: of each engine, as ``read_labels`` takes them.
    """

    kind: Literal["url", "dns", "file"]
    where: str
    cache_tokens: int = 0
    labels: str = ""


def engine_source(text: str) -> EngineSource:
    """Parse ``http://10.0.0.7:8000``, ``http+dns://vllm:8000`` or ``file:///etc/engines``, the first two perhaps with
    ``#cache_tokens=400000&zone=eu-1a``. Raises BadArgument."""
    where, mark, fragment = text.strip().partition("#")
    if where.startswith("file:"):
        path = where.removeprefix("file:").removeprefix("//")
        if mark or not path.startswith("/"):
            raise BadArgument(f"{text!r} is not a file of engines, such as file:///etc/warmfleet/engines")
        return EngineSource("file", path)
    try:
        labels = read_labels(fragment)
    except WireError:
        labels = {}
    number = labels.pop("cache_tokens", "" if labels or not mark else "none")
    if number and not (number.isdigit() and 0 < int(number) < 2**40):
        shape = "after # stand the engine's cache and labels, such as #cache_tokens=400000&zone=eu-1a"
        raise BadArgument(f"{without_userinfo(text)!r}: {shape}")
    cache_tokens = int(number or 0)
    told = "&".join(f"{name}={value}" for name, value in labels.items())
    if not where.startswith("http+dns://"):
        return EngineSource("url", engine_url(where), cache_tokens, told)
    url = engine_url(where.replace("+dns", "", 1))
    if not urlsplit(where).port:
        raise BadArgument(f"{without_userinfo(text)!r} needs a port: http+dns://name:port")
    return EngineSource("dns", url, cache_tokens, told)


def policies(text: str) -> PerModel[str]:
    """Parse ``cost,modelA=sticky`` into a policy for each model. Raises BadArgument for an unknown name."""
    try:
        return PerModel("cost").read(text, _policy)
    except ValueError as error:
        raise BadArgument(str(error)) from error


def preferences(entries: Sequence[str]) -> dict[str, float]:
    """Parse ``zone=eu-1a:0.05`` into the seconds that a worker without the label costs more. Raises ValueError."""
    found: dict[str, float] = {}
    for entry in entries:
        label, colon, seconds = entry.partition(":")
        number = float(seconds) if _SECONDS.fullmatch(seconds) else 0.0
        if not colon or not 0 < number <= MAX_PREFER_S or len(read_labels(label)) != 1:
            raise ValueError(f"{entry[:160]!r} is not a label and its seconds, such as zone=eu-1a:0.05")
        found[label] = number
    return found


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"{name[:80]!r} is no policy; known are {', '.join(POLICIES)}")
    return name


def _setting(default: Any, why: str, group: str = "") -> Any:
    """Define a setting. group: the heading of this setting and the next ones in the table of settings."""
    return field(default=default, metadata={"why": why, "group": group})


def _secret(default: Any, why: str, group: str = "") -> Any:
    """Define a setting whose value may be in a file that ``NAME_FILE`` names; ``repr`` of the settings hides it."""
    return field(default=default, repr=False, metadata={"why": why, "secret": True, "group": group})


ADMIN_PORT = 9090  # default port at which operators reach a replica
#: The address ranges of private networks, where workers may be if the operator lists no range.
ANY_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "100.64.0.0/10", "fc00::/7", "::1/128")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a replica, read by ``Settings.from_environment()``. Lists are separated by commas."""

    redis_url: str = _secret(
        "redis://127.0.0.1:6379/0", "address of the Redis in which the fleet meets", group="Redis, models and engines"
    )
    redis_ca: str = _setting(
        "", "PEM file of the authority that signed Redis' certificate; needs a `rediss` URL; empty = the system's"
    )
    models: tuple[str, ...] = _setting(
        (),
        "model tags to serve, each `name` or `name#pool`; required. Once `warmfleet pools add` was called, the "
        "registry in Redis tells the pools of a model, and of a tag here only its name counts (pools.md)",
    )
    static_workers: tuple[str, ...] = _setting(
        (),
        "engines without the plugin: URLs, `http+dns://name:port` and `file:///path`; behind a URL may stand "
        "`#cache_tokens=400000&zone=eu-1a`, its cache and labels (connect.md)",
    )
    worker_api_key: str = _secret(
        "", "key for engines, in place of the client's Authorization; empty = the client's own"
    )
    worker_ca: str = _setting(
        "", "PEM file of the authority that signed the engines' certificates; empty = the system's authorities"
    )
    worker_addresses: tuple[str, ...] = _setting(
        ANY_PRIVATE,
        "address ranges that a worker's URL may point to, so that a forged join cannot send requests elsewhere. Set it "
        "to the engines' own addresses where they want a key: else no unproved worker gets one (security.md)",
    )
    tokenizer: str = _setting("", "path or hub name of a tokenizer that replaces those of the workers")
    host: str = _setting(
        "127.0.0.1",
        "address to listen on; the default is reachable from this machine only",
        group="Addresses and doors",
    )
    port: int = _setting(8080, "port to listen on")
    admin_port: int = _setting(
        ADMIN_PORT,
        "port for operators, on the same address; the paths for operators (api.md) are on this port only; 0 = all "
        "paths are on the clients' port",
    )
    epp_port: int = _setting(
        0,
        "port at which gateways of the Gateway API Inference Extension ask where a request goes (ext_proc; picker.md), "
        "on the same address; with `WARMFLEET_TLS_CERT` by TLS; 0 = none",
    )
    epp_health_port: int = _setting(
        0, "port for gRPC health checks without TLS, as kubelets send them, of the picker; 0 = on its own port only"
    )
    epp_leaves: bool = _setting(
        True,
        "end a gateway's call behind the request if the engine reports the ends of requests, so that the answer passes "
        "by (picker.md); False = stay until the answer ends, for gateways that take the end of a call for a failure",
    )
    tls_cert: str = _setting(
        "",
        "PEM file of this replica's certificate and those between it and its authority; empty = no TLS (security.md)",
    )
    tls_key: str = _setting("", "PEM file of the key of that certificate")
    tls_client_ca: str = _setting(
        "", "PEM file of authorities, by one of which clients need a certificate; empty = clients need none"
    )
    cors_origins: tuple[str, ...] = _setting(
        (), "origins whose pages may call this replica from a browser, such as `https://chat.example.com`; `*` = all"
    )
    passed_paths: tuple[str, ...] = _setting(
        ("/v1/audio/*", "/v1/images/*", "/v1/moderations"),
        "paths of engines that requests may be sent to besides those of `api.md`, by load; `/*` at the end: all below",
    )
    client_keys_file: str = _setting(
        "",
        "file of API keys, one of which every request to an engine and `/v1/models` must have (security.md); read "
        "again when it changes; empty = every client is served",
        group="Rights and secrets",
    )
    admin_key: str = _secret(
        "",
        "bearer token that the paths for operators require; empty = open to everybody, with exceptions where clients "
        "are kept apart (security.md)",
    )
    tenant_key: str = _secret(
        "", "a secret of at least 16 characters: tenants never share cached blocks; empty = one cache for all"
    )
    tenant_header: str = _setting(
        "Authorization",
        "request header that names the tenant: always for the queue, and for the caches with `WARMFLEET_TENANT_KEY`",
    )
    answer_headers: str = _setting(
        "all", "`all`, or `request_id`: then answers do not tell the worker and the matched tokens"
    )
    allowed_fields: tuple[str, ...] = _setting(
        (),
        "request fields that are refused unless named here: `chat_template`, `kv_transfer_params`, "
        "`ec_transfer_params`",
    )
    approved_templates: tuple[str, ...] = _setting(
        (),
        "sha256 of chat templates that may run in this process, besides those of `warmfleet artifacts approve`; `*` = "
        "every worker's, and every worker's tokenizer is loaded untried",
    )
    policy: str = _setting(
        "cost",
        'placement policy (`lua/README.md`, "Policies"); exceptions for single models: `cost,modelA=sticky`',
        group="The choice of a worker",
    )
    ttft_objective_s: PerModel[float] = _setting(  # noqa: RUF009  the call makes a field
        PerModel(0.0), "time to first token that is quick enough; exceptions: `0.5,modelA=1.2`; 0 = no objective"
    )
    prefer: tuple[str, ...] = _setting(
        (),
        "labels that workers should have, each with the seconds that the policy `cost` adds for a worker without it: "
        "`zone=eu-1a:0.05` (operate.md)",
    )
    decide_timeout_s: float = _setting(
        0.05,
        "longest wait for a decision, at most 10; then the fallback chooses. Time in which the event loop is late "
        "does not count, up to 1 s",
    )
    token_handoff: bool = _setting(True, "send engines a prompt's token ids, so that they do not tokenise it again")
    warm_prefixes: int = _setting(
        0, "number of popular prefixes that an empty worker computes before it takes requests; 0 = none"
    )
    max_engine_wait_s: float = _setting(
        0.05,
        "a request waits in the queue while its engine has more seconds of prefill ahead than this, or than a measured "
        "limit, if that is higher (operate.md). 0: no queue",
        group="The queue",
    )
    queue_max: int = _setting(
        1_024, "requests of one pool (a model without pools has one) that may wait, in all replicas together; then 429"
    )
    queue_timeout_s: float = _setting(
        30.0,
        "longest wait in the queue; then 503. 0 = no request waits. The header `X-Request-Timeout-Ms` shortens it for "
        "one request",
    )
    paused_max_s: float = _setting(
        60.0,
        "longest time for which an agent's session that lost its place in the caches is held (operate.md)",
    )
    session_wait_max_s: float = _setting(
        900.0,
        "a new session of an agent is refused (429) at its first request if it would be held for longer than this; 0 = "
        "sessions are never held",
    )
    queue_priority: bool = _setting(
        False, "order the queue by the request's `priority` (lower goes first), which every client can set"
    )
    engine_priority: bool = _setting(
        False,
        "let engines with `--scheduling-policy priority` take waiting prompts by their uncached work, least first",
    )
    stream_idle_s: float = _setting(
        300.0,
        "a stream ends with an error if its engine sends nothing for this long in its middle; 0 = no limit",
        group="Slow and failing engines",
    )
    request_max_s: float = _setting(
        0.0, "longest time from reading a request to the end of its engine's answer; then 504; 0 = no limit"
    )
    hedge_after_s: float = _setting(
        0.0,
        "a stream without a first byte after this time is asked of a second worker, too, and the first byte wins "
        "(operate.md); 0 = off",
    )
    continue_greedy: bool = _setting(
        False,
        "if the engine of a greedy stream (`temperature` 0) dies, another worker goes on with it; without this only "
        "where the client sends `X-Warmfleet-Continue` (api.md)",
    )
    body_max_bytes: int = _setting(
        33_554_432,
        "longest request body; a longer one is answered with 413. All bodies of a port may take 32 times as much "
        "(api.md)",
        group="Bounds of a replica, its start and its end",
    )
    max_connections: int = _setting(
        4_096,
        "connections that one replica holds open on each of its ports (clients', operators') (api.md)",
    )
    keepalive_s: float = _setting(
        75.0, "a client's connection without a request is closed after this time; a proxy in front must close earlier"
    )
    trie_bytes: int = _setting(268_435_456, "about the bound of the prompt trie, which keeps ids and hashes of prompts")
    drain_s: float = _setting(
        5.0,
        "after SIGTERM a replica still accepts requests for this long, so that balancers notice (operate.md)",
    )
    shutdown_grace_s: float = _setting(
        30.0,
        "running answers may go on for this long after a stop signal; then they are cut, with error code `stopping`",
    )
    log_level: str = _setting(
        "info", "least level of the log's lines: `debug`, `info`, `warning`, `error`", group="Logs"
    )
    log_format: str = _setting(
        "text", "`text`, or `json`: one object a line, with the request's id where the line is about one"
    )
    access_log: bool = _setting(
        False, "log a line for each request: where its time went, its worker, its tokens; nothing of its content"
    )
    decision_log: str = _setting(
        "", "file for a sample of the decisions, for `warmfleet replay`; each replica needs its own; empty = none"
    )

    def engine_wait_s(self, tag: str) -> float:
        """Return ``max_engine_wait_s``, or the model's TTFT objective if less, which a longer wait would miss."""
        return min(self.max_engine_wait_s, self.ttft_objective_s.of(tag) or math.inf)

    @property
    def lists_workers(self) -> bool:
        """Whether the operator listed workers' addresses, so that workers get requests and the key before a probe."""
        return self.worker_addresses != ANY_PRIVATE

    @property
    def explain_key(self) -> str | None:
        """The key that a request needs to get an explanation of its decision.

        Empty: no key is needed. None: no request gets one, because clients must not know of workers and no operator's
        key is set.
        """
        hidden = self.answer_headers == "request_id" or self.tenant_key or self.client_keys_file
        return None if hidden and not self.admin_key else self.admin_key

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read and check the settings. Raises BadArgument that names the variable at fault."""
        environment = os.environ if environment is None else environment
        values = {}
        for item in fields(cls):
            name = PREFIX + item.name.upper()
            text = secret(name, environment) if item.metadata.get("secret") else environment.get(name)
            if text is not None:
                values[item.name] = _cast(name, text, item.default)
        for entry in values.get("static_workers", ()):
            engine_source(entry)
        return cls(**values).checked()

    def checked(self) -> Settings:
        """Return these settings unchanged. Raises BadArgument for a value, or a pair of values, that cannot work."""
        try:
            policies(self.policy)
        except BadArgument as error:
            raise BadArgument(f"{PREFIX}POLICY={self.policy!r}: {error}") from error
        for message in (*self._wrong_values(), *self._wrong_lists(), *self._contradictions()):
            raise BadArgument(PREFIX + message)
        return self

    def _wrong_values(self) -> Iterator[str]:
        """Yield a message for each value that is wrong whatever the others are."""
        for name, port in self._ports().items():
            if port > MAX_PORT:
                yield f"{name}={port}: a port is 0 to {MAX_PORT}"
        if self.log_level not in LOG_LEVELS:
            yield f"LOG_LEVEL={self.log_level[:80]!r}: known are {', '.join(LOG_LEVELS)}"
        if self.log_format not in LOG_FORMATS:
            yield f"LOG_FORMAT={self.log_format[:80]!r}: known are {', '.join(LOG_FORMATS)}"
        if self.queue_max > MAX_TICKETS:
            yield f"QUEUE_MAX={self.queue_max}: the queue holds at most {MAX_TICKETS} requests"
        if self.answer_headers not in ("all", "request_id"):
            yield f"ANSWER_HEADERS={self.answer_headers!r}: known are all, request_id"
        if 0 < len(self.tenant_key) < MIN_SECRET_CHARACTERS:
            yield f"TENANT_KEY must have at least {MIN_SECRET_CHARACTERS} characters"
        if not _HEADER.fullmatch(self.tenant_header):
            yield f"TENANT_HEADER={self.tenant_header[:80]!r} is not the name of a header"

    def _ports(self) -> dict[str, int]:
        return {
            "PORT": self.port,
            "ADMIN_PORT": self.admin_port,
            "EPP_PORT": self.epp_port,
            "EPP_HEALTH_PORT": self.epp_health_port,
        }

    def _wrong_lists(self) -> Iterator[str]:
        """Yield a message for each entry of a list that is wrong whatever the other settings are."""
        for digest in self.approved_templates:
            if digest != "*" and not _SHA256.match(digest):
                yield f"APPROVED_TEMPLATES: {digest[:80]!r} is neither * nor a sha256 of 64 hex digits"
        try:
            preferences(self.prefer)
        except ValueError as error:
            yield f"PREFER: {error}"
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                yield f"CORS_ORIGINS: {origin[:80]!r} is not an origin such as https://chat.example.com"
        for text in self.worker_addresses:
            try:
                ipaddress.ip_network(text, strict=False)
            except ValueError:
                yield f"WORKER_ADDRESSES: {text[:80]!r} is not an address range such as 10.0.0.0/8"

    def _contradictions(self) -> Iterator[str]:
        """Yield a message for each value that contradicts another setting, or the 30 s that a reservation lives."""
        for name, value in ("CLIENT_KEYS_FILE", self.client_keys_file), ("TENANT_KEY", self.tenant_key):
            if value and not self.admin_key and not self.admin_port:
                why = "/metrics, /workers and /explain would tell every client about the others"
                yield f"{name} is set, so set WARMFLEET_ADMIN_KEY or WARMFLEET_ADMIN_PORT, too: {why}"
        if self.admin_port and self.admin_port == self.port:
            yield f"ADMIN_PORT={self.admin_port} must differ from WARMFLEET_PORT, or be 0: then both are one port"
        taken = [port for port in (self.port, self.admin_port) if port]
        for name, port in ("EPP_PORT", self.epp_port), ("EPP_HEALTH_PORT", self.epp_health_port):
            if port and port in taken:
                yield f"{name}={port} must differ from the other ports"
            taken.append(port)
        if self.epp_health_port and not self.epp_port:
            yield "EPP_HEALTH_PORT needs WARMFLEET_EPP_PORT: without it no picker runs whose health could be asked"
        if bool(self.tls_cert) != bool(self.tls_key):
            yield "TLS_CERT and WARMFLEET_TLS_KEY need each other: set both"
        if self.tls_client_ca and not self.tls_cert:
            yield "TLS_CLIENT_CA needs WARMFLEET_TLS_CERT: without TLS no client shows a certificate"
        if not 0 < self.decide_timeout_s <= MAX_DECIDE_TIMEOUT_S:
            limit = f"more than 0 and at most {MAX_DECIDE_TIMEOUT_S:g}"
            yield f"DECIDE_TIMEOUT_S={self.decide_timeout_s:g} must be {limit}: a reservation lives 30 s"


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with our prefix that have no effect: name -> why."""
    environment = os.environ if environment is None else environment
    known = {PREFIX + item.name.upper() for item in fields(Settings)}
    known |= {f"{PREFIX}{item.name.upper()}_FILE" for item in fields(Settings) if item.metadata.get("secret")}
    names = sorted(name for name in environment if name.startswith(PREFIX) and name not in known | FOREIGN)
    return {name: _unknown(name, known) for name in names}


def _unknown(name: str, known: Collection[str]) -> str:
    meant = get_close_matches(name, known, 1, LIKE)
    return "no setting has this name" + (f"; did you mean {meant[0]}?" if meant else "")


def secret(name: str, environment: Mapping[str, str]) -> str | None:
    """Return this variable's value, or the content of the file that ``NAME_FILE`` names; None if neither is set.

    White space at the ends of the content is left out. Raises BadArgument if both are set, or the file gives no text.
    """
    path = environment.get(f"{name}_FILE", "")
    if not path:
        return environment.get(name)
    if name in environment:
        raise BadArgument(f"{name} and {name}_FILE are both set: set one of them")
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_SECRET_BYTES + 1).decode().strip()
    except OSError as error:
        raise BadArgument(f"{name}_FILE cannot be read: {error}") from error
    except UnicodeDecodeError:
        raise BadArgument(f"{name}_FILE={path!r} is not text in UTF-8") from None
    if not text or len(text) > MAX_SECRET_BYTES:
        raise BadArgument(f"{name}_FILE={path!r} is empty, or has more than {MAX_SECRET_BYTES} bytes")
    return text


def _cast(name: str, text: str, default: Any) -> Any:
    by_model = isinstance(default, PerModel)
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        value = default.read(text, type(default.default)) if by_model else type(default)(text)
    except (KeyError, ValueError) as error:
        name_of_type = type(default.default if by_model else default).__name__
        kind = NUMBERS.get(name_of_type, name_of_type) + (" for each model" if by_model else "")
        raise BadArgument(f"{name}={text!r} is not a {kind}") from error
    for number in value.values() if by_model else (value,):
        if isinstance(number, int | float) and not 0 <= number < math.inf:
            raise BadArgument(f"{name}={text!r} must be a finite number, not negative")
    return value
