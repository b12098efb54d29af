"""An engine gets the bytes of the client's body; only the value of one key differs."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmfleet.prompt import json_splice
from warmfleet.prompt.json_splice import spliced, with_key

if TYPE_CHECKING:
    import random

NUMBERS = ["0", "-0", "1.50", "1e5", "-2E+3", "123456789012345678901234567890", "0.1"]
values = st.recursive(
    st.none() | st.booleans() | st.sampled_from([float(text) for text in NUMBERS]) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SPACE = st.text(alphabet=" \t\r\n", max_size=80)
NAMES = ["prompt", "messages", "kv_transfer_params", "Prompt", "model", ""]
members = st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=6), values), max_size=6)
any_body = given(
    body=members, own=values, rng=st.randoms(use_true_random=False), ids=st.lists(st.integers(0, 2**31), min_size=1)
)


def written(value: Any, rng: random.Random) -> str:
    """JSON as clients may write it: with any white space, escapes and formats of numbers."""
    space = rng.choice(["", "", " ", "\n\t", "\r\n  "])
    if isinstance(value, str):
        return f'{space}"{"".join(letter(plain, rng) for plain in value)}"{space}'
    if isinstance(value, float):
        return space + rng.choice(NUMBERS) + space
    if isinstance(value, list):
        return f"{space}[{','.join(written(member, rng) for member in value) or space}]{space}"
    if isinstance(value, dict):
        return space + written_object(list(value.items()), rng) + space
    return space + json.dumps(value) + space


def written_object(pairs: list[tuple[str, Any]], rng: random.Random) -> str:
    return "{" + (",".join(f"{written(key, rng)}:{written(value, rng)}" for key, value in pairs) or " ") + "}"


def letter(plain: str, rng: random.Random) -> str:
    escaped = json.dumps(plain)[1:-1]
    if rng.random() < 0.2 and ord(plain) < 0x10000:
        return f"\\u{ord(plain):04{rng.choice('xX')}}"
    return escaped if plain < " " or plain in '"\\' or rng.random() < 0.2 else plain


def place(text: str, key: str) -> tuple[int, int] | None:
    """Begin and end of the last value of ``key``, by the decoder of the standard library."""
    decoder, found = json.JSONDecoder(), None

    def skip(at: int) -> int:
        while text[at] in " \t\r\n":
            at += 1
        return at

    at = skip(text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = skip(skip(at) + 1)
        _, end = decoder.raw_decode(text, start)
        found = (start, end) if name == key else found
        at = skip(end)
        at = skip(at + 1) if text[at] == "," else at
    return found


def pairs(text: bytes) -> Any:
    """All members in their order, with duplicates, and numbers as they are written."""
    return json.loads(text, object_pairs_hook=tuple, parse_float=str, parse_int=str)


LONG = pytest.mark.long(
    minutes=7, shows="the body that an engine gets differs from the client's body in one key: 60,000 random bodies"
)
MANY = pytest.param(20_000, marks=LONG)


@pytest.mark.parametrize("bodies", [60, MANY])
@pytest.mark.parametrize("looks", [json_splice.MAX_LOOKS, 2, 0])
def test_the_body_differs_in_one_key_only(looks: int, bodies: int) -> None:
    @settings(max_examples=bodies)
    @any_body
    def differs(body: list[tuple[str, Any]], own: Any, rng: random.Random, ids: list[int]) -> None:
        differs_in_one_key(looks, body, own, rng, ids)

    differs()


def differs_in_one_key(looks: int, body: list[tuple[str, Any]], own: Any, rng: random.Random, ids: list[int]) -> None:
    body.insert(rng.randrange(len(body) + 1), ("prompt", own if isinstance(own, list) else 'a \\" \\\\'))
    text = rng.choice(["", " \n"]) + written_object(body, rng) + rng.choice(["", "\r\n "])
    raw, numbers = text.encode("utf-8", "surrogatepass"), [str(token) for token in ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_splice, "MAX_LOOKS", looks)
        value = json.loads(raw)["prompt"]
        completion = spliced("completions", raw, [[orjson.dumps(ids)]], len(value) if isinstance(value, str) else 0)
        chat = spliced("chat", raw, [[orjson.dumps(ids)]])
    where = place(text, "prompt")
    assert where is not None
    start, end = where
    ours = orjson.dumps(ids if text[start] == '"' else [ids])
    assert completion == (text[:start]).encode() + ours + text[end:].encode()
    before, after = pairs(raw), pairs(completion)
    last = max(index for index, (key, _) in enumerate(before) if key == "prompt")
    assert after[last] == ("prompt", numbers if text[start] == '"' else [numbers])
    assert (*after[:last], *after[last + 1 :]) == (*before[:last], *before[last + 1 :])
    assert chat is not None
    assert pairs(chat) == (*before, ("kv_transfer_params", (("prompt_token_ids", numbers),)))
    added = len(chat) - len(raw)
    at = raw.rindex(b"}")
    assert chat[:at] + chat[at + added :] == raw


@pytest.mark.parametrize("prompt_text", ['\\"' * 2_000, "\\\\" * 2_000, '"' * 300 + "\\" * 65 + '"', "\\" * 64 + "é"])
def test_texts_full_of_escapes(prompt_text: str) -> None:
    raw = json.dumps({"a": prompt_text, "prompt": prompt_text, "b": prompt_text}).encode()
    done = spliced("completions", raw, [[b"[1,", b"2]"]], len(prompt_text))
    assert done is not None
    assert json.loads(done) == {"a": prompt_text, "prompt": [1, 2], "b": prompt_text}


def test_of_two_prompts_the_last_is_replaced() -> None:
    short, long = b'"' + b'ab\\"' * 150 + b'"', b'"' + b"c" * 2_000 + b'"'
    for first, last in ((short, long), (long, short)):
        body = b'{"prompt":%b, "x":["a","b"],"prompt" : %b}'
        raw = body % (first, last)
        assert spliced("completions", raw, [[b"[1]"]], len(json.loads(raw)["prompt"])) == body % (first, b"[1]")


def test_a_body_that_would_take_long_is_left_alone() -> None:
    for odd in (b"[" * 5_000 + b"]" * 5_000, b"{" + b",".join([b'"x":1'] * 5_000) + b"}"):
        assert spliced("completions", b'{"x":' + odd + b',"prompt":"a"}', [[b"[1]"]]) is None
    many = b"{" + b",".join([b'"x":1'] * 5_000) + b',"prompt":"a"}'
    assert spliced("completions", many, [[b"[1]"]]) is None


def test_escapes_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    body, seconds = b'{"prompt":"' + b'\\"' * 1_500_000 + b'"}', []
    for looks in (json_splice.MAX_LOOKS, 10**9):
        monkeypatch.setattr(json_splice, "MAX_LOOKS", looks)
        began = time.process_time()
        assert spliced("completions", body, [[b"[1]"]]) == b'{"prompt":[1]}'
        seconds.append(time.process_time() - began)
    assert seconds[0] < seconds[1] / 5


@given(st.lists(st.tuples(st.sampled_from(["cache_salt", "a", "}", '"', "\u00e9"]), values), max_size=5), SPACE, SPACE)
def test_a_spliced_key_is_the_effective_one_and_nothing_else_changes(
    keys: list[tuple[str, Any]], before: str, after: str
) -> None:
    """The body may have the key already: every parser takes the last value."""
    inside = f",{before}".join(f"{json.dumps(key)}{after}:{json.dumps(value)}" for key, value in keys)
    body = f"{before}{{{after}{inside}{before}}}{after}".encode()
    longer = with_key(body, "cache_salt", b'"new"')
    assert json.loads(longer, object_pairs_hook=list)[:-1] == json.loads(body, object_pairs_hook=list)
    assert orjson.loads(longer) == json.loads(longer) == json.loads(body) | {"cache_salt": "new"}
