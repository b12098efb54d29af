"""A trace through whole fleets: ``make -s bench NAME=trace``; the bench itself is a tool of loadtest/."""

import sys

from warmfleet_loadtest.fleet_bench import main

if __name__ == "__main__":
    sys.exit(main())
