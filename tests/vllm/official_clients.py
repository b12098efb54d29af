"""Asks one server by the official clients, and prints what they returned as JSON. It runs in an environment of its own.

    python official_clients.py http://127.0.0.1:8000 MODEL EMBEDDING_MODEL

What differs from one answer to the next is left out: ids, times, and the signatures of thoughts.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Literal

import anthropic
import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHANGING = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "call_id",
    "tool_call_id",
    "signature",
    "system_fingerprint",
}
USER = {"role": "user", "content": "Tell me of the class value index, and yield."}
PLACE = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 8}}, "required": ["place"]}
WEATHER = {"name": "weather", "description": "The weather of a place"}
TOOL = {"type": "function", "function": WEATHER | {"parameters": PLACE}}
FLAT_TOOL = {"type": "function", "strict": False, "parameters": PLACE} | WEATHER
ANTHROPIC_TOOL = WEATHER | {"input_schema": PLACE}
NAMED = {"type": "function", "function": {"name": "weather"}}
#: The model is random: at temperature 0 it would say the same blank for ever where the grammar takes one.
ANY: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 200}
NO_RETRY: dict[str, Any] = {"max_retries": 0, "timeout": 120}


class Choice(BaseModel):
    """The schema of a structured answer."""

    answer: Literal["yes", "no"]


def plain(value: Any) -> Any:
    """The value without what changes from answer to answer."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", warnings=False)
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if name not in CHANGING}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def text_of(chunks: Iterable[Any]) -> dict[str, Any]:
    """A stream of a chat in one: a busy engine may put two tokens into one chunk."""
    said, reasons, usage = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            said += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    return {"text": said, "reasons": reasons, "usage": plain(usage)}


def by_openai(base: str, model: str, embedding: str) -> dict[str, Callable[[], Any]]:
    client: Any = openai.OpenAI(base_url=f"{base}/v1", api_key="client", **NO_RETRY)
    chat: Any = client.chat.completions
    common: dict[str, Any] = {"model": model, "messages": [USER], "temperature": 0, "max_tokens": 24}
    respond: dict[str, Any] = {"model": model, "input": [USER], "temperature": 0, "max_output_tokens": 24}

    random = respond | {"temperature": 1, "max_output_tokens": 200, "extra_body": {"seed": 3}}

    def responses_stream() -> Any:
        with client.responses.stream(**respond) as stream:
            kinds = {event.type for event in stream}
            return [sorted(kinds), stream.get_final_response().output_text]

    return {
        "models": lambda: sorted(model.id for model in client.models.list()),
        "model": lambda: client.models.retrieve(model).id,
        "chat": lambda: plain(chat.create(**common)),
        "chat streamed": lambda: text_of(chat.create(**common, stream=True, stream_options={"include_usage": True})),
        "tools": lambda: plain(chat.create(**common | ANY, tools=[TOOL], tool_choice=NAMED)),
        "structured": lambda: plain(chat.parse(**common | ANY, response_format=Choice).choices[0].message.parsed),
        "completion": lambda: plain(
            client.completions.create(model=model, prompt="import os", max_tokens=8, temperature=0)
        ),
        "embeddings": lambda: plain(client.embeddings.create(model=embedding, input=["import os", "class A"])),
        "responses": lambda: plain(client.responses.create(**respond)),
        "responses streamed": responses_stream,
        "responses tools": lambda: plain(
            client.responses.create(
                **random, tools=[FLAT_TOOL], tool_choice={"type": "function", "name": "weather"}
            ).output
        ),
        "responses structured": lambda: plain(client.responses.parse(**random, text_format=Choice).output_parsed),
        "unknown model": lambda: chat.create(**common | {"model": "no/such"}),
        "wrong type": lambda: chat.create(**common | {"top_logprobs": "many"}),
    }


def by_anthropic(base: str, model: str) -> dict[str, Callable[[], Any]]:
    client: Any = anthropic.Anthropic(base_url=base, api_key="client", **NO_RETRY)
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
        "messages": [USER],
        "system": "Be brief.",
    }

    def streamed() -> Any:
        with client.messages.stream(**common) as stream:
            return plain(stream.get_final_message())

    return {
        "messages": lambda: plain(client.messages.create(**common)),
        "messages streamed": streamed,
        "messages tools": lambda: plain(
            client.messages.create(**common | {"max_tokens": 60}, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"})
        ),
        "count_tokens": lambda: client.messages.count_tokens(model=model, messages=[USER]).input_tokens,
    }


def by_langchain(base: str, model: str, embedding: str) -> dict[str, Callable[[], Any]]:
    options: dict[str, Any] = {"base_url": f"{base}/v1", "api_key": "client", "max_retries": 0}
    chat = ChatOpenAI(model=model, temperature=0, max_tokens=24, **options)
    varied = ChatOpenAI(model=model, **ANY, **options)
    vectors = OpenAIEmbeddings(model=embedding, check_embedding_ctx_length=False, **options)
    tools = varied.bind_tools([TOOL], tool_choice="weather")
    return {
        "langchain": lambda: chat.invoke("Return self.").content,
        "langchain streamed": lambda: "".join(str(piece.content) for piece in chat.stream("Return self.")),
        "langchain tools": lambda: plain(tools.invoke("Return self.").tool_calls),
        "langchain structured": lambda: plain(
            varied.with_structured_output(Choice, method="json_schema").invoke("A number")
        ),
        "langchain embeddings": lambda: vectors.embed_query("import os"),
    }


def main() -> None:
    base, model, embedding = sys.argv[1:]
    asks = by_openai(base, model, embedding) | by_anthropic(base, model) | by_langchain(base, model, embedding)
    found = {}
    for name, ask in asks.items():
        try:
            found[name] = ask()
        except Exception as error:  # noqa: BLE001  the error is the result
            found[name] = [type(error).__name__, getattr(error, "status_code", None)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
