"""Routers take the bodies that vLLM's own server takes, by its routes and request models, without an engine."""

from __future__ import annotations

import base64
import gzip
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.replicas.replica import replica
from tests.vllm.conftest import TAG
from tests.vllm.engine import ROOT

from warmfleet.errors import BadRequest
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.prompt.request import MAX_MESSAGES, MAX_PROMPTS, MAX_SALT, MAX_SAMPLES, Request, in_utf8, priority

if TYPE_CHECKING:
    from tests.vllm.conftest import Reported
    from tests.vllm.inside import Inside

pytestmark = pytest.mark.vllm

JSON = "application/json"
USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": USER}
TEXT = {"model": "m", "prompt": "hi"}
MESSAGE = {"model": "m", "messages": USER, "max_tokens": 5}
INPUT = {"model": "m", "input": "hi"}
QUESTION = {"type": "yes_no", "key": "a", "text": "hi"}
#: The smallest body that vLLM takes on each path.
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT | {"messages": [USER]},
    "/v1/responses": INPUT,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/inference/v1/generate": {"model": "m", "token_ids": [1], "sampling_params": {}},
    "/v1/embeddings": INPUT,
    "/v2/embed": {"model": "m", "texts": ["hi"]},
    "/pooling": INPUT,
    "/classify": INPUT,
    "/score": {"model": "m", "text_1": "hi", "text_2": "hi"},
    "/v1/score": {"model": "m", "text_1": "hi", "text_2": "hi"},
    "/rerank": {"model": "m", "query": "hi", "documents": ["hi"]},
    "/v1/rerank": {"model": "m", "query": "hi", "documents": ["hi"]},
    "/v2/rerank": {"model": "m", "query": "hi", "documents": ["hi"]},
    "/tokenize": TEXT,
    "/detokenize": {"model": "m", "tokens": [1]},
    "/v1/completions/render": TEXT,
    "/v1/chat/completions/render": CHAT,
    "/v1/messages/render": MESSAGE,
    "/v1/responses/render": INPUT,
}
#: Forms of a value, of which vLLM takes some for numbers, some for booleans, some for texts, and some for none.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 5, -1, 300, 2**31, 2**53 + 1, 2**63, 10**20, 10**400),
    *(0.0, 1.0, 100.0, 1.5, -2.0, 1e2, 1e20, math.nan, math.inf),
    *("", " ", "0", "1", "100", " 100 ", "\t5\n", "100.0", "100.", "1e2", "1_000", "1__0", "_1", "+5", "-5", "007"),
    *("true", "True", " true", "FALSE", "yes", "NO", "on", "off", "t", "F", "y", "n", "x", "\uff11", "9" * 5_000),
    *([], [1], {}, {"a": 1}, "\ud800", "a\u0000b"),
)
#: Fields that routers read on every path, and those of prompts.
EVERYWHERE = (
    "model",
    "stream",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "priority",
    "request_id",
)
OF_PROMPTS = (
    *(
        "add_special_tokens",
        "echo",
        "return_prompt_text",
        "add_generation_prompt",
        "continue_final_message",
        "logprobs",
    ),
    *("tools", "tool_choice", "documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_logprobs", "suffix"),
    *("chat_template_kwargs", "prompt_cache_key", "temperature", "seed", "stop", "user", "metadata", "unknown_to_all"),
)
PROMPTS: tuple[Any, ...] = (
    *(5, True, {}, [], "", [""], ["a"], ["a", 1], [1, "a"], [1], [1.0, 2.0], [True], ["1", "2"], [[1], [2]], [[1.0]]),
    *([-1], [2**31], [2**40], [10**20], [1.5], [[]], [["a"]], [None], ["a"] * MAX_PROMPTS, "\ud800"),
)
CHATS: tuple[Any, ...] = (
    *(5, "hi", {}, [], [5], ["hi"], [{}], [{"role": "user"}], [{"role": 5, "content": "x"}], [{"content": "x"}]),
    *([{"role": "tool", "content": "x"}], [{"role": "odd", "content": None}], [{"role": "user", "content": []}]),
    *([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "x", "n": math.nan}]),
)
#: Unusual ways to write a body.
SPELLINGS: dict[str, Any] = {
    "a mark before it": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "spaces around": lambda text: f" \r\n\t{text}\r\n ".encode(),
    "a key twice": lambda text: f'{{"model": 5, {text[1:]}'.encode(),
    "NaN": lambda text: f'{{"odd": [NaN, -Infinity], {text[1:]}'.encode(),
    "a number beyond floats": lambda text: f'{{"odd": 1e999, {text[1:]}'.encode(),
    "half a surrogate pair": lambda text: f'{{"\\udc00": "\\ud800", {text[1:]}'.encode(),
    "half a pair in bytes": lambda text: b'{"odd": "\xed\xa0\x80", ' + text[1:].encode(),
    "depth": lambda text: f'{{"odd": {"[" * 300}{"]" * 300}, {text[1:]}'.encode(),
    "bytes of no text": lambda text: b'{"odd": "\xff", ' + text[1:].encode(),
    "a comma too many": lambda text: f"{text[:-1]},}}".encode(),
    "something behind it": lambda text: f"{text}x".encode(),
    "a list around it": lambda text: f"[{text}]".encode(),
    "nothing": lambda _text: b"",
}
TYPES = ("application/json; charset=latin-1", "Application/JSON", "text/plain", "application/x-www-form-urlencoded", "")


