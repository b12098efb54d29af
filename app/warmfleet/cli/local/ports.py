"""TCP ports of a local stack: free ones, and one address that several replicas share."""

from __future__ import annotations

import socket

from warmfleet.cli.command_error import CommandError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def claim_shared(host: str, port: int) -> socket.socket:
    """Bind ``host:port`` (0: any) with SO_REUSEPORT and keep it without listening; CommandError if it is taken.

    The bound socket gets no connections (it does not listen) but keeps the port ours while replicas come and go.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise CommandError("several replicas behind one port need SO_REUSEPORT, which this platform does not have")
    if port:
        listen(host, port).close()  # bound alone first: another stack would share the port with us unnoticed
    return listen(host, port, shared=True)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket bound to ``host:port``. shared: several processes may bind it, the kernel spreads new connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise CommandError(f"{host}:{port} cannot be used ({error.strerror}): choose another with --port") from error
    return bound
