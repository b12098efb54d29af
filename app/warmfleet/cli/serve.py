"""``warmfleet serve``: one router replica in this process, or several under a parent."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from warmfleet.api.listening.parent import Parent
from warmfleet.api.listening.server import Sockets
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.ports import OWN_ADMIN_PORT, OWN_EPP_PORT, listen
from warmfleet.cli.local.replicas import Replicas, bind
from warmfleet.main import log_output, serve
from warmfleet.settings import Settings

if TYPE_CHECKING:
    import argparse


def settings_of(options: argparse.Namespace) -> Settings:
    """Merge the environment, the file of ``--env-file`` on top, and the options on top of both.

    Raises BadArgument that names the variable at fault, CommandError if the file cannot be read.
    """
    shared = ("host", "port", "policy", "access_log", "log_level", "log_format")  # names of options and of settings
    chosen: dict[str, Any] = {name: getattr(options, name) for name in shared} | {"redis_url": options.redis}
    chosen["models"] = tuple(options.models.split(",")) if options.models else None
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return replace(Settings.from_environment(environment_of(options)), **chosen).checked()


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Merge the environment, and the file of ``--env-file`` on top. Raises CommandError if the file cannot be read."""
    return os.environ | (variables(options.env_file) if options.env_file else {})


def variables(path: str) -> dict[str, str]:
    """Read the variables of a file with lines ``NAME=value``; a value may be quoted. Raises CommandError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--env-file cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"--env-file {path}, line {number}: this is not NAME=value")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    return found


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; open answers may finish first (``WARMFLEET_SHUTDOWN_GRACE_S``)."""
    if options.workers and not options.place:
        return _several(options)
    settings = settings_of(options)
    if options.env_file:
        os.environ.update(variables(options.env_file))
    with ExitStack() as stack:
        stack.enter_context(suppress(KeyboardInterrupt))  # uvicorn raises the signal again once everything is closed
        log = stack.enter_context(log_output(settings, options.place.partition(",")[0] if options.place else ""))
        if options.place:
            place, sockets = _inherited(options.place)
            file = settings.decision_log
            settings = replace(settings, decision_log=file and f"{file}.{place}")
        else:
            sockets = _bound(settings, options.reuse_port)
        for sock in sockets.all:
            stack.enter_context(closing(sock))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(serve(settings, sockets, log))
    return 0


def _several(options: argparse.Namespace) -> int:
    if options.reuse_port:
        raise CommandError("--workers and --reuse-port exclude each other")
    settings = settings_of(options)
    command = [sys.executable, "-m", "warmfleet", "serve", *sys.argv[sys.argv.index("serve") + 1 :]]
    with log_output(settings):
        replicas = Replicas(command, bind(settings, options.workers), settings.drain_s + settings.shutdown_grace_s)
        return asyncio.run(replicas.run())


def _bound(settings: Settings, shared_port: int | None) -> Sockets:
    """Open the sockets of a replica without a parent. Raises CommandError if a port is taken."""
    host, admin = settings.host, settings.admin_port
    with ExitStack() as bound:  # frees the ports that were bound, if a later port is taken
        clients = [bound.enter_context(closing(listen(host, settings.port)))]
        if shared_port:
            clients.append(bound.enter_context(closing(listen(host, shared_port, shared=True))))
        operators = [bound.enter_context(closing(listen(host, admin, chosen_by=OWN_ADMIN_PORT)))] if admin else []
        gateways, probes = (
            [listen(host, port, chosen_by=OWN_EPP_PORT)] if port else []
            for port in (settings.epp_port, settings.epp_health_port)
        )
        bound.pop_all()
    return Sockets(clients, operators, gateways, probes)


def _inherited(option: str) -> tuple[str, Sockets]:
    """Receive this replica's place (its number) and sockets, as ``Replicas`` hands them over by ``--place``."""
    place, *numbers = option.split(",")
    line, clients, operators, gateways, probes = (
        [socket.socket(fileno=int(number)) for number in joined.split("+") if number] for joined in numbers
    )
    for sock in (*line, *clients, *operators, *gateways, *probes):
        sock.set_inheritable(False)  # child processes of this replica do not inherit these sockets
    return place, Sockets(clients, operators, gateways, probes, Parent(line[0]))
