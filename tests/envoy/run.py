"""Run Envoy as a gateway that asks pickers on this machine: ``python -m tests.envoy.run 127.0.0.1:9002``.

Listens at port 10000 in mode FULL_DUPLEX_STREAMED, and goes wherever a picker says (ORIGINAL_DST). ``--print`` prints
the configuration instead, which Envoy takes as a file.
"""

from __future__ import annotations

import argparse
import json
import os

from tests.envoy.gateway_config import MODES, binary, config


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("pickers", nargs="+", metavar="IP:PORT", help="of a replica's port for gateways")
    made.add_argument("--port", type=int, default=10_000, help="for clients (default %(default)s)")
    made.add_argument("--tls", action="store_true", help="the pickers speak TLS")
    made.add_argument("--print", action="store_true", help="print the configuration")
    options = made.parse_args()
    configured = config(options.pickers, [], MODES[:1], tls=options.tls, ejects=True)
    configured["static_resources"]["listeners"] = [
        listener for listener in configured["static_resources"]["listeners"] if listener["name"] == MODES[0].name
    ]
    configured["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = options.port
    if options.print:
        print(json.dumps(configured, indent=2))
        return
    envoy = binary()
    if envoy is None:
        made.error("no Envoy is installed: run `make envoy`")
    words = ["--concurrency", "1", "--use-dynamic-base-id", "-l", "warning", "--config-yaml", json.dumps(configured)]
    os.execv(envoy, ["envoy", *words])


if __name__ == "__main__":
    main()
