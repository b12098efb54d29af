"""`warmfleet bridge`, or `python -m warmfleet_worker.bridge`. Exit codes: 0 stopped as asked, 2 wrong usage."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import TYPE_CHECKING

from warmfleet_worker.bridge import options, status

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_SECONDS = 2.0  # time between two looks at the file of engines
MISSING = "warmfleet bridge: {} is not installed: pip install './worker_plugin[bridge,hub]' in a checkout of Warmfleet"

logger = logging.getLogger("warmfleet")


def main(argv: Sequence[str] | None = None) -> int:
    args = options.parser().parse_args(argv)
    try:
        from warmfleet_worker.bridge.bridge import Bridge  # after --help, which needs no third-party package
    except ModuleNotFoundError as error:
        print(MISSING.format(error.name), file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    try:
        redis_url, engines = options.redis_url(args), options.engines_of(args)
        if not engines and args.engines is None:
            raise options.OptionError("no engine is given: --engine URL or --engines FILE")  # noqa: TRY301
        stopping = threading.Event()
        bridge = Bridge(redis_url, stopping)
        server = status.serve(bridge, args.status_port) if args.status_port else None
    except (options.OptionError, OSError) as error:
        print(f"warmfleet bridge: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    refused = ""
    while not stopping.is_set():
        bridge.follow(engines)
        stopping.wait(LOOK_SECONDS)
        try:
            engines, refused = options.engines_of(args), ""
        except options.OptionError as error:  # the file was changed: the engines stay as they were
            if str(error) != refused:
                logger.warning("warmfleet: %s; the engines stay as they were", error)
            refused = str(error)
    if server is not None:
        server.shutdown()
    bridge.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
