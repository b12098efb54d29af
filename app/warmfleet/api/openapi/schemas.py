"""JSON schemas of the fields of requests that the router reads, and of its own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet.api.client_hints import MAX_PREFIX_TOKENS
from warmfleet.api.gateway_routes import MAX_EXCLUDED, MAX_KEY_BYTES, MAX_OUTPUT_TOKENS, OUTCOMES
from warmfleet.api.why_routes import MAX_ID, MOST, ORDERS
from warmfleet.prompt.engine_paths import KNOWN, SEGMENT
from warmfleet.prompt.request import MAX_MESSAGES, MAX_PROMPTS, MAX_SALT, REFUSED
from warmfleet.protocol.wire import RESERVATION

if TYPE_CHECKING:
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.settings import Settings

Json = dict[str, Any]


TEXT: Json = {"type": "string"}
IN_PATH: Json = {"type": "string", "pattern": f"^{SEGMENT}$"}
ANY_OBJECT: Json = {"type": "object"}
STATUS: Json = {"type": "object", "required": ["status"], "properties": {"status": TEXT}}
MODEL: Json = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "root", "parent", "max_model_len"],
    "properties": {
        **dict.fromkeys(("id", "owned_by", "root"), TEXT),
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "parent": {"type": ["string", "null"]},
        "max_model_len": {"type": ["integer", "null"]},
    },
}
#: The schemas of the router's own answers with status 200, by path.
OWN_ANSWERS: dict[str, Json] = {
    "/v1/models": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": MODEL}},
    },
    "/v1/models/{model}": MODEL,
    "/version": {
        "type": "object",
        "required": ["version", "engines"],
        "properties": {"version": TEXT, "engines": {"type": "object", "additionalProperties": {"type": "integer"}}},
    },
    "/workers": {
        "type": "object",
        "required": ["models"],
        "properties": {"models": {"type": "array", "items": ANY_OBJECT}},
    },
    "/replicas": {
        "type": "object",
        "required": ["fresh", "replicas"],
        "properties": {"fresh": {"type": "boolean"}, "replicas": {"type": "array", "items": ANY_OBJECT}},
    },
    "/why": {
        "type": "object",
        "required": ["replica", "kept", "since", "requests"],
        "properties": {
            "replica": TEXT,
            "kept": {"type": "integer"},
            "since": {"type": ["number", "null"]},
            "requests": {"type": "array", "items": ANY_OBJECT},
        },
    },
    "/status.json": {
        "type": "object",
        "required": ["at", "replica", "rungs", "models", "slow"],
        "properties": {
            "at": {"type": "number"},
            "replica": ANY_OBJECT,
            "rungs": {"type": "array", "items": TEXT},
            "models": {"type": "array", "items": ANY_OBJECT},
            "slow": {"type": "array", "items": ANY_OBJECT},
        },
    },
    "/route": {
        "type": "object",
        "required": ["reservation", "model", "worker", "url", "headers", "cache_salt", "expires_in_s"],
        "properties": {
            "reservation": {"type": ["string", "null"]},
            "model": TEXT,
            "worker": TEXT,
            "url": TEXT,
            "matched_tokens": {"type": "integer"},
            "prompt_tokens": {"type": "integer"},
            "expires_in_s": {"type": "number"},
            "headers": {"type": "object", "additionalProperties": TEXT},
            "cache_salt": {"type": ["string", "null"]},
        },
    },
    "/settle": {"type": "object", "required": ["result"], "properties": {"result": TEXT}},
    "/renew": {"type": "object", "required": ["expires_in_s"], "properties": {"expires_in_s": {"type": "number"}}},
}
#: Types that vLLM's request models accept: for a number also a text or a boolean, for a boolean a word or a number.
NUMBER: Json = {"type": ["integer", "number", "string", "boolean", "null"]}
FLAG: Json = {"type": ["boolean", "integer", "number", "string", "null"]}
PROMPT: Json = {
    "description": f"A text, token ids, or up to {MAX_PROMPTS} of these",
    "anyOf": [TEXT, {"type": "array"}],
}
MESSAGES: Json = {
    "type": "array",
    "maxItems": MAX_MESSAGES,
    "items": {"type": "object", "required": ["role"], "properties": {"role": TEXT}},
}


def _header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


PARAMETERS = [
    _header("X-Request-Id", TEXT, "Comes back in the answer, without unsafe characters"),
    _header(
        "X-Request-Timeout-Ms",
        {"type": "integer", "minimum": 1, "maximum": 10**12 - 1},
        "How long after it came the request may wait for a worker with room",
    ),
    _header("X-Session-ID", TEXT, "Requests of one session go to one worker where that costs nothing"),
    _header("X-Warmfleet-Session", TEXT, "The same; goes before X-Session-ID"),
    _header(
        "X-Warmfleet-Prefix-Len",
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_PREFIX_TOKENS}, {"const": ""}]},
        "Tokens of the prompt that other requests share; 0: all",
    ),
    _header(
        "X-Warmfleet-Continue",
        {"enum": ["1", "0", "true", "false", "yes", "no", ""]},
        "1: another engine goes on with this stream if its own dies",
    ),
    _header("X-Warmfleet-Labels", TEXT, "Only workers with all of these labels: zone=eu-1a,tier=gold"),
    _header(
        "X-Warmfleet-Conversation",
        {"enum": ["ended", ""]},
        "ended: the conversation ends with this request, so an engine may evict its blocks first",
    ),
]
HINTS = [{"$ref": f"#/components/parameters/{parameter['name']}"} for parameter in PARAMETERS]
READ_PATHS = [path.path for path in KNOWN.values() if path.form not in ("unknown", "none")]
PLACED: Json = {"type": "object", "description": "The body of the request that is to be placed"}
BOOKED: Json = {"reservation": TEXT | {"pattern": f"^{RESERVATION}$"}, "model": {"type": ["string", "null"]}}
BODIES: dict[str, Json] = {
    "/explain": PLACED | {"properties": {"tenant": {"type": ["string", "null"]}, "endpoint": {"enum": READ_PATHS}}},
    "/route": PLACED,
    "/renew": {"type": "object", "required": ["reservation"], "properties": BOOKED},
    "/settle": {
        "type": "object",
        "required": ["reservation", "outcome"],
        "properties": BOOKED
        | {
            "outcome": {"enum": [*OUTCOMES]},
            "status": {"type": ["integer", "null"], "minimum": 100, "maximum": 599},
            "failed_workers": {"type": ["array", "null"], "maxItems": MAX_EXCLUDED, "items": TEXT},
            "output_tokens": {"type": "integer", "minimum": 0, "maximum": MAX_OUTPUT_TOKENS},
        },
    },
}
OWN_PARAMETERS: dict[str, list[Json]] = {
    "/v1/models/{model}": [{"name": "model", "in": "path", "required": True, "schema": IN_PATH}],
    "/why": [
        {"name": "id", "in": "query", "required": False, "schema": {"type": "string", "maxLength": MAX_ID}},
        {"name": "order", "in": "query", "required": False, "schema": {"enum": [*ORDERS]}},
        {
            "name": "count",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 1, "maximum": MOST},
        },
    ],
    "/route": [
        *HINTS,
        {"name": "endpoint", "in": "query", "required": False, "schema": {"enum": [*KNOWN]}},
        {"name": "exclude", "in": "query", "required": False, "schema": TEXT},
        _header("Idempotency-Key", TEXT | {"maxLength": MAX_KEY_BYTES}, "The same key gets the same reservation"),
        _header("X-Warmfleet-Tenant", TEXT, "The value of the client's tenant header, or the name of its key"),
    ],
}


def body_schema(path: EnginePath, settings: Settings) -> Json:
    """Return the schema of the JSON body of a request to an engine, as far as the router reads it."""
    fields: Json = {"model": {"type": ["string", "null"]}}
    fields |= {name: {"type": "null", "description": "not accepted"} for name in REFUSED}
    for name in settings.allowed_fields:
        fields.pop(name, None)
    if settings.queue_priority:
        fields["priority"] = NUMBER
    if path.takes_salt:
        fields["cache_salt"] = {"type": ["string", "null"], "maxLength": MAX_SALT}
    if path.form not in ("completions", "chat"):
        return {"type": "object", "properties": fields}
    fields |= {"stream": FLAG, "max_tokens": NUMBER, "add_special_tokens": FLAG, "n": NUMBER, "request_id": {}}
    if path.form == "completions":
        return {"type": "object", "required": ["prompt"], "properties": fields | {"prompt": PROMPT}}
    arguments: Json = {"type": ["object", "null"]}
    if "chat_template" in fields:
        arguments["properties"] = {"chat_template": fields["chat_template"]}
    fields |= {"messages": MESSAGES, "add_generation_prompt": FLAG, "continue_final_message": FLAG}
    fields["max_completion_tokens"] = NUMBER
    fields["chat_template_kwargs"] = arguments
    return {"type": "object", "required": ["messages"], "properties": fields}
