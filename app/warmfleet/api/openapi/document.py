"""The OpenAPI document of a port: the requests that a replica takes there, and its answers. Built at the start.

For requests to engines, the document has only the fields that the router itself reads, and refuses if they are wrong;
all other fields, and the answers, depend on the engine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response
from starlette.routing import Route

from warmfleet import errors
from warmfleet.api.openapi.schemas import (
    ANY_OBJECT,
    BODIES,
    HINTS,
    IN_PATH,
    OWN_ANSWERS,
    OWN_PARAMETERS,
    PARAMETERS,
    STATUS,
    TEXT,
    Json,
    body_schema,
)
from warmfleet.api.status_page.routes import FILES
from warmfleet.prompt.engine_paths import OPERATORS, OWN_HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.requests import Request as HTTPRequest

    from warmfleet.errors import WarmfleetError
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.settings import Settings

PATH = "/openapi.json"
HEALTH = frozenset({"/health", "/ping", "/readyz"})
KEYED = frozenset({"/v1/models", "/v1/models/{model}"})  # the paths that need a client's key as engines' paths do
#: Possible errors of any request, of a request with a body, and of a request that is placed at a worker.
ANY_FAULT = (errors.BadRequest, errors.NotFound, errors.MethodNotAllowed, errors.HeadersTooLarge)
BODY_FAULTS = (errors.TooLarge, errors.UnsupportedCoding, errors.UploadsFull)
PLACING = (
    *(errors.ModelNotFound, errors.Overloaded, errors.RateLimited, errors.NoWorker, errors.QueueTimeout),
    errors.FleetUnavailable,
)
ENGINE_FAULTS = (errors.UpstreamGone, errors.EngineTimeout, errors.TooManyConnections, errors.Stopping)


def documented(routes: Sequence[Route], engine_paths: Iterable[EnginePath], settings: Settings) -> list[Route]:
    """Return these routes, and a route for the port's document. engine_paths: the paths that the port passes on."""

    async def openapi(_request: HTTPRequest) -> Response:
        """The OpenAPI document of all that this port takes."""
        return Response(told, media_type="application/json")

    served = [*routes, Route(PATH, openapi)]
    told = document(served, engine_paths, settings)
    return served


def document(routes: Sequence[Route], engine_paths: Iterable[EnginePath], settings: Settings) -> bytes:
    """Build the document of a port with these routes, which passes on requests to ``engine_paths``."""
    answers = _engine_answers()
    paths = {path.path: _engine_path(path, answers, settings) for path in engine_paths}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths[path] = {
            method.lower(): _own(path, route, settings) for method in sorted(route.methods or ()) if method != "HEAD"
        }
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Warmfleet",
                "version": "1",
                "description": "Routes requests of OpenAI's and Anthropic's APIs to the vLLM engine that has computed "
                "most of their prompt before.",
            },
            "paths": paths,
            "components": {
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
                "parameters": {parameter["name"]: parameter for parameter in PARAMETERS},
                "responses": {f"engine-{status}": answer for status, answer in answers.items()},
            },
        }
    )


# ---------------------------------------------------------------- paths of engines


def _engine_path(path: EnginePath, answers: Iterable[str], settings: Settings) -> Json:
    """Build the entry of a path whose requests go to engines. answers: the statuses listed as engines' answers."""
    needed = path.form in ("completions", "chat")
    content: Json = {"application/json": {"schema": body_schema(path, settings)}}
    if path.takes_all_types:
        content = {"multipart/form-data": {"schema": {"properties": {"model": TEXT}}}, "*/*": {"schema": {}}}
    below: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": IN_PATH} for name in re.findall(r"{(\w+)}", path.path)
    ]
    operation = {
        "summary": "Answered by an engine",
        "parameters": [*below, *HINTS],
        "responses": {status: {"$ref": f"#/components/responses/engine-{status}"} for status in answers},
        **_security(key=bool(settings.client_keys_file)),
    }
    with_body = {**operation, "requestBody": {"required": needed, "content": content}}
    return {method.lower(): operation if method == "GET" else with_body for method in path.methods}


def _engine_answers() -> Json:
    return {
        "200": {"description": "The engine's answer", "content": {"*/*": {}}},
        **_errors((*ANY_FAULT, *BODY_FAULTS, *PLACING, *ENGINE_FAULTS), engines=True),
        "4XX": {"description": "The engine's words about a request that it refuses", "content": {"*/*": {}}},
    }


# ---------------------------------------------------------------- the router's own paths


def _own(path: str, route: Route, settings: Settings) -> Json:
    said = (route.endpoint.__doc__ or "").strip().partition("\n")[0]
    faults: list[type[WarmfleetError]] = [*ANY_FAULT, errors.ModelNotFound]
    operation: Json = {"summary": said}
    if path in OWN_PARAMETERS:
        operation["parameters"] = OWN_PARAMETERS[path]
    if path in BODIES:
        operation["requestBody"] = {"required": True, "content": _json(BODIES[path])}
        faults += [*BODY_FAULTS, *PLACING, errors.CancelledReservation, errors.KeyInUse]
    if path in OWN_HOST:
        faults.append(errors.Forbidden)
    operation["responses"] = _answer(path) | _errors(faults, engines=False)
    if path in HEALTH:
        operation["responses"]["503"] = {"description": "Not now, and why", "content": _json(STATUS)}
    keyed = path in KEYED and bool(settings.client_keys_file)
    return operation | _security(key=keyed or (path in OPERATORS and bool(settings.admin_key)))


def _answer(path: str) -> Json:
    if path == "/favicon.ico":
        return {"204": {"description": "Nothing"}}
    if path == "/metrics":
        return {"200": {"description": "Metrics for Prometheus", "content": {"text/plain": {}}}}
    if path in FILES:
        return {"200": {"description": "A file for a browser", "content": {FILES[path][1].partition(";")[0]: {}}}}
    schema = STATUS if path in HEALTH or path == "/livez" else OWN_ANSWERS.get(path, ANY_OBJECT)
    return {"200": {"description": "The answer", "content": _json(schema)}}


# ---------------------------------------------------------------- errors


def _errors(faults: Iterable[type[WarmfleetError]], *, engines: bool) -> Json:
    """Return the error answers by status. engines: whether engines' own errors also come on this path."""
    by_status: dict[str, list[type[WarmfleetError]]] = {}
    listed: list[type[WarmfleetError]] = [*faults, errors.Unauthorized]
    for fault in listed:
        by_status.setdefault(str(fault.status), []).append(fault)
    found: Json = {}
    for status, classes in sorted(by_status.items()):
        codes = sorted({error.code for error in classes})
        schema = ERROR if engines else _error(codes)
        found[status] = {"description": f"Of the router: {', '.join(codes)}", "content": _json(schema)}
        if any(error.retry_after_s for error in classes):
            found[status]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "required": not engines}}
        if errors.MethodNotAllowed in classes:
            found[status]["headers"] = {"Allow": {"schema": TEXT, "required": True}}
    return found


def _error(codes: Sequence[str]) -> Json:
    """Return the schema of the body of an error of the router with one of these codes."""
    fields = {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": {"enum": [*codes]}}
    told = {"type": "object", "required": [*fields], "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": told}}


#: The schema of the body of an error of the router or of an engine.
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message"], "properties": {"message": TEXT}}},
}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _security(*, key: bool) -> Json:
    return {"security": [{"key": []}]} if key else {}
