"""Answers that report other numbers of image tokens than predicted end the trust in a pool's rule for a while."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.app.prompt.test_images import RGB, part
from tests.support.engines.simulated import identity as simulated_identity
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.replicas.replica import replica
from tests.support.requests.image_rules import MADE, fact

from warmfleet.engines.reported_usage import AnswerTail, ResponsesTail
from warmfleet.pools import fleet_view
from warmfleet.pools.fleet_view import View
from warmfleet.pools.identified_prompt import IdentifiedPrompt, same_in
from warmfleet.pools.image_counts import DOUBT_S, WRONG_IN_A_ROW, ImageCounts
from warmfleet.prompt.images import ImageRules
from warmfleet.prompt.request import parse
from warmfleet_loadtest.simulator import answers
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from warmfleet.fleet import WorkerView


def test_only_wrong_numbers_in_a_row_raise_a_doubt_and_it_ends() -> None:
    now = [100.0]
    counts = ImageCounts(lambda: now[0])
    for _ in range(3):
        for _ in range(WRONG_IN_A_ROW - 1):
            assert counts.compare(4, 5) == "more"
        assert counts.compare(4, 4) == "as_predicted"
    assert not counts.doubted
    for _ in range(WRONG_IN_A_ROW):
        assert not counts.doubted
        assert counts.compare(4, 3) == "fewer"
    assert counts.doubted
    now[0] += DOUBT_S
    assert not counts.doubted


def test_a_client_who_gives_one_id_to_several_images_raises_no_doubt() -> None:
    counts = ImageCounts()
    for _ in range(2 * WRONG_IN_A_ROW):
        assert counts.compare(4, 5, named=True) == "more"
    assert not counts.doubted
    for _ in range(WRONG_IN_A_ROW):
        assert counts.compare(4, 5) == "more"
        assert counts.compare(4, 4, named=True) == "as_predicted"
    assert counts.doubted


def test_a_client_cannot_write_the_count_itself() -> None:
    """/v1/responses repeats a client's JSON schema before the usage."""
    details = b'"prompt_tokens_details":{"cached_tokens":1,"multimodal_tokens":{"image":64}}'
    written = b'{"text":{"multimodal_tokens":{"image":7}},"usage":{'
    assert AnswerTail(written + details + b"}}").image_tokens() == 64
    assert AnswerTail(written + b'"prompt_tokens_details":null}}').image_tokens() is None
    assert AnswerTail(written + b"}}").image_tokens() is None
    assert ResponsesTail(b'{"text":{' + details + b"}}").image_tokens() is None


def test_each_pool_looks_for_the_images_that_it_knows() -> None:
    """Another pool with the same rules may have learned others, or doubt its rule."""
    request, view = parse("chat", b'{"messages":[{"role":"user","content":"a"}]}'), View()
    known = IdentifiedPrompt((), 9, 9, "exact")
    assert same_in(known, request, view, View()) is known
    for prompt in (replace(known, image_tokens=4), replace(known, kind="prefix", reason="image_new")):
        assert same_in(prompt, request, view, View()) is None


