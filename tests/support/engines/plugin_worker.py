"""A worker by the publishers of the plugin, beside a scripted engine, and the proof that a replica finds."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from tests.support.engines.scripted import Answer, Engine, Seen, answer_well
from tests.support.engines.simulated import tokenizer_json
from tests.support.polling import poll
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol.wire import Scheme, chain_hashes, default_none_hash, pack_hashes
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.support.replicas.replica import Replica

    from warmfleet_worker.protocol.transfer import Transfer
    from warmfleet_worker.tracker import Tracker


def byte_tokenizer() -> bytes:
    """The smallest tokenizer: one token for every byte. It loads at once."""
    made = Tokenizer(BPE({char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return made.to_str().encode()


SCHEME = Scheme("sha256_cbor", default_none_hash("sha256_cbor"), 16)
#: A replica tries a tokenizer of one token per byte much faster than a real one.
TOKENIZER = tokenizer_json(argparse.__file__, 1_000).encode()
SMALL = byte_tokenizer()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@asynccontextmanager
async def worker(
    redis_url: str,
    model: str,
    url: str,
    tracker: Tracker,
    scheme: Scheme = SCHEME,
    name: str = "eng",
    adapters: Mapping[str, str] = MappingProxyType({"adapter": "/adapters/a"}),
    tokenizer: bytes = SMALL,
    template: str = TEMPLATE,
    takes: int = 4_096,
    models: tuple[str, ...] = (),
    transfer: Transfer | None = None,
    **more: object,
) -> AsyncIterator[WorkerPublisher]:
    """Both halves of a worker, by the plugin's own publishers. takes: context in tokens. models: the names that it
    serves, if not its pool's. transfer: how it hands blocks to others. more: facts of its server."""
    said = PublisherConfig(redis_url, model, f"{name}.0", name, 0, scheme, 1_000, takes, "test", transfer=transfer)
    core = WorkerPublisher(said, tracker)
    artifacts = {"tokenizer.json": tokenizer, "chat_template.jinja": template.encode()}
    served = models or (model.partition("#")[0],)
    config = ServerConfig(redis_url, model, name, url, served, "test", artifacts, more, adapters=lambda: adapters)
    server = ServerPublisher(config)
    server.start()
    core.start()
    try:
        yield core
    finally:
        await asyncio.gather(asyncio.to_thread(server.stop), asyncio.to_thread(core.stop))


def caching(tracker: Tracker, ids_of: list[list[int]], words: bytes = SMALL) -> Answer:
    """An engine that keeps the blocks of every prompt it gets. ids_of: makes the token ids. words: its tokenizer."""
    tokenizer = Tokenizer.from_str(words.decode())

    async def answer(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        prompt = seen.json.get("prompt")
        if isinstance(prompt, list):
            ids_of.append(prompt)
        else:
            chat = "".join(f"<{message['role']}>{message['content']}" for message in seen.json.get("messages", ()))
            prompt = tokenizer.encode(prompt or chat, add_special_tokens=bool(prompt)).ids
        tracker.stored(pack_hashes(chain_hashes(SCHEME, prompt)))
        await answer_well(engine, seen, writer)

    return answer


async def proof(router: Replica, wanted: str) -> str:
    async def seen() -> str | None:
        views = await router.fleet.workers.read()
        return next((str(view.record.get("reason", "")) or "-" for view in views if view.proof == wanted), None)

    return str(await poll(seen, 60, f"proof {wanted}"))
