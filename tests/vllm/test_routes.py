"""Every route of the installed vLLM passes, is answered by the router itself, or is refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.scripted import Engine, Seen, engine, reply
from tests.support.replicas.replica import replica

from warmfleet.prompt.engine_paths import KNOWN, NEVER, NEVER_BELOW, OWN

if TYPE_CHECKING:
    import asyncio

    from tests.vllm.inside import Inside

BODY = json.dumps({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}).encode()

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def routes(vllm: Inside) -> dict[str, list[str]]:
    """The methods of every route that vLLM's server can have."""
    return dict(vllm.call("list_routes", "methods_by_path"))


async def answer_any(_engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, json.dumps({"path": seen.path}).encode())


def test_every_route_is_known(routes: dict[str, list[str]]) -> None:
    assert len(routes) > 60
    others = routes.keys() - KNOWN.keys() - OWN - NEVER
    assert {path for path in others if not path.startswith(NEVER_BELOW)} == set()
    assert NEVER - routes.keys() <= {"/static"}, "mounted only with a flag of vLLM's own"
    assert KNOWN.keys() - routes.keys() == set()
    assert [path for path, known in KNOWN.items() if set(known.methods) != set(routes[path])] == []


async def test_every_route_passes_or_is_refused(valkey_url: str, model: str, routes: dict[str, list[str]]) -> None:
    async with (
        engine(model, answer_any) as upstream,
        replica(valkey_url, model, upstream.url, passed_paths=("/*",)) as router,
    ):
        for path, methods in routes.items():
            concrete = re.sub(r"\{\w+\}", "x", path)
            for method in {*methods, "POST"}:
                sent = len(upstream.seen)
                async with router.client.request(method, router.url + concrete, data=BODY) as answer:
                    await answer.read()
                passed = len(upstream.seen) > sent
                assert passed == (path in KNOWN and method == "POST"), (method, path)
                assert passed or path in OWN or answer.status in (400, 404, 405), (method, path, answer.status)
