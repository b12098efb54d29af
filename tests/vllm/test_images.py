"""Real engines that see: of random chats with pictures, as much is cached as a router predicts, under eviction."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.requests.pictures import PICTURES, conversations
from tests.vllm.engine import SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas
from tests.vllm.seeing import JOINED_KIND, KINDS, LEARNED_KINDS, environment, vision_model
from tests.vllm.trees import VERSIONS

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=20, shows="1,800 chats with pictures on real vLLM, 50 on each version: predicted = cached"
    ),
    pytest.mark.timeout(2_400),
]

CHATS = 300
CHATS_OF_A_VERSION = 50
#: Transformers 5 writes LLaVA's weights under names that vLLM does not read; random ones do as well.
WEIGHTS: dict[str, tuple[str, ...]] = {"qwen2_vl": ()} | dict.fromkeys(
    ("llava", *LEARNED_KINDS, JOINED_KIND), ("--load-format", "dummy")
)
READ = re.compile(r'warmfleet_image_reports_total\{[^}]*result="read"[^}]*\} (\S+)')
#: Settings of a server, which are in the hash of each image. Chats may set others, for all of their own images.
SETTINGS: tuple[str, ...] = (
    "--media-io-kwargs",
    '{"image": {"rgba_background_color": [0, 9, 255]}}',
    "--trust-request-mm-kwargs",
)
SETTINGS += ("--mm-processor-kwargs", '{"min_pixels": 12544, "max_pixels": 31360}')
OWN = {"mm_processor_kwargs": {"max_pixels": 25_088}}
SEES = ("--limit-mm-per-prompt", '{"image":64,"video":0}', "--skip-mm-profiling")


@pytest.mark.parametrize("kind", [*KINDS, *LEARNED_KINDS, JOINED_KIND])
async def test_pictures_are_matched_to_the_token(kind: str) -> None:
    await asked(kind, CHATS, environment())


async def test_settings_of_the_server_are_matched_and_those_of_a_chat_promise_nothing_behind_its_first_picture() -> (
    None
):
    await asked("qwen2_vl", CHATS, environment(), SETTINGS, own=OWN)


@pytest.mark.parametrize(
    ("version", "kind"),
    [*[(version, "qwen2_vl") for version in VERSIONS], (VERSIONS[0], "idefics3"), (VERSIONS[-1], "pixtral")],
)
async def test_each_version_announces_how_it_hashes_pictures(version: str, kind: str) -> None:
    await asked(kind, CHATS_OF_A_VERSION, environment(version))


async def asked(
    kind: str,
    chats: int,
    environ: dict[str, str],
    settings: tuple[str, ...] = (),
    own: dict[str, Any] | None = None,
) -> None:
    """Ask an engine that sees one chat after the other; fail if more than one in a thousand was predicted wrongly.

    Of a prompt with a picture that is to be learned, the number of tokens is not known the first time. own: fields of
    each tenth chat, of which no more than the text before its first picture is known.
    """
    made = [ask for ask in conversations(50, 2 * chats) if ask.endpoint == "chat" and ask.lora is None][:chats]
    hits, wrong, tokens, unlearned, promised_less = 0, [], 0, 0, 0
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(
            redis_url=redis_url,
            model=vision_model(kind),
            arguments=(*SEES, *WEIGHTS[kind], *settings),
            environment=environ,
        )
        with running(options) as [engine], replicas(redis_url, 1, engines=1) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
            [view] = await fleet.workers.read()
            assert (view.proof, view.record.get("cause")) == ("proven", ""), view.record.get("reason")

            async def indexed() -> bool:
                [view] = await fleet.workers.read()
                held: Any = await fleet.redis.smembers(fleet.keys.slot(view.record["slot"]))
                return not view.load.in_flight and held == {key[-12:-4] for key in engine.table()}

            async def learned() -> bool:
                told = await fleet.redis.zcard(fleet.keys.images)
                read = READ.search((await client.get(url + "/metrics")).text) if told else None
                return not told or (read is not None and float(read[1]) >= told)

            async with httpx.AsyncClient(timeout=120) as client:
                for number, ask in enumerate(made):
                    await poll(indexed, 60, "index == the engine's table")
                    await poll(learned, 60, "the replica has read the reports of images")
                    alone = own is not None and number % 10 == 9
                    body = ask.body | {"model": SERVED_NAME, "max_tokens": 1, "temperature": 0}
                    body |= (own or {}) if alone else {}
                    answer = await client.post(url + "/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    usage, told = answer.json()["usage"], answer.headers
                    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                    predicted = int(told["x-warmfleet-matched-tokens"]), int(told["x-warmfleet-prompt-tokens"])
                    new = kind in LEARNED_KINDS and predicted[1] < usage["prompt_tokens"]
                    unlearned += new
                    promised_less += alone and predicted[0] < cached
                    if alone:
                        differs = predicted[0] > cached
                    else:
                        differs = predicted[0] != cached or (not new and predicted[1] != usage["prompt_tokens"])
                    if differs:
                        wrong.append((number, predicted, cached, usage["prompt_tokens"]))
                    hits += cached > 0
                    tokens += usage["prompt_tokens"]
            await fleet.close()
    print(f"{kind}: {len(made)} chats of {tokens} tokens, {unlearned} with a new picture, {hits} found a part cached")
    print(f"differences: {wrong}; {promised_less} chats with settings of their own found more than was promised")
    assert unlearned <= 2 * PICTURES  # with a client's id, and without
    assert len(wrong) <= chats // 1_000
    assert hits > chats // 8
