"""``warmfleet doctor``: checks Redis, workers, engines and routers end to end, and says what to do about each fault.

An engine that the command line names computes one short prompt, sent twice, and is asked twice for token ids; workers'
URLs that the command line does not name are asked for /health only. In Redis nothing is written.
"""

from __future__ import annotations

from warmfleet.cli.doctor.command import run

__all__ = ["run"]
