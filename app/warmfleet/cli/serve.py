"""``warmfleet serve``: one router replica in this process."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import uvloop

from warmfleet.cli.local.ports import listen
from warmfleet.main import serve
from warmfleet.settings import Settings

if TYPE_CHECKING:
    import argparse


def settings_of(options: argparse.Namespace) -> Settings:
    """The environment, with the options on top. Raises BadArgument that names the variable at fault."""
    given: dict[str, Any] = {"host": options.host, "port": options.port, "policy": options.policy}
    given |= {"redis_url": options.redis}
    given |= {"models": tuple(options.models.split(",")) if options.models else None}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(Settings.from_environment(), **chosen).checked()


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; open answers may finish first (``WARMFLEET_SHUTDOWN_GRACE_S``)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = settings_of(options)
    with ExitStack() as stack:
        stack.enter_context(suppress(KeyboardInterrupt))  # uvicorn raises the signal again once everything is closed
        sockets = [stack.enter_context(closing(listen(settings.host, settings.port)))]
        if options.reuse_port:
            shared = listen(settings.host, options.reuse_port, shared=True)
            sockets.append(stack.enter_context(closing(shared)))
        admin = []
        if settings.admin_port:
            admin.append(
                stack.enter_context(
                    closing(listen(settings.host, settings.admin_port, chosen_by="WARMFLEET_ADMIN_PORT"))
                )
            )
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(serve(settings, sockets, admin))
    return 0
