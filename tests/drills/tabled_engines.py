"""Simulated engines of a pool in one process, which show their tables, with which the index is compared.

``python -m tests.drills.tabled_engines --port P --redis URL --model NAME --fleet TAG --worker-id ID --count N`` and
the other options of ``warmfleet_loadtest.engine``. Port P tells the tables: block hashes in hex, by worker.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from aiohttp import web

from warmfleet_loadtest.engine import Engine, engine_config, listening, membership, parser
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import argparse


async def serve(args: argparse.Namespace) -> None:
    """Run until the process is killed."""
    tokenizer = PromptTokenizer.load(args.tokenizer)
    config, served, artifacts = engine_config(args), Served(tuple(args.model), None), tokenizer.artifacts()
    engines: dict[str, Engine] = {}
    for index in range(args.count):
        engine = Engine(config, tokenizer, served)
        await engine.start(args.host, 0)
        joining = membership(args, engine.port, index)
        engine.join(joining, artifacts)
        engines[wire.worker_id_of(joining.server_id, 0)] = engine

    async def tables(_request: web.Request) -> web.Response:
        held = {name: sorted(block.hex() for block in dict(engine.tracker.table)) for name, engine in engines.items()}
        return web.json_response(held)

    app = web.Application()
    app.router.add_get("/tables", tables)
    await listening(app, args.host, args.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(parser().parse_args(sys.argv[1:])))
