"""The engine's HTTP surface, as clients, routers and scrapers see it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.engines.simulated import config, demo_identity, running
from tests.support.polling import poll

from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.openai_request import parse
from warmfleet_loadtest.simulator.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
SLOW = StepCosts(base_s=0.02, prefill_token_s=0.0)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_completion_and_its_cached_tokens() -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        body = {"model": "demo", "prompt": WORDS * 3, "max_tokens": 5, "ignore_eos": True}
        answers = [(await http.post("/v1/completions", json=body)).json() for _ in range(2)]
    prompt = len(demo_identity().completion_ids(WORDS * 3))
    for answer, cached in zip(answers, (0, (prompt - 1) // 16 * 16), strict=True):
        assert answer["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 5,
            "total_tokens": prompt + 5,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["finish_reason"] == "length"
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"] != ""


async def test_a_chat_streams_the_same_text_token_by_token() -> None:
    chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 7, "ignore_eos": True}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        whole = (await http.post("/v1/chat/completions", json=chat)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await http.post("/v1/chat/completions", json={**chat, **options})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(streamed.text)
    assert len(chunks) == 7
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7


async def test_token_ids_in_and_out() -> None:
    ids = list(range(300, 340))
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        body = {"prompt": ids, "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
        choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        chat = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": ids}}
        chat_answer = (
            await http.post("/v1/chat/completions", json={**chat, "return_token_ids": True, "max_tokens": 1})
        ).json()
        several = (await http.post("/v1/completions", json={"prompt": [ids, "b"], "n": 2, "max_tokens": 2})).json()
    assert choice["prompt_token_ids"] == ids
    assert demo_identity().text(choice["token_ids"]) == choice["text"]
    assert chat_answer["prompt_token_ids"] == ids
    assert chat_answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 41


async def test_request_ids_are_the_clients() -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url, headers={"X-Request-Id": "abc"}) as http:
        assert (await http.post("/v1/completions", json={"prompt": "a"})).json()["id"] == "cmpl-abc"
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert (await http.post("/v1/chat/completions", json=chat)).json()["id"] == "chatcmpl-abc"


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [1, -2]}', 400, "integers"),
        (b'{"prompt": "a", "max_tokens": "x"}', 400, "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 5000}', 400, "maximum context length"),
        (b'{"prompt": "a", "n": 5000}', 400, "sequences"),
        (b'{"prompt": "a", "cache_salt": ""}', 400, "cache_salt"),
        (b'{"prompt": "a", "stream": true, "stream_options": 5}', 400, "stream_options"),
        (b'{"prompt": "a", "model": "other"}', 404, "does not exist"),
    ],
)
async def test_errors_have_openais_shape(body: bytes, status: int, word: str) -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    assert word in error["message"]


NOT_OF_A_CHAT: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"stop_token_ids": [5]},
    {"logit_bias": {"5": 1}},
    {"kv_transfer_params": {"do_remote_decode": True}},
]
NOT_OF_A_COMPLETION: list[dict[str, Any]] = [
    {"best_of": 2},
    {"suffix": "x"},
    {"echo": True, "stream": True},
    {"logprobs": 0, "stream": True},
]


@pytest.mark.parametrize("more", [*NOT_OF_A_CHAT, *NOT_OF_A_COMPLETION], ids=lambda more: "+".join(more))
async def test_what_is_not_imitated_is_refused_by_its_name(more: dict[str, Any]) -> None:
    chat = more in NOT_OF_A_CHAT
    body = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        answer = await http.post(f"/v1/{'chat/' if chat else ''}completions", json=body | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in more
    assert "does not imitate" in answer.json()["error"]["message"]


async def test_what_asks_for_nothing_is_not_refused() -> None:
    nothing: dict[str, Any] = {
        "tools": [],
        "response_format": {"type": "text"},
        "logprobs": False,
        "stop": None,
        "n": 1,
    }
    tool = {"type": "function", "function": {"name": "f"}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        for more in (nothing, {"tools": [tool], "tool_choice": "none"}, {"echo": True}):
            assert (await http.post("/v1/chat/completions", json=chat | more)).status_code == 200


async def test_an_answer_calls_a_tool_unless_it_is_the_last_step() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 2}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        (called,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
        (last,) = (await http.post("/v1/chat/completions", json=body | {"tool_choice": "none"})).json()["choices"]
        lines = (await http.post("/v1/chat/completions", json=body | {"stream": True})).text.splitlines()
        (text,) = (await http.post("/v1/completions", json={"prompt": "x", "tools": tools})).json()["choices"]
    first, second = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert called["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert (called["finish_reason"], second["finish_reason"], first["finish_reason"]) == ("tool_calls",) * 2 + (None,)
    assert called["message"]["content"] == first["delta"]["content"] + second["delta"]["content"]
    assert second["delta"]["tool_calls"][0]["function"]["name"] == "f"
    assert (last["finish_reason"], last["message"]["tool_calls"], text["finish_reason"]) == ("length", [], "length")


async def test_numbers_and_booleans_are_read_as_vllm_reads_them() -> None:
    wanted = {"max_tokens": 3, "n": 1, "stream": False, "echo": False, "ignore_eos": True}
    written: list[dict[str, Any]] = [
        {"max_tokens": "3", "n": "1", "stream": "false", "echo": "no", "ignore_eos": "true"},
        {"max_tokens": 3.0, "n": 1.0, "stream": 0, "echo": 0.0, "ignore_eos": 1},
        {"max_tokens": " 3.0 ", "n": True, "stream": "F", "echo": "off", "ignore_eos": "on", "odd": float("nan")},
    ]
    bodies = [json.dumps({"prompt": [5, 6]} | fields).encode() for fields in (wanted, *written)]
    read = [parse("cmpl", body, "x", demo_identity()) for body in bodies]
    assert read == [read[0]] * 4


async def test_an_answer_ends_before_a_stop_text() -> None:
    body: dict[str, Any] = {"prompt": WORDS, "max_tokens": 12, "ignore_eos": True}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        words = whole["text"].split()
        stop = ["never said", f"{words[5]} {words[6]}"]
        cut = (await http.post("/v1/completions", json=body | {"stop": stop})).json()
        refused = await http.post("/v1/completions", json=body | {"stop": [5]})
    (choice,) = cut["choices"]
    assert (choice["text"].split(), choice["finish_reason"]) == (words[:5], "stop")
    assert cut["usage"]["completion_tokens"] == 5
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")


async def test_echo_and_logprobs_are_imitated() -> None:
    body = {"prompt": WORDS, "max_tokens": 2, "ignore_eos": True}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        plain = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        more = {"echo": True, "logprobs": 0, "prompt_logprobs": 1}
        answer = (await http.post("/v1/completions", json=body | more)).json()
        own = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "chat_template": "{{ messages }}"}
        templated = (await http.post("/v1/chat/completions", json=own)).json()
    (choice,), prompt_tokens = answer["choices"], answer["usage"]["prompt_tokens"]
    assert choice["text"].endswith(WORDS + plain["text"])
    assert len(choice["logprobs"]["tokens"]) == prompt_tokens + 2
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert len(choice["prompt_logprobs"]) == prompt_tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "every token of the prompt is computed"
    assert templated["usage"]["prompt_tokens"] == len(demo_identity().chat_ids(own)) != 0


@pytest.mark.parametrize("ids", [5, [], {"prompt_token_ids": []}, {"prompt_token_ids": [-1]}])
async def test_what_cannot_be_token_ids_of_a_chat_is_refused(ids: object) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": ids}
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 400


async def test_an_api_key_guards_v1_only() -> None:
    async with running(served=Served(("demo",), api_key="k")) as up, httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health")).status_code == 200
        models = (await http.get("/v1/models", headers={"Authorization": "Bearer k"})).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("demo", 1_024)]


async def test_tokenize_tells_what_the_engine_would_see() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        chat = (await http.post("/tokenize", json={"messages": messages})).json()
        assert chat["tokens"] == demo_identity().chat_ids({"messages": messages})
        assert (await http.post("/tokenize", json={"prompt": "Hi"})).json()["count"] == 1
        assert (await http.post("/tokenize", json={})).status_code == 400


async def test_metrics_have_vllms_names() -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        for _ in range(2):
            await http.post("/v1/completions", json={"prompt": list(range(40)), "max_tokens": 1})
        text = (await http.get("/metrics")).text
    labels = 'engine="0",model_name="demo"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0",
        f"vllm:num_requests_waiting{{{labels}}} 0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} 80",
        f"vllm:prefix_cache_hits_total{{{labels}}} 32",
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="256",',
        'prefix_caching_hash_algo="sha256_cbor"} 1.0',
    ):
        assert line in text


async def test_table_and_reset() -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        await http.post("/v1/completions", json={"prompt": list(range(40)), "max_tokens": 1})
        table = (await http.get("/sim/table")).json()
        assert table["count"] == 2
        assert set(table["hashes"]) == {digest.hex() for digest in up.engine.core.scheduler.pool.held()}
        assert (await http.post("/sim/reset")).json() == {"reset": True}
        assert (await http.get("/sim/table")).json()["count"] == 0


async def test_a_client_that_hangs_up_frees_its_request() -> None:
    async with running(config(SLOW)) as up, httpx.AsyncClient(base_url=up.url) as http:
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            assert (await http.post("/sim/reset")).status_code == 409  # in use
        scheduler = up.engine.core.scheduler
        await poll(lambda: not scheduler.busy and scheduler.pool.free == scheduler.pool.blocks - 1)


async def quickest(ask: Callable[[], Awaitable[object]], limit_s: float) -> float:
    """Seconds that ``ask`` took when it took the least of some times: a busy machine makes single ones late."""
    loop, took = asyncio.get_running_loop(), list[float]()
    while not took or (min(took) >= limit_s and len(took) < 10):
        began = loop.time()
        await ask()
        took.append(loop.time() - began)
    return min(took)


@pytest.mark.parametrize("mode", ["step", "fcfs"])
async def test_time_passes_as_the_model_says(mode: str) -> None:
    """100 steps of 5 ms, or 0.2 s of prefill and 100 tokens of 1 ms. Single timers may be late, but not their sum."""
    costs = StepCosts(base_s=0.005, prefill_token_s=0.0) if mode == "step" else StepCosts(0.2, 0.0)
    expected = 0.5 if mode == "step" else 0.299
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
    async with running(config(costs, mode=mode)) as up, httpx.AsyncClient(base_url=up.url) as http:

        async def ask() -> None:
            answer = await http.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 100

        await http.get("/health")
        assert expected <= await quickest(ask, expected + 0.4) < expected + 0.4


async def test_the_api_servers_thread_is_one() -> None:
    """Requests wait for each other in one thread, so 10 requests of 20 ms each take 200 ms."""
    costs = StepCosts(base_s=0.0001, prefill_token_s=0.0, request_s=0.02, first_token_s=0.05)
    async with running(config(costs)) as up, httpx.AsyncClient(base_url=up.url) as http:
        body = {"prompt": "a", "max_tokens": 1}

        async def ask() -> None:
            await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(10)))

        assert 0.25 <= await quickest(ask, 1.0) < 1.0


async def test_a_path_that_is_not_imitated_gets_an_error_in_json() -> None:
    async with running() as up, httpx.AsyncClient(base_url=up.url) as http:
        answer = await http.post("/v1/embeddings", json={"model": "demo", "input": WORDS})
        assert (await http.get("/v1/completions")).status_code == 405
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "this simulated engine does not imitate /v1/embeddings"
