"""The usage at the end of an answer is found however it comes, in a bounded number of bytes."""

from __future__ import annotations

import asyncio
import json

import pytest

from warmfleet.engines.output_tokens import WatchedClient
from warmfleet.engines.reported_usage import TAIL_BYTES, AnswerTail, Usage


def body(usage: object, text: str = "ok", **more: object) -> bytes:
    """An answer as vLLM writes it: what follows the usage is short."""
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}}]
    fields = {"id": "chatcmpl-1", "choices": choices, "usage": usage, "prompt_token_ids": None} | more
    return json.dumps(fields, separators=(",", ":")).encode()


def usage(**details: object) -> dict[str, object]:
    counts = {"prompt_tokens": 900, "total_tokens": 950, "completion_tokens": 50}
    return {**counts, "prompt_tokens_details": details or None}


QUOTES = 'He said "cached_tokens": 7, and "prompt_tokens": 8.'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (body(usage(cached_tokens=880)), Usage(900, 880)),
        (body(usage(cached_tokens=0, created_cache_tokens=None)), Usage(900, 0)),
        (body(usage()), Usage(900, None)),
        (body(usage(cached_tokens=880), QUOTES), Usage(900, 880)),
        (body(None, QUOTES), None),
        (json.dumps({"usage": usage(cached_tokens=16)}, indent=1).encode(), Usage(900, 16)),
        (b'{"usage":{"input_tokens":20,"cache_read_input_tokens":880,"output_tokens":1}}', Usage(900, 880)),
        (b'{"usage":{"input_tokens":900,"input_tokens_details":{"cached_tokens":880}}}', Usage(900, 880)),
        (body(usage(cached_tokens=9_999)), Usage(900, 900)),
        (b'{"usage":{"prompt_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}}', None),
        (b"", None),
        (body(usage(cached_tokens=880), logprobs=[0.5] * TAIL_BYTES), None),
    ],
    ids=[
        *("cached", "none cached", "not told", "text that quotes it", "only text", "spaces", "messages", "responses"),
        *("more than the prompt", "an empty prompt", "nothing", "too far from the end"),
    ],
)
def test_what_the_end_of_an_answer_tells(answer: bytes, expected: Usage | None) -> None:
    assert AnswerTail(answer).usage() == expected


def test_a_stream_tells_it_wherever_its_bytes_are_cut() -> None:
    events = [{"choices": [{"delta": {"content": "word " * 300}}]}, {"choices": [], "usage": usage(cached_tokens=880)}]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    for size in (1, 7, 100, 10_000):
        tail = AnswerTail()
        for at in range(0, len(stream), size):
            tail.add(stream[at : at + size])
        assert tail.usage() == Usage(900, 880), size
        assert len(tail._tail) <= TAIL_BYTES


def test_the_client_gets_every_byte() -> None:
    class Client:
        def __init__(self) -> None:
            self.got: list[bytes] = []

        def pass_on(self, data: bytes) -> bool:
            self.got.append(data)
            return len(self.got) < 2

        async def body(self, data: bytes, *, more: bool) -> None:
            self.got.append(data)

    client, tail = Client(), AnswerTail()
    watched = WatchedClient(tail.add, client)
    assert watched.pass_on(b"one")
    assert not watched.pass_on(b"two"), "a slow client slows the engine as before"
    asyncio.run(watched.body(b'{"usage":{"prompt_tokens":3,"x":{"cached_tokens":2}}}', more=False))
    assert client.got[:2] == [b"one", b"two"]
    assert tail.usage() == Usage(3, 2)
