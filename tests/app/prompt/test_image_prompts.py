"""Prompts with images, joined from texts and images that earlier prompts had, equal those made anew by hand."""

from __future__ import annotations

import json
import random
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.prompt.test_images import RGB, part, rules
from tests.support.engines.simulated import identity as simulated_identity
from tests.support.engines.simulated import simulated
from tests.support.replicas.replica import replica
from tests.support.requests import deepseek_tokenizer
from tests.support.requests.image_rules import fact

from warmfleet.prompt.block_hashes import Hasher, hash_of
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.images import ImageRules, Images, Item
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity
from warmfleet.prompt.request import parse
from warmfleet.protocol.wire import Scheme, chain_hashes, default_none_hash, pack_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import ThreadPoolExecutor

    from warmfleet.prompt.tokenizer import Encoder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<img>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)
FORMS = ("tagged", "plain", "lookahead_1", "lookahead_3")


@pytest.fixture
def seeing() -> tuple[Encoder, int]:
    """A tokenizer with a token for images, and the token's id."""
    return deepseek_tokenizer.loaded_with_image_token()


def identity(encoder: Encoder, executor: ThreadPoolExecutor) -> Identity:
    facts = {"multimodal": True, "placeholders": {"image": "<img>"}}
    return Identity(encoder, ChatTemplate(TEMPLATE), facts, executor, Trie(10**6), encoder.cuts(TEMPLATE))


def hashers() -> tuple[Hasher, ...]:
    none_hash = default_none_hash("sha256_cbor")
    made = [Scheme("sha256_cbor", none_hash, 16, form) for form in FORMS]
    return tuple(map(Hasher, [*made, Scheme("sha256", none_hash, 48, "tagged", 16)]))


def words(rng: random.Random) -> str:
    return " ".join(
        rng.choices(["fox", "中文", "def f():\n", "3.14", "it's", "abc abc abc", "<x>"], k=rng.randrange(600))
    )


def by_hand(
    encoder: Encoder, messages: Sequence[dict[str, Any]], given: ImageRules
) -> tuple[list[int], list[tuple[int, int, str]]]:
    """The engine's ids of a chat, and the places of its images."""
    text, items = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        for piece in message["content"]:
            text += piece.get("text", "<img>")
            items += [given.item(piece)] if "image_url" in piece else []
        text += "<|im_end|>"
    ids: list[int] = []
    media: list[tuple[int, int, str]] = []
    for token in encoder.plain(text):
        if token == given.token_id:
            item = items[len(media)]
            media.append((len(ids), item.tokens, item.identifier))
            ids += [token] * item.tokens
        else:
            ids.append(token)
    return ids, media


