"""TCP ports of a local stack: free ones, and the address that several replicas share."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import suppress

from warmfleet.cli.command_error import CommandError

#: The setting that ``listen`` names in its error if a second replica on a machine takes the same port for operators.
OWN_ADMIN_PORT = "WARMFLEET_ADMIN_PORT, as each replica on a machine needs its own (0: the clients' port is used)"
OWN_EPP_PORT = "WARMFLEET_EPP_PORT or WARMFLEET_EPP_HEALTH_PORT, as each replica on a machine needs its own"

#: Ports to choose from: below those that systems give to outgoing connections, which could take a free port meanwhile.
PORTS = range(20_000, 32_768)
TRIES = 100


def free_port(host: str = "127.0.0.1", wanted: int = 0) -> int:
    """Find a port that is free now, if possible the wanted one; another server may take it before it is used.

    Raises CommandError.
    """
    if wanted:
        with suppress(CommandError):
            listen(host, wanted).close()
            return wanted
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with suppress(CommandError):
            listen("127.0.0.1", port).close()
            return port
    raise CommandError("no free port was found on 127.0.0.1")


def claim_shared(host: str, port: int) -> socket.socket:
    """Bind ``host:port`` (0: any free port) for several replicas. Raises CommandError if the port is taken.

    The returned socket does not listen and gets no connections. It reserves the port while replicas come and go.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise CommandError("several replicas behind one port need SO_REUSEPORT, which this platform does not have")
    if port:
        listen(host, port).close()  # fails if another stack has the port, which SO_REUSEPORT would share
    return listen(host, port, shared=True)


def listen(host: str, port: int, *, shared: bool = False, chosen_by: str = "--port") -> socket.socket:
    """Bind a socket to ``host:port``. Raises CommandError.

    With ``shared``, several processes may bind the port, and the kernel spreads new connections over them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        option = "--host" if error.errno == errno.EADDRNOTAVAIL else chosen_by
        raise CommandError(f"{host}:{port} cannot be used ({error.strerror}): choose another with {option}") from error
    return bound


def check_rows(*firsts: int, count: int) -> None:
    """Raise CommandError if replicas that take ports in a row, from these two for gateways on, would share any."""
    if count > 1 and len(firsts) > 1 and abs(firsts[0] - firsts[1]) < count:
        names = "WARMFLEET_EPP_PORT and WARMFLEET_EPP_HEALTH_PORT"
        raise CommandError(f"from {names} on each replica takes a port of its own: choose two at least {count} apart")