@dataclass(frozen=True)
class Case:
    path: str
    body: bytes
    content_type: str = JSON

    @property
    def name(self) -> str:
        return f"{self.path} {self.body[:160].decode('utf-8', 'replace')} {self.content_type}"


def form(**fields: str) -> bytes:
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    file = 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    return "".join(f"--line\r\n{part}" for part in (*parts, file)).encode("utf-8", "surrogatepass") + b"--line--\r\n"


def cases() -> list[Case]:
    found = [Case(path, json.dumps(body).encode()) for path, body in SMALLEST.items()]
    for path, body in SMALLEST.items():
        fields = EVERYWHERE + (OF_PROMPTS if KNOWN[path].form not in ("unknown", "none") else ())
        found += [Case(path, json.dumps(body | {name: value}).encode()) for name in fields for value in VALUES]
        salts = (5, "", "x" * 128)
        found += [Case(path, json.dumps(body | {"cache_salt": value}).encode()) for value in salts]
        found += [Case(path, spell(json.dumps(body))) for spell in SPELLINGS.values()]
        found += [Case(path, json.dumps(body).encode(), kind) for kind in TYPES]
    found += [Case("/v1/completions", json.dumps(TEXT | {"prompt": prompt}).encode()) for prompt in PROMPTS]
    for path in ("/v1/chat/completions", "/v1/messages"):
        found += [Case(path, json.dumps(SMALLEST[path] | {"messages": chat}).encode()) for chat in CHATS]
    found += [Case("/v1/responses", json.dumps(INPUT | {"input": chat}).encode()) for chat in CHATS]
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        texts = [value for value in VALUES if isinstance(value, str)]
        bodies_ = [form(**{"model": "m", name: value}) for name in EVERYWHERE for value in texts]
        found += [Case(path, body, "multipart/form-data; boundary=line") for body in bodies_]
    return found


@pytest.fixture(scope="module")
def read(vllm: Inside) -> dict[Case, dict[str, Any] | None]:
    """For each case the fields that vLLM reads; None if it refuses the body."""
    asked = cases()
    sent = [(request.path, request.content_type, base64.b64encode(request.body).decode()) for request in asked]
    return dict(zip(asked, vllm.call("read_bodies", "read_all", sent), strict=True))


def parsed(case: Case) -> Request | BadRequest:
    try:
        return bodies.parse(KNOWN[case.path], in_utf8(case.body), (), case.content_type.encode())
    except BadRequest as error:
        return error


def test_the_table_has_bodies_that_vllm_takes(read: dict[Case, dict[str, Any] | None]) -> None:
    assert [path for path, body in SMALLEST.items() if read[Case(path, json.dumps(body).encode())] is None] == []
    assert sum(found is not None for found in read.values()) > 5_000
    assert sum(found is None for found in read.values()) > 2_000


def test_what_vllm_takes_is_taken(read: dict[Case, dict[str, Any] | None]) -> None:
    refused = [(case.name, parsed(case)) for case, found in read.items() if found is not None]
    assert [(name, str(error)) for name, error in refused if isinstance(error, BadRequest)] == []


