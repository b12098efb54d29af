"""A trace through whole fleets: ``make -s bench NAME=trace``. The bench itself is a tool of loadtest/."""

import sys

from tests.bench.envoy_gateway import door

from warmfleet.settings import POLICIES
from warmfleet_loadtest.fleet_bench import main
from warmfleet_loadtest.stacks.processes import end_on_signals

if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(POLICIES, gateway=door))
