"""The certificates of engines that a replica accepts."""

from __future__ import annotations

import ssl

from warmfleet.errors import BadArgument


def engine_tls(ca_file: str) -> ssl.SSLContext:
    """Return a TLS context for connections to engines. ca_file: PEM file of their authority; empty = the system's.

    Raises BadArgument.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # SSLError is an OSError
        raise BadArgument(f"WARMFLEET_WORKER_CA={ca_file!r} cannot be used: {error}") from error