def wanted(case: Case, found: dict[str, Any], request: Request) -> dict[str, Any]:
    """The values that a router must have read, by those that vLLM read, as far as its routing uses them."""
    path = KNOWN[case.path]
    values = {"model": found["model"] or "", "priority": found.get("priority")}
    limits = [found[name] for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if name in found]
    limit = next((value for value in limits if value is not None), None)
    if path.generates and limit != (16 if path.form == "completions" else None):  # vLLM's own limit for completions
        values["max_tokens"] = limit if limit is None or limit >= 0 else None
    if "stream" in found:
        values["stream"] = bool(found["stream"])
    if "n" in found and path.generates:
        values["samples"] = min(max(found["n"] or 1, 1), MAX_SAMPLES)
    if path.form in ("completions", "chat"):
        values["add_special_tokens"] = found["add_special_tokens"]
    if path.form == "completions" and not request.unforeseen:
        given = found["prompt"]
        values["prompts"] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if path.form == "chat":
        values |= {name: found[name] for name in ("add_generation_prompt", "continue_final_message")}
    return {name: value for name, value in values.items() if value is not None}


def test_what_routing_reads_is_what_vllm_reads(read: dict[Case, dict[str, Any] | None]) -> None:
    wrong = []
    for case, found in read.items():
        request = parsed(case)
        if found is not None and isinstance(request, Request):
            ours, theirs = asdict(request) | request.arguments, wanted(case, found, request).items()
            ours["priority"] = priority(request) if "priority" in found else None
            wrong += [(case.name, name, ours[name], value) for name, value in theirs if ours[name] != value]
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"prompt": ["a"] * (MAX_PROMPTS + 1)}),
        ("/v1/chat/completions", CHAT | {"messages": USER * (MAX_MESSAGES + 1)}),
        ("/v1/chat/completions/batch", SMALLEST["/v1/chat/completions/batch"] | {"cache_salt": "x" * (MAX_SALT + 1)}),
        ("/v1/completions", TEXT | {"kv_transfer_params": {}}),
        ("/v1/chat/completions", CHAT | {"chat_template": "x"}),
    ],
)
def test_limits_of_a_router_are_in_its_documentation(path: str, body: dict[str, Any]) -> None:
    """The documented limits are the only reasons to refuse a body that vLLM takes."""
    assert isinstance(parsed(Case(path, json.dumps(body).encode())), BadRequest)
    text = " ".join((ROOT / "app/docs/api.md").read_text().split())
    told = (
        "4,096 messages",
        "256 prompts",
        "1,024 characters of `cache_salt`",
        "`kv_transfer_params` or `chat_template`",
    )
    assert [words for words in told if words not in text] == []


#: Path, body without its model, and the status that a real engine answers.
SENT: tuple[tuple[str, str, int], ...] = (
    ("/v1/chat/completions", '"messages":[{"role":"user","content":"hi"}],"max_tokens":"2","n":1.0,"stream":"no"', 200),
    ("/v1/chat/completions", '"messages":[{"role":"user","content":"hi"}],"max_tokens":-1', 400),
    ("/v1/chat/completions", '"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"n":0', 400),
    ("/v1/completions", '"prompt":[5.0,6.0],"max_tokens":2e0', 200),
    ("/v1/completions", '"prompt":[4294967296],"max_tokens":2', 400),
    ("/v1/completions", '"prompt":"hi","max_tokens":2,"unknown":NaN', 200),
    ("/v1/completions", '"prompt":"hi","max_tokens":true,"request_id":"mine:1/2"', 200),
    ("/v1/messages", '"messages":[{"role":"user","content":"hi"}],"max_tokens":" 2 "', 200),
    ("/v1/responses", '"input":"hi","max_output_tokens":2.0,"stream":"f"', 200),
    ("/tokenize", '"prompt":"hi","add_special_tokens":"off"', 200),
)


async def test_a_real_engine_answers_through_a_router_as_it_does_itself(reported: Reported) -> None:
    wrong = []
    async with replica(reported.redis_url, TAG, decide_timeout_s=5.0) as router:
        await router.routable(1)
        for path, fields, wanted in SENT:
            body = f'{{"model":"{TAG}",{fields}}}'.encode()
            async with router.client.post(
                reported.engine.url + path, data=body, headers={"Content-Type": JSON}
            ) as direct:
                told = await direct.text()
            spellings: list[tuple[bytes, dict[str, str]]] = [
                (body, {"Content-Type": JSON}),
                (body.decode().encode("utf-16"), {"Content-Type": JSON}),
                (gzip.compress(body), {"Content-Type": JSON, "Content-Encoding": "gzip"}),
            ]
            found = [await router.post(spelled, path, **headers) for spelled, headers in spellings]
            statuses = [direct.status, *(status for status, _, _ in found)]
            if statuses != [wanted] * 4:
                wrong.append((path, fields, statuses, told[:300], found[0][2][:300]))
            elif "mine" in fields:
                ids = [json.loads(answer)["id"].partition(".")[2] for _, _, answer in found]
                assert ids == ["mine:1/2"] * 3
    assert wrong == []
