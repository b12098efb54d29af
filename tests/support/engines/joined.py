"""A simulated engine with a real tokenizer that has joined a fleet by itself, as one with the plugin does."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.engines.listening import config, identity, running
from tests.support.polling import poll

from warmfleet_loadtest.engine import Engine
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.support.replicas.replica import Replica


class Announcing(PromptTokenizer):
    """The demo's identity, with other facts."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        known = identity()
        self.__dict__.update(known.__dict__)
        self._facts = facts

    def facts(self, max_model_len: int) -> dict[str, Any]:
        return super().facts(max_model_len) | dict(self._facts)


async def proven(router: Replica) -> None:
    """Return when the replica knows one worker to be right, and its tokenizer if it brought one."""

    async def known() -> bool:
        model = json.loads((await router.get("/workers"))[1])["models"][0]
        return [worker["proof"] for worker in model["workers"]] == ["proven"] and await router.metric(
            'warmfleet_workers{state="proven"}'
        ) == 1

    await poll(known, 60, "the worker is proven")
    await poll(lambda: _ready(router), 60, "the replica is ready")


async def _ready(router: Replica) -> bool:
    return (await router.get("/readyz"))[0] == 200


@asynccontextmanager
async def joined(
    redis_url: str,
    model: str,
    server_id: str = "s1",
    *,
    facts: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    blocks: int = 512,
) -> AsyncIterator[Engine]:
    """facts: announced beside or instead of the usual ones. leave_out: artifacts that the engine does not announce."""
    engine = Engine(config(blocks=blocks), Announcing(facts or {}), Served((model,)))
    brought = {name: content for name, content in identity().artifacts().items() if name not in leave_out}
    async with running(ready=engine) as up:
        engine.join(Membership(redis_url, model, (model,), server_id, up.url), brought)
        yield engine