async def test_an_engine_with_other_settings_raises_no_doubt(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers count other tokens; the rule is right for the engines that most of the pool's agree with."""
    token_id: Any = simulated_identity().tokenizer.token_to_id("\u0100")  # byte-level BPE writes a zero byte so
    rule = fact("m", token="\0", token_id=token_id)
    found, usage, tokens = fleet_view._images, answers.usage, {"image": 16}

    def of_another_group(workers: Sequence[WorkerView]) -> Any:
        rules, *_ = found(workers)
        return rules, False, {"most": (), "others": tuple(worker.worker_id for worker in workers)}

    def with_images(*args: Any) -> dict[str, Any]:
        return usage(*args) | {"prompt_tokens_details": {"multimodal_tokens": tokens, "cached_tokens": 0}}

    monkeypatch.setattr(fleet_view, "_images", of_another_group)
    monkeypatch.setattr(answers, "usage", with_images)
    announced = {"multimodal": True, "placeholders": {"image": "\0"}, "images": rule}
    async with simulated(valkey_url, model, facts=announced) as engine, replica(valkey_url, model) as router:
        engine.see(token_id, 16)
        await router.proven()
        tokens["image"] = 17
        body = {"model": model, "messages": [{"role": "user", "content": [part(RGB)]}], "max_tokens": 1}
        for _ in range(WRONG_IN_A_ROW):
            status, _, answer = await router.post(body, "/v1/chat/completions")
            assert status == 200, answer
        explained = json.loads((await router.post(body, "/explain"))[2])
        assert (explained["identity"], explained["reason"]) == ("exact", "")
        assert await router.metric('warmfleet_image_counts_total{result="other"}') == WRONG_IN_A_ROW


async def test_an_image_is_known_once_reported_and_its_rule_is_doubted_if_answers_count_otherwise(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_id: Any = simulated_identity().tokenizer.token_to_id("\u0100")  # byte-level BPE writes a zero byte so
    facts = {"multimodal": True, "placeholders": {"image": "\0"}}
    rule = fact("m", token="\0", token_id=token_id, family="learned", parameters={})
    usage, counted = answers.usage, [640]

    def with_images(*args: Any) -> dict[str, Any]:
        made = usage(*args)
        return made | {"prompt_tokens_details": {"multimodal_tokens": {"image": counted[0]}, "cached_tokens": 0}}

    monkeypatch.setattr(answers, "usage", with_images)
    announced = facts | {"images": rule}
    async with simulated(valkey_url, model, facts=announced) as engine, replica(valkey_url, model) as router:
        engine.see(token_id, counted[0])
        await router.proven()
        looks = [{"type": "text", "text": "What is this?"}, part(RGB)]
        head = {"role": "system", "content": "The quick brown fox jumps over the lazy dog. " * 20}
        body = {"model": model, "messages": [head, {"role": "user", "content": looks}], "max_tokens": 1}

        async def known() -> tuple[str, str]:
            explained = json.loads((await router.post(body, "/explain"))[2])
            return explained["identity"], explained["reason"]

        assert await known() == ("prefix", "image_new")
        rules = ImageRules.of(rule)
        assert rules is not None
        identifier = rules.item(part(RGB), None, lambda _: (token_id, 1)).identifier
        others, ours = (
            "0" * 16 + wire.dumps([identifier, [3, 1, token_id, 5]]),
            MADE + wire.dumps([identifier, [3, 1, token_id, 639]]),
        )
        now_us = time.time() * 1e6
        await router.fleet.redis.zadd(router.fleet.keys.images, {ours: now_us, others: now_us + 1})

        async def exact() -> bool:
            return await known() == ("exact", "")

        async def forgotten() -> bool:
            return await known() == ("prefix", "image_new")

        async def doubted() -> bool:
            return await known() == ("prefix", "image_wrong")

        await poll(exact, 10, "the image is known")
        for _ in range(WRONG_IN_A_ROW - 1):
            status, _, answer = await router.post(body, "/v1/chat/completions")
            assert status == 200, answer
        assert await router.metric('warmfleet_image_counts_total{result="as_predicted"}') == WRONG_IN_A_ROW - 1
        counted[0] = 641
        for number in range(WRONG_IN_A_ROW):
            if number:
                await poll(forgotten, 10, "a report that was wrong is forgotten")
                await router.fleet.redis.zadd(router.fleet.keys.images, {ours: now_us + 1 + number})
                await poll(exact, 10, "the image is known again, because it is told again")
            status, _, answer = await router.post(body, "/v1/chat/completions")
            assert status == 200, answer
        await poll(doubted, 10, "the rule is doubted")
        assert await router.metric('warmfleet_image_reports_total{result="wrong"}') == WRONG_IN_A_ROW
        assert await router.metric('warmfleet_image_counts_total{result="more"}') == WRONG_IN_A_ROW
