"""Images that engines report: known from then on, checked, bounded; a prompt is known up to its first unknown image."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.prompt.test_image_prompts import hashers, identity, seeing, words
from tests.app.prompt.test_images import RGB, RGBA, part, rules
from tests.support.requests.image_rules import MADE

from warmfleet.prompt.block_hashes import hash_of
from warmfleet.prompt.learned_images import KEPT_S, MAX_LEARNED, LearnedImages
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prompt_identity import KnownInPart
from warmfleet.prompt.request import parse
from warmfleet.protocol.image_tokens import MAX_TOKENS
from warmfleet.protocol.wire import chain_hashes, pack_hashes
from warmfleet.routing.tenants import Tenancy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import ThreadPoolExecutor

    from warmfleet.prompt.images import ImageRules
    from warmfleet.prompt.request import Request
    from warmfleet.prompt.tokenizer import Encoder

__all__ = ["seeing"]  # a fixture

URL = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}


def learned(**images: Sequence[int]) -> LearnedImages:
    made = LearnedImages()
    for name, runs in images.items():
        assert made.take(json.dumps([name, list(runs)]).encode(), time.time()) == "read"
    return made


def learning(token_id: int) -> ImageRules:
    return rules(token_id=token_id, family="learned", parameters={})


def chat(messages: list[dict[str, Any]], **more: Any) -> Request:
    return parse("chat", json.dumps({"messages": messages} | more).encode())


@pytest.mark.parametrize(
    "wrong",
    [
        *(b"", b"[", b"3", b'["a"]', b'["a",[7,1],2]', b"[" * 100_000, b'["a",["7",1]]', b'["a",[7,1.5]]'),
        *(b'["",[7,1]]', b"[5,[7,1]]", b'["a",[]]', b'["a",[7]]', b'["a",[7,0]]', b'["a",[-1,1]]', b'["a",[true,1]]'),
        json.dumps(["a", [2**32, 1]]).encode(),
        json.dumps(["a", [7, MAX_TOKENS, 8, 1]]).encode(),
        json.dumps(["a" * 257, [7, 1]]).encode(),
        json.dumps(["a", [7, 1] * 1_000]).encode(),
    ],
)
def test_a_malformed_report_is_left_out(wrong: bytes) -> None:
    images = LearnedImages()
    assert images.take(wrong, time.time()) == "malformed"
    assert not len(images)


def test_the_images_that_were_told_or_used_last_are_kept() -> None:
    images = LearnedImages(limit=2)
    for name, count in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
        assert images.take(json.dumps([name, [7, count]]).encode(), time.time()) == "read"
    assert [images.find(name) for name in ("b", "c", "a")] == [None, (7, 1), (7, 2)]
    assert images.take(b'["d",[7,1]]', time.time()) == "read"
    assert [images.find(name) for name in ("c", "a", "d")] == [None, (7, 2), (7, 1)]


def test_an_image_in_every_request_stays_known_among_many_new_ones() -> None:
    images = learned(logo=[7, 1])
    for number in range(2 * MAX_LEARNED):
        assert images.find("logo") == (7, 1)
        images.take(json.dumps([str(number), [7, 1]]).encode(), time.time())
    assert len(images) == MAX_LEARNED


def test_an_image_is_forgotten_a_day_after_it_was_told() -> None:
    now = [1e9]
    images = LearnedImages(clock=lambda: now[0])
    for name in ("a", "b", "c"):
        images.take(json.dumps([name, [7, 1]]).encode(), now[0] - 60)
    now[0] += KEPT_S - 61
    assert images.find("c") == (7, 1)
    now[0] += 2
    assert images.find("c") is None
    assert len(images) == 2
    images.take(b'["d",[7,1]]', now[0])
    assert len(images) == 2
    assert images.find("d") == (7, 1)


def test_reports_of_engines_with_other_settings_are_not_taken() -> None:
    images = LearnedImages(MADE)
    assert images.take(b"0" * 16 + b'["a",[7,2]]', time.time()) == "other"
    assert images.find("a") is None
    assert images.take(MADE.encode() + b'["a",[7,1]]', time.time()) == "read"
    assert images.find("a") == (7, 1)


def test_learned_images_take_little_memory() -> None:
    """As many runs as a report can have."""
    report = json.dumps(["a" * 64, [31, 8] * 700], separators=(",", ":")).encode()
    images = LearnedImages()
    tracemalloc.start()
    try:
        for number in range(100):
            images.take(report.replace(b"aaa", b"%03d" % number, 1), time.time())
        assert tracemalloc.get_traced_memory()[0] < 100 * 8_000
    finally:
        tracemalloc.stop()
    assert len(images) == 100


def test_an_image_of_a_learned_model_is_known_by_its_report() -> None:
    given = learning(7)
    identifier = rules().item(part(RGB)).identifier
    with pytest.raises(NotReproducible, match="image_new"):
        given.item(part(RGB))
    assert given.item(part(RGB), None, learned(**{identifier: [9, 1, 7, 3, 8, 2]}).find).tokens == 6
    with pytest.raises(NotReproducible, match="image_place"):
        given.item(part(RGB), None, learned(**{identifier: [9, 1]}).find)


@pytest.mark.parametrize("given", [rules(), learning(7)])
@pytest.mark.parametrize("sent", [URL, {"type": "image_url", "image_url": None}])
def test_an_image_that_is_not_sent_is_known_by_the_clients_id(given: ImageRules, sent: dict[str, Any]) -> None:
    images = learned(mine=[7, 3], theirs=[7, 5]).find
    assert given.item(sent | {"uuid": "mine"}, None, images).tokens == 3
    assert given.item(sent | {"uuid": "mine"}, lambda _: "theirs", images) == ("theirs", 5, (7, 5))
    reason = "image_url" if sent is URL else "image_id"
    for unknown in ({"uuid": "other"}, {}):
        with pytest.raises(NotReproducible, match=reason if unknown or sent is URL else "image_format"):
            given.item(sent | unknown, None, images)


def test_no_tenant_names_the_image_of_another_by_its_id() -> None:
    """The engine knows, and reports, only ids that were made for a tenant (``media_ids.renamed``)."""
    tenancy, sent = Tenancy("secret", "authorization"), {"type": "image_url", "image_url": None, "uuid": "img-1"}
    ours, theirs = tenancy.media_names(b"a"), tenancy.media_names(b"b")
    assert ours is not None
    images = learned(**{ours("img-1"): [7, 3]}).find
    assert rules().item(sent, ours, images).tokens == 3
    for rename in (theirs, None):
        with pytest.raises(NotReproducible, match="image_id"):
            rules().item(sent, rename, images)


async def test_prompts_with_learned_images_equal_those_made_by_hand(
    seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    """With separators and texts among the tokens of images, and prompts that go on from earlier ones."""
    encoder, token_id = seeing
    rng, made, schemes, given = random.Random(5), identity(encoder, executor), hashers(), learning(token_id)
    runs = {f"p{number}": [5, 1 + number, token_id, 20 + number, 3, 1, token_id, 9, 3, 2] for number in range(6)}
    images = learned(**runs).find
    messages: list[dict[str, Any]] = []
    for _ in range(25):
        content: list[dict[str, Any]] = []
        for name in rng.sample(list(runs), rng.randrange(1, 4)):
            content += [{"type": "text", "text": words(rng)[: rng.randrange(400)]}, part(RGB, uuid=name)]
        messages = [*messages[-6:], {"role": "user", "content": [*content, {"type": "text", "text": words(rng)}]}]
        prompt = await made.with_images(chat(messages), given, schemes, None, images)
        text, order = "", list[str]()
        for message in messages:
            pieces = message["content"]
            text += "<|im_start|>user\n" + "".join([piece.get("text", "<img>") for piece in pieces]) + "<|im_end|>"
            order += [piece["uuid"] for piece in pieces if "uuid" in piece]
        ids, media = list[int](), list[tuple[int, int, str]]()
        for token in encoder.plain(text):
            own, begin = runs[order[len(media)]] if token == token_id else [token, 1], len(ids)
            ids += [each for at in range(0, len(own), 2) for each in [own[at]] * own[at + 1]]
            if token == token_id:
                media.append((begin, len(ids) - begin, order[len(media)]))
        assert prompt.ids == ids
        assert prompt.image_tokens == sum(length for _, length, _ in media)
        for hasher, chain in zip(schemes, prompt.chains, strict=True):
            scheme = hasher.scheme
            expected = chain_hashes(scheme, ids, None, None, None, hash_of(scheme.algorithm), media)
            assert chain.hashes == pack_hashes(expected[: (len(ids) - 1) // scheme.block_tokens])


async def test_a_prompt_is_known_up_to_its_first_unknown_image(
    seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    """Known images before it count; the blocks end exactly where the unknown one begins."""
    encoder, token_id = seeing
    made, schemes, given = identity(encoder, executor), hashers(), rules(token_id=token_id, parameters={"tokens": 37})
    known = part(RGB)
    for length in range(90, 130, 3):
        text = "word " * length
        content = [{"type": "text", "text": "First "}, known, {"type": "text", "text": text}, URL]
        content += [{"type": "text", "text": "Why? "}, part(RGBA)]
        request = chat([{"role": "user", "content": content}], cache_salt="s")
        with pytest.raises(KnownInPart) as raised:
            await made.with_images(request, given, schemes, None)
        assert raised.value.reason == "image_url"
        head = encoder.plain(f"<|im_start|>user\nFirst <img>{text}<img>").tolist()[:-1]
        at = head.index(token_id)
        ids, media = [*head[:at], *[token_id] * 37, *head[at + 1 :]], [(at, 37, given.item(known).identifier)]
        assert raised.value.prompt.ids == [*ids, token_id]
        assert len(ids) + 37 + 5 < raised.value.tokens < len(ids) + 37 + 20
        for hasher, chain in zip(schemes, raised.value.prompt.chains, strict=True):
            scheme = hasher.scheme
            expected = pack_hashes(chain_hashes(scheme, ids, None, "s", None, hash_of(scheme.algorithm), media))
            # With look-ahead, a last block may cover the unknown image's first token: no engine has such a block.
            assert chain.hashes[: len(expected)] == expected[: len(chain.hashes)]
            assert len(expected) <= len(chain.hashes) <= len(expected) + 8 * bool(scheme.lookahead)


async def test_an_unknown_image_beside_a_text_with_its_token_has_no_known_place(
    seeing: tuple[Encoder, int], executor: ThreadPoolExecutor
) -> None:
    encoder, token_id = seeing
    request = chat([{"role": "user", "content": [{"type": "text", "text": "<img>"}, URL]}])
    with pytest.raises(NotReproducible, match="image_place"):
        await identity(encoder, executor).with_images(request, rules(token_id=token_id), (), None)
