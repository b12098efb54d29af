"""The settings, the operator's switch and a client's headers select the policy that places a request."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.__main__ import main
from warmfleet.errors import BadArgument
from warmfleet.main import create_app
from warmfleet.pools.policy import Ring, prefix_key
from warmfleet.prompt import request as prompt
from warmfleet.settings import PerModel, Settings, policies

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.replicas.replica import Replica

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def test_a_setting_names_one_policy_and_others_for_models() -> None:
    assert policies("") == PerModel("cost")
    assert policies("sticky, a=random,b#p=chwbl") == PerModel("sticky", {"a": "random", "b#p": "chwbl"})
    for wrong in ("best", "a=best", "cost,a="):
        with pytest.raises(BadArgument, match="known are cost, sticky"):
            policies(wrong)
    with pytest.raises(BadArgument, match=r"WARMFLEET_POLICY names 'b'"):
        create_app(Settings(models=("a",), policy="cost,b=sticky"))


def test_a_ring_moves_only_the_keys_of_a_worker_that_goes() -> None:
    names = [f"w{number}.0" for number in range(8)]
    ring, keys = Ring(), [b"session %d" % number for number in range(2_000)]
    before = {key: ring.order(key, names, 8) for key in keys}
    shares = Counter(order[0] for order in before.values())
    assert max(shares.values()) < 1.35 * 2_000 / 8
    assert all(sorted(order) == names for order in before.values())
    assert ring.order(b"x", [], 8) == ()
    for key in keys:
        order = ring.order(key, names[:-1], 7)
        assert order == tuple(name for name in before[key] if name != names[-1])


def test_the_key_of_chwbl_is_the_adapter_and_the_first_hundred_characters() -> None:
    def key(endpoint: prompt.Endpoint, **body: Any) -> bytes:
        return prefix_key(prompt.from_dict(endpoint, {"model": "m", **body}), {"lora": None})

    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "é" * 150}
    assert key("chat", messages=[system, user]) == "é".encode() * 100
    parts = [{"type": "text", "text": "a" * 60}, {"type": "text", "text": "b" * 60}]
    assert key("chat", messages=[{"role": "user", "content": parts}]) == b"a" * 60 + b"b" * 40
    assert key("completions", prompt=["x" * 101, "y"], model="lora") == b"lora" + b"x" * 100
    assert key("completions", prompt=list(range(200))) == " ".join(map(str, range(200))).encode()[:100]


async def homes(router: Replica, model: str, sessions: int, **headers: str) -> list[str]:
    """The workers that get the sessions' new prompts."""
    found = []
    for session in range(sessions):
        body = {"model": model, "prompt": f"{session} {PROMPT}", "max_tokens": 1}
        told = {name: value.format(session) for name, value in headers.items()}
        status, answer, _ = await router.post(body, **told)
        assert status == 200
        found.append(answer["x-warmfleet-worker"])
    return found


async def test_a_session_has_one_home_and_an_operators_switch_is_followed(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(engine(model))).url for _ in range(3)]
        one = await stack.enter_async_context(replica(valkey_url, model, *urls, policy=f"random,{model}=session"))
        two = await stack.enter_async_context(replica(valkey_url, model, *urls, policy="session"))
        first = await homes(one, model, 6, **{"X-Session-ID": "a{}"})
        assert first == await homes(two, model, 6, **{"X-Warmfleet-Session": "a{}", "X-Session-ID": "other"})
        assert len(set(first)) > 1
        asked = {"model": model, "prompt": "new", "prompt_cache_key": "a0"}
        assert (await one.post(asked))[1]["x-warmfleet-worker"] == first[0]

        for words, wanted in ((["round_robin"], ("round_robin", "operator")), (["default"], ("session", "setting"))):
            command = ["policy", *words, "--model", model, "--redis", valkey_url]
            assert await asyncio.to_thread(main, command) == 0
            for router in (one, two):
                await follows(router, *wanted)
            if wanted[0] == "round_robin":
                turns = await homes(one, model, 3, **{"X-Session-ID": "a0"})
                assert len(set(turns)) == 3
                assert await one.metric('warmfleet_decisions_total{policy="round_robin",why="turn"}') == 3
        printed = capsys.readouterr()
        assert "round_robin" in printed.out
        assert "warning" not in printed.err
        for told, wanted in (("sticky", ("sticky", "operator")), ("of a later version", ("session", "setting"))):
            await one.fleet.operator.switch(told)
            await follows(one, *wanted)


async def shown(router: Replica) -> tuple[str, str]:
    (found,) = json.loads((await router.get("/workers"))[1])["models"]
    return found["policy"], found["policy_by"]


async def follows(router: Replica, policy: str, by: str) -> None:
    async def done() -> bool:
        return await shown(router) == (policy, by)

    await poll(done, what="the switch is followed")


async def test_a_prefix_hint_that_is_no_number_is_refused(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
        for wrong in ("x", "-1", "1.5", "9" * 12, "\u0661"):
            status, _, answer = await router.post(body, **{"X-Warmfleet-Prefix-Len": wrong})
            error = json.loads(answer)["error"]
            assert (status, error["param"], error["type"]) == (400, "X-Warmfleet-Prefix-Len", "invalid_request_error")
        assert not upstream.seen
        status, _, _ = await router.post(body, **{"X-Warmfleet-Prefix-Len": "64"})
        assert status == 200


def test_a_model_without_workers_is_warned_about(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "sticky", "--model", model, "--redis", valkey_url]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{model}: sticky\n"
    assert printed.err.startswith(f"warmfleet policy: warning: no worker of {model} is known")


@pytest.mark.parametrize("words", [["best"], ["cost"]])
def test_an_impossible_switch_is_explained(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # the switch would change the policy of a stack in use
    assert main(["policy", *words]) == 2
    said = capsys.readouterr().err
    assert ("no policy" in said) if words == ["best"] else ("--model" in said)
