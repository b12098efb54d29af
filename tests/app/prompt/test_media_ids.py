"""Every id by which a body names media is replaced, and no other byte of it."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import Any

import pytest
from tests.app.prompt.test_json_splice import pairs, written

from warmfleet.errors import BadRequest, TooLarge
from warmfleet.prompt.media_ids import HOLDERS, MAX_IDS, places, renamed


def rename(name: str) -> str:
    return f"<{name.encode().hex()}>"


#: Bodies whose ids begin with @; what begins with = is no id.
BODIES: dict[str, bytes] = {
    "a part of a chat": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "uuid": "@a"}]}]}',
    "a part beside its data": b'{"messages": [{"content": [{"image_url": {"url": "=u", "uuid": "="}, "uuid": "@a"}]}]}',
    "every part of every message": b'{"messages": [{"content": ["=", {"uuid": "@a"}, {"uuid": "@b"}]},'
    b' {"content": "="}, {"role": "tool", "content": [{"uuid": "@a"}]}]}',
    "a key with escapes": rb'{"messages": [{"content": [{"u\u0075\u0069d": "@a"}]}]}',
    "a key that is all escapes": rb'{"messages": [{"content": [{"\u0075\u0075\u0069\u0064" : "@a"}]}]}',
    "a value with escapes": rb'{"messages": [{"content": [{"uuid": "@\u0061\"\\\n\ud83d\ude00"}]}]}',
    "white space": b'{"messages": [{"content": [{"uuid"\n\t :\r\n  "@a"  }]}]}',
    "a key twice": b'{"messages": [{"content": [{"uuid": "=", "uuid": "@a"}]}]}',
    "a message twice": b'{"messages": [{"content": [{"uuid": "="}]}], "messages": [{"content": [{"uuid": "@a"}]}]}',
    "an empty id": b'{"messages": [{"content": [{"uuid": "@"}]}]}',
    "null is no id": b'{"messages": [{"content": [{"uuid": null}, {"uuid":null}]}]}',
    "the result of a tool": b'{"messages": [{"content": [{"type": "tool_result", "content": [{"uuid": "@a"}]}]}]}',
    "arguments of a tool": b'{"messages": [{"content": [{"type": "tool_use", "input": {"uuid": "=", "content":'
    b' [{"uuid": "="}]}}], "tool_calls": [{"function": {"arguments": {"uuid": "="}}}]}]}',
    "a tool": b'{"tools": [{"parameters": {"uuid": {"type": "="}, "x": {"uuid": "=", "mm_hashes": {"image": ["="]}}}}],'
    b' "messages": [{"content": [{"uuid": "@a"}]}]}',
    "a message": b'{"messages": [{"uuid": "=", "content": [{"uuid": "@a"}]}]}',
    "documents of a template": b'{"documents": [{"uuid": "=", "text": "="}], "messages": [{"content": "="}]}',
    "a text like one": rb'{"messages": [{"content": [{"text": "\"uuid\":\"=\"", "\"uuid": "=", "uuid": "@a"}]}]}',
    "a batch of chats": b'{"messages": [[{"content": [{"uuid": "@a"}]}], [{"content": [{"uuid": "@b"}]}]]}',
    "an item of a response": b'{"input": [{"content": [{"type": "input_image", "uuid": "@a"}]}]}',
    "the output of a function": b'{"input": [{"type": "function_call_output", "output": [{"uuid": "@a"}]}]}',
    "parts beside token ids": b'{"token_ids": [1], "content_parts": [{"type": "image_url", "uuid": "@a"}]}',
    "hashes beside token ids": b'{"features": {"mm_hashes": {"image": ["@a" , "@b"], "=video" : [], "audio": ["@a"]}}}',
    "hashes behind escapes": rb'{"features": {"mm_\u0068as\u0068es": {"image": ["@\u0061\"\\"]}}}',
    "hashes elsewhere": b'{"mm_hashes": {"image": ["="]}, "features": {"x": {"mm_hashes": {"image": ["="]}}}}',
    "empty hashes": b'{"features": {"mm_hashes": {}}}',
    "a query": b'{"query": {"content": [{"uuid": "@a"}]}, "documents": ["=", {"content": [{"uuid": "@b"}]}]}',
    **{
        f"one of {name}": b'{"%b": [{"content": [{"uuid": "@a"}]}], "x": {"uuid": "="}}' % name.encode()
        for name in HOLDERS
    },
}


def replaced(value: Any) -> Any:
    """``value`` as ``pairs`` reads it, with other ids."""
    if isinstance(value, str):
        return rename(value) if value.startswith("@") else value
    return type(value)(replaced(member) for member in value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("case", BODIES)
def test_ids_are_replaced_and_nothing_else(case: str) -> None:
    body = BODIES[case]
    made = renamed(body, rename)
    assert pairs(made) == replaced(pairs(body))
    if b"@" not in body:
        assert made is body


@pytest.mark.parametrize(("raw", "name"), [("7", "7"), ("-1.50e3", "-1.50e3"), ("true", "true"), ('"7"', "7")])
def test_an_id_of_another_type_becomes_a_text(raw: str, name: str) -> None:
    body = f'{{"messages":[{{"content":[{{"uuid":{raw}}}]}}]}}'
    assert renamed(body.encode(), rename).decode() == body.replace(f":{raw}}}", f':"{rename(name)}"}}')


@pytest.mark.parametrize("raw", ["{}", '{"a":1}', '{"image":["a"]}', "[]", '["a"]', '{"uuid":"a"}'])
def test_an_id_that_is_no_text_is_refused(raw: str) -> None:
    with pytest.raises(BadRequest) as caught:
        renamed(f'{{"messages":[{{"content":[{{"uuid":{raw}}}]}}]}}'.encode(), rename)
    assert caught.value.param == "uuid"


@pytest.mark.parametrize("raw", ["[]", '{"image":"a"}', '{"image":["a",7]}', '{"image":[null]}', '{"image":[["a"]]}'])
def test_hashes_that_no_engine_takes_are_refused(raw: str) -> None:
    with pytest.raises(BadRequest) as caught:
        renamed(f'{{"features":{{"mm_hashes":{raw}}}}}'.encode(), rename)
    assert caught.value.param == "mm_hashes"


@pytest.mark.parametrize("body", [b'--x\r\n\r\n"uuid": "a"\r\n--x--', b"", b'{"prompt": "uuid"}', b'{"uuid": "a"}'])
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert renamed(body, rename) is body


def test_random_bodies_written_in_any_way() -> None:
    found = 0
    for seed in range(400):
        rng = random.Random(seed)
        body = written(Pairs(any_body(rng)), rng).encode()
        made = renamed(body, rename)
        assert pairs(made) == replaced(pairs(body)), body
        assert json.loads(made) == json.loads(json.dumps(mapped(json.loads(body))))
        found += len(places(body))
    assert found > 1_000


class Pairs(dict[str, Any]):
    """An object of pairs, so that a key may come twice."""

    def __init__(self, members: list[tuple[str, Any]]) -> None:
        super().__init__(members)
        self._members = members

    def items(self) -> Any:
        return self._members


def any_body(rng: random.Random) -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = [
        (rng.choice([*HOLDERS, "messages"]), [message(rng) for _ in range(rng.randint(0, 3))]),
        ("metadata", {"uuid": "=", "mm_hashes": {"image": ["="]}}),
        ("max_tokens", 1e5),
    ]
    if rng.random() < 0.3:
        hashes = Pairs([(kind, [word(rng) for _ in range(rng.randint(0, 3))]) for kind in ("image", "video")])
        fields.append(("features", {"mm_placeholders": {"uuid": "="}, "mm_hashes": hashes}))
    if rng.random() < 0.3:
        fields.append(("content_parts", [part(rng, 0) for _ in range(rng.randint(0, 2))]))
    rng.shuffle(fields)
    return fields


def message(rng: random.Random) -> Any:
    parts = [part(rng, 0) for _ in range(rng.randint(0, 4))]
    return Pairs([("role", "user"), ("uuid", "="), (rng.choice(["content", "content", "output"]), parts)])


def part(rng: random.Random, depth: int) -> Any:
    inner = Pairs([("url", '= "uuid": "x" \\'), ("uuid", "=")])
    members: list[tuple[str, Any]] = [("type", "image_url"), ("image_url", inner)]
    if rng.random() < 0.6:
        members += [("uuid", "=")] * rng.randint(0, 1) + [("uuid", word(rng))]
    if depth < 3 and rng.random() < 0.4:
        members.append(("content", [part(rng, depth + 1) for _ in range(rng.randint(0, 2))]))
    return Pairs(members) if rng.random() < 0.9 else '= "uuid": "x"'


def word(rng: random.Random) -> str:
    return "@" + "".join(rng.choices('ab"\\/é\n😀 :,{}[]', k=rng.randint(0, 6)))


def mapped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: mapped(member) for key, member in value.items()}
    return [mapped(member) for member in value] if isinstance(value, list) else replaced(value)


MANY = {
    "ids": b'{"messages":[{"content":[' + b",".join([b'{"uuid":"a"}'] * (MAX_IDS + 1)) + b"]}]}",
    "hashes": b'{"features":{"mm_hashes":{"image":[' + b",".join([b'"a"'] * (MAX_IDS + 1)) + b"]}}}",
    "keys that are no ids": b'{"x":[' + b",".join([b'{"uuid":{}}'] * 300_000) + b"]}",
    "lists": b'{"messages":[{"content":[{"uuid":' + b"[" * 500 + b"]" * 500 + b"}]}]}",
    "numbers": b'{"uuid":"a","input":[' + b",".join([b"1"] * 1_000_000) + b"]}",
    "objects in hashes": b'{"features":{"mm_hashes":' + b'{"mm_hashes":' * 300 + b"7" + b"}" * 301 + b"}",
    "strings in hashes": b'{"features":{"mm_hashes":{"image":[' + b'"\\"",' * 200_000 + b"7]}}}",
    "spaces": b'{"messages":[{"content":[{"uuid"' + b" " * 1_000_000 + b":" + b" " * 1_000_000 + b"[]}]}]}",
    "escapes": b'{"messages":[{"content":[' + b",".join([b'{"\\u0075\\u0075":"a"}'] * 100_000) + b"]}]}",
    "quotes in a text": b'{"messages":[{"content":"' + b'\\"uuid\\":' * 300_000 + b'"}],"uuid":"a"}',
    "a large picture": b'{"messages":[{"content":[{"uuid":"a","url":"' + b"A" * 10_000_000 + b'"}]}]}',
}


@pytest.mark.parametrize("case", MANY)
def test_the_work_is_bounded(case: str) -> None:
    begin = time.process_time()
    with suppress(BadRequest, TooLarge):
        renamed(MANY[case], rename)
    assert time.process_time() - begin < 0.5  # 0.1 s on an idle machine
