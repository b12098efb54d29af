"""Reads a client's request from what a gateway shows of it: who asks, for what, and which headers the engine gets."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.api.client_hints import patience_s, read_hints
from warmfleet.api.completions import PASSED_ON
from warmfleet.api.http_request import HttpRequest
from warmfleet.engines.engine_priority import PRIORITY_HEADER
from warmfleet.engines.request_headers import header_lines, header_value, safe_request_id
from warmfleet.errors import BadRequest, MethodNotAllowed, NotFound, UnsupportedCoding
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.routing.call import Call

if TYPE_CHECKING:
    from warmfleet.api.access.client_keys import ClientKey, ClientKeys
    from warmfleet.prompt.engine_paths import EnginePath, EnginePaths
    from warmfleet.routing.call import Hints
    from warmfleet.routing.tenants import Tenancy
    from warmfleet.settings import Settings
    from warmfleet.tracing.request_record import RequestRecord

Field = tuple[bytes, bytes]
Fields = tuple[Field, ...]

#: Headers of the Gateway API Inference Extension that name the flow of a request, by which the queue is fair, and the
#: client's objective for the time to its first token in ms. The second names are llm-d's.
FAIRNESS = (b"x-gateway-inference-fairness-id", b"x-llm-d-inference-fairness-id")
TTFT = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
MAX_TTFT_MS = 3_600_000
#: Headers that a router sets for an engine, and that no client may set.
OURS_ALONE = frozenset({b"x-data-parallel-rank", PRIORITY_HEADER.lower().encode()})
HINTS = b"x-warmfleet-"  # begin of the names of headers for routers, one of which holds the operator's explain key
MODELS = "/v1/models"
KEYS = frozenset({b"authorization", b"x-api-key"})


class Asked(NamedTuple):
    """A request as its headers tell it. path: None for a list of models. named: the client gave the request's id."""

    path: EnginePath | None
    method: str
    target: bytes
    query: str
    request_id: str
    named: bool
    client: ClientKey


class ClientRequests:
    """Reads requests under the settings of a replica, by the rules of its port for clients."""

    def __init__(self, paths: EnginePaths, keys: ClientKeys, tenancy: Tenancy, settings: Settings) -> None:
        self._paths = paths
        self._keys = keys
        self._tenancy = tenancy
        self._by_target = {path.encode(): known for path, known in KNOWN.items()}
        self._explain_key = settings.explain_key
        key = settings.worker_api_key
        self._authorization = header_value(f"Bearer {key}") if key else b""
        #: Where tenants are told apart by a secret or by keys, a header that clients may set names none.
        self._takes_fairness = not (settings.tenant_key or settings.client_keys_file)

    def asked(self, fields: list[Field]) -> Asked:
        """Read the headers. Raises NotFound, MethodNotAllowed, Unauthorized, BadRequest, UnsupportedCoding."""
        given = dict(fields)
        target, method = given.get(b":path", b""), given.get(b":method", b"").decode("ascii", "replace")
        client = self._keys.client(fields)
        path_bytes, _, query = target.partition(b"?")
        path = self._by_target.get(path_bytes)
        if path is None:
            name = HttpRequest(given.get(b":method", b""), target, "1.1", fields, keeps_open=True).url()[0]
            path = self._paths.find(name)
            if path is None and name != MODELS:
                raise NotFound(f"{method} {name[:100]} is not served here.")
        methods = ("GET",) if path is None else path.methods
        if method not in methods:
            raise MethodNotAllowed(f"This endpoint takes {', '.join(methods)}.", ", ".join(methods))
        if query and not query.isascii():
            raise BadRequest("The query of the URL must be ASCII, with every other byte written as %XX.")
        if given.get(b"content-encoding", b"identity").lower() != b"identity":
            raise UnsupportedCoding("A gateway's picker reads bodies that are not compressed only.", "identity")
        named = given.get(b"x-request-id", b"")
        return Asked(path, method, target, query.decode(), safe_request_id(named), bool(named), client)

    def call(self, asked: Asked, path: EnginePath, fields: list[Field], body: bytes, record: RequestRecord) -> Call:
        """Make the call of a request whose body has come. Raises BadRequest."""
        given = dict(fields)
        tenant, flow = self._tenancy.of(fields, asked.client.name)
        if self._takes_fairness:
            fairness = next((given[name] for name in FAIRNESS if name in given), b"")
            if fairness:
                flow = self._tenancy.flow_of(fairness)
        passed = {PASSED_ON[name]: value for name, value in fields if name in PASSED_ON and name not in KEYS}
        authorization = self._authorization_of(given)
        if authorization:
            passed[b"Authorization"] = authorization
        content_type = given.get(b"content-type", b"application/json")
        return Call(
            path,
            body,
            record,
            header_lines({**passed, b"Content-Type": content_type}.items()),
            tenant,
            flow,
            patience_s(given[b"x-request-timeout-ms"]) if b"x-request-timeout-ms" in given else math.inf,
            time.perf_counter(),
            self._hints(given),
            asked.method,
            f"{path.path}?{asked.query}" if asked.query else path.path,
            asked.client.models,
            asked.client.limits,
            content_type,
            asked.named,
        )

    def _hints(self, given: dict[bytes, bytes]) -> Hints:
        ours = {name: value for name, value in given.items() if name.startswith(HINTS)}
        hints = read_hints(ours, given.get(b"x-session-id", b""), self._explain_key)
        ttft_ms = next((given[name] for name in TTFT if name in given), None)
        return hints if ttft_ms is None else _with_ttft(hints, ttft_ms)

    def for_engine(self, fields: list[Field]) -> tuple[Fields, tuple[bytes, ...]]:
        """Return the headers to set in place of the client's, and the names of those to remove."""
        given = dict(fields)
        authorization = self._authorization_of(given)
        is_set = authorization and authorization != given.get(b"authorization")
        headers = ((b"authorization", authorization),) if is_set else ()
        kept = b"authorization" if authorization else b""
        removed = (name for name in given if name in OURS_ALONE or name in KEYS or name.startswith(HINTS))
        return headers, tuple(name for name in removed if name != kept)

    def _authorization_of(self, given: dict[bytes, bytes]) -> bytes:
        """Return the Authorization that the engine gets; empty: none."""
        if self._authorization:
            return self._authorization
        if self._keys.required:  # an engine must not learn a key that routers accept
            return b""
        if b"x-api-key" in given and b"authorization" not in given:  # vLLM takes a key in Authorization only
            return b"Bearer " + given[b"x-api-key"]
        return given.get(b"authorization", b"")


def _with_ttft(hints: Hints, value: bytes) -> Hints:
    text = value.strip()
    try:
        milliseconds = float(text) if len(text) <= 12 else math.nan
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= MAX_TTFT_MS:
        raise BadRequest("X-SLO-TTFT-Ms must be a number of milliseconds above 0.", "X-SLO-TTFT-Ms")
    return replace(hints, ttft_s=milliseconds / 1_000)
