"""A replica whose time runs several times as fast: ``python -m tests.bench.hurried_replica TIMES serve ...``.

Its rounds come TIMES as often. Its CPU time, divided by TIMES, is then the work of a replica at rest without most of
the cost of waking, which some machines make many times the work (``waking_cost.py``).
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any, cast
from unittest.mock import patch

from warmfleet.__main__ import main
from warmfleet.background.clock import Clock
from warmfleet.fleet import upkeep, workers
from warmfleet.fleet.upkeep import Pace
from warmfleet.pools.pool import Pool

GAPS = [field.name for field in fields(Pace) if field.name.endswith("gap_ms")]


def hurry(times: float) -> None:
    """Divide the periods of this process: those of its rounds, of ticks and of what it reads less often."""
    until, pace, age_s = Clock.until, Pace(), cast("Any", Pool.view_age_s).fget
    gaps = {name: max(1, round(getattr(pace, name) / times)) for name in GAPS}
    patch.object(Clock, "until", lambda clock, period_s, share=0.0: until(clock, period_s / times, share)).start()
    patch.object(Pool, "view_age_s", property(lambda pool: times * age_s(pool))).start()
    patch.object(upkeep, "Pace", lambda: Pace(**gaps)).start()
    patch.object(workers, "SERVERS_S", workers.SERVERS_S / times).start()


if __name__ == "__main__":
    hurry(float(sys.argv.pop(1)))
    sys.exit(main(sys.argv[1:]))
