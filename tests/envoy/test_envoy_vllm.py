"""Envoy, a replica as its picker, and real vLLM with the plugin."""

from __future__ import annotations

import io
import json
import uuid
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.envoy.envoy import envoy
from tests.envoy.gateway_config import MODES
from tests.support.replicas.replica import replica
from tests.vllm.engine import SERVED_NAME, EngineOptions, running

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1_200),
    pytest.mark.long(minutes=2, shows="a gateway's requests to real vLLM: exact matches, token ids, booked load 0"),
]


async def test_the_next_turn_of_a_chat_is_matched(valkey_url: str, tmp_path: Path) -> None:
    """In each mode in which the picker reads the prompt; the body with token ids arrives whole."""
    tag, port = f"{SERVED_NAME}#{uuid.uuid4().hex[:8]}", free_port()
    modes = [mode for mode in MODES if mode.request not in ("NONE", "STREAMED")]
    with running(EngineOptions(valkey_url, model_tag=tag)) as [engine]:
        async with (
            replica(valkey_url, tag, epp_port=port, decide_timeout_s=5.0) as router,
            envoy(tmp_path / "envoy", [f"127.0.0.1:{port}"], [engine.url.removeprefix("http://")], modes) as gateway,
            aiohttp.ClientSession() as client,
        ):
            await router.proven()
            await router.exact()
            for mode in modes:
                said = [{"role": "user", "content": f"{mode.name} {'once upon a time ' * 60}"}]
                matched = []
                for _ in range(2):
                    body = {"model": SERVED_NAME, "messages": said, "max_tokens": 8, "stream": True}
                    data = io.BytesIO(json.dumps(body).encode())
                    url = f"{gateway.urls[mode.name]}/v1/chat/completions"
                    async with client.post(url, data=data, headers={"content-type": "application/json"}) as answer:
                        text = await answer.text()
                        assert answer.status == 200, text
                        assert text.endswith("data: [DONE]\n\n")
                        matched.append(int(answer.headers["x-warmfleet-matched-tokens"]))
                    said += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
                assert matched[0] < 64 < matched[1], mode.name
            assert await router.metric('warmfleet_handoff_requests_total{result="used"}') > 0