async def test_prompts_joined_from_known_ones_equal_those_made_anew(
    seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    encoder, token_id = seeing
    rng, made, schemes = random.Random(3), identity(encoder, executor), hashers()
    given = rules(token_id=token_id, parameters={"tokens": 37})
    known: list[list[dict[str, Any]]] = []
    shared = 0
    for number in range(120):
        messages = list(rng.choice(known)) if known and rng.random() < 0.8 else []
        messages = messages[: rng.randrange(len(messages) + 1)]
        for _ in range(rng.randrange(1, 3)):
            kinds = rng.choices(["text", "image"], [2, 1], k=rng.randrange(1, 4))
            content = [
                {"type": "text", "text": words(rng)} if kind == "text" else part(RGB, uuid=f"p{rng.randrange(4)}")
                for kind in kinds
            ]
            messages.append({"role": "user", "content": content})
        messages.append({"role": "user", "content": [part(RGB), {"type": "text", "text": "And?"}]})
        known = [*known[-8:], messages]
        salt, lora = rng.choice([None, "s"]), rng.choice([None, ("ad", "/ad")])
        request = parse("chat", json.dumps({"messages": messages, "cache_salt": salt}).encode())
        prompt = await made.with_images(request, given, schemes, lora)
        ids, media = by_hand(encoder, messages, given)
        assert prompt.ids == ids, number
        for hasher, chain in zip(schemes, prompt.chains, strict=True):
            scheme = hasher.scheme
            expected = chain_hashes(scheme, ids, None, salt, lora, hash_of(scheme.algorithm), media)
            whole = (len(ids) - 1) // scheme.block_tokens
            assert chain.hashes == pack_hashes(expected[:whole]), (number, scheme)
        shared += prompt.known_tokens > 0
    assert shared > 40


@pytest.mark.parametrize(
    ("text", "reason"),
    [("<img>", "image_place"), ("\ue0a1" + "0" * 32 + "\ue0a1", "parts"), ("\ue0a1", "parts")],
)
async def test_a_text_that_reads_like_an_image_makes_the_prompt_unknown(
    text: str, reason: str, seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    encoder, token_id = seeing
    content = [{"type": "text", "text": text}, part(RGB)]
    request = parse("chat", json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    with pytest.raises(NotReproducible) as raised:
        await identity(encoder, executor).with_images(request, rules(token_id=token_id), (), None)
    assert raised.value.reason == reason


async def test_a_mark_in_a_text_alone_is_no_image(seeing: tuple[Encoder, int], executor: ThreadPoolExecutor) -> None:
    encoder, token_id = seeing
    made, given = identity(encoder, executor), rules(token_id=token_id)
    mark = given.item(part(RGB)).mark
    begin = {"role": "user", "content": [{"type": "text", "text": "word " * 500}]}
    seen = parse("chat", json.dumps({"messages": [begin, {"role": "user", "content": [part(RGB)]}]}).encode())
    told = parse("chat", json.dumps({"messages": [begin, {"role": "user", "content": mark}]}).encode())
    assert token_id in (await made.with_images(seen, given, (), None)).ids
    (prompt,) = await made.prompts(told, (), None, 10**6)
    assert token_id not in prompt.ids
    assert prompt.ids == encoder.plain(made.render(told)).tolist()


async def test_an_image_in_another_place_than_a_users_message_is_unknown(
    seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    encoder, token_id = seeing
    for message in ({"role": "system", "content": [part(RGB)]}, {"role": "user", "content": [part(RGB), {"a": 1}]}):
        request = parse("chat", json.dumps({"messages": [message]}).encode())
        with pytest.raises(NotReproducible, match="parts"):
            await identity(encoder, executor).with_images(request, rules(token_id=token_id), (), None)


@pytest.mark.parametrize(("count", "tokens"), [(2, 2**19 + 1), (513, 1)])
async def test_many_images_or_tokens_of_images_cost_nothing(
    count: int, tokens: int, seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    encoder, token_id = seeing
    request = parse("chat", json.dumps({"messages": [{"role": "user", "content": [part(RGB)] * count}]}).encode())
    given = rules(token_id=token_id, parameters={"tokens": tokens})
    with pytest.raises(NotReproducible, match="image_size"):
        await identity(encoder, executor).with_images(request, given, (), None)


def test_places_of_images_in_parts() -> None:
    items = [Item("a", 2), Item("b", 1), Item("c", 2)]
    images = Images(rules(), items, lambda _: array("I"))
    parts = [array("I", [1, 7, 7, 7]), array("I"), array("I", [2, 7, 7, 3])]
    assert images.places(parts) == [(1, 2, "a"), (3, 1, "b"), (5, 2, "c")]


async def test_a_prompt_with_other_tokens_of_images_is_unknown(
    seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    """Here the server says that a token of the template stands for images."""
    encoder, _ = seeing
    (token_id,) = encoder.plain("<|im_start|>")
    messages = [{"role": "system", "content": "word " * 2_000}, {"role": "user", "content": [part(RGB)]}]
    request = parse("chat", json.dumps({"messages": messages}).encode())
    with pytest.raises(NotReproducible, match="image_place"):
        await identity(encoder, executor).with_images(request, rules(token_id=token_id), (), None)


async def test_a_request_with_an_image_is_known_where_the_engines_announce_their_rules(
    valkey_url: str, model: str
) -> None:
    token_id = simulated_identity().tokenizer.token_to_id("\u0100")  # byte-level BPE writes a zero byte so
    facts = {"multimodal": True, "placeholders": {"image": "\0"}}
    rule = fact("m", token="\0", token_id=token_id, parameters={"tokens": 640})
    async with simulated(valkey_url, model, facts=facts | {"images": rule}), replica(valkey_url, model) as router:
        await router.proven()
        looks = [{"type": "text", "text": "What is this? " * 30}, part(RGB), {"type": "text", "text": "And why? " * 30}]
        head = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 20}
        body = {"model": model, "messages": [head, {"role": "user", "content": looks}], "max_tokens": 1}
        _, _, answer = await router.post(body, "/explain")
        explained = json.loads(answer)
        assert (explained["identity"], explained["reason"]) == ("exact", "")
        whole = explained["prompt_tokens"]
        assert whole > 640
        looks[1] = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}
        _, _, answer = await router.post(body, "/explain")
        explained = json.loads(answer)
        assert (explained["identity"], explained["reason"]) == ("prefix", "image_url")
        assert explained["prompt_tokens"] < whole - 600
        await router.post(body, "/v1/chat/completions")
        assert await router.metric('warmfleet_prefix_only_requests_total{reason="image_url"}') == 1
