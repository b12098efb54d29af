"""A trace through whole fleets: ``make -s bench NAME=trace``; the bench itself is a tool of loadtest/."""

import signal
import sys

from warmfleet_loadtest.fleet_bench import main


def terminate(*_: object) -> None:
    """SIGTERM ends a run as ctrl-C does, through its ``with`` blocks: no process of a fleet is left."""
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())
