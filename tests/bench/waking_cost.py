"""Measures how much more CPU time work costs after a rest, on this machine at this minute.

A program that wakes a few times a second finds caches cold, and on some virtual machines the host has to map its memory
again. Its CPU time is then several times that of the same work in a row, whatever the program does. So figures of
programs at rest mean little without this factor.
"""

from __future__ import annotations

import json
import re
import statistics
import time

IN_A_ROW, AFTER_REST = 200, 50  # pieces of work
REST_S = 0.06  # a replica of many pools at rest wakes so often; after a second of rest the factor is higher
ROWS = [{"worker": f"worker-{number:04d}", "blocks": list(range(number, number + 12))} for number in range(200)]


def waking_cost() -> dict[str, float]:
    """``work_us``: CPU us of a piece of work among equal ones; ``rested_work_us``: of one after 60 ms of sleep;
    ``waking_cost``: the second over the first. Means, because a replica at rest pays the mean.
    """
    for _ in range(IN_A_ROW // 4):
        _spent_us()
    in_a_row = statistics.fmean(_spent_us() for _ in range(IN_A_ROW))
    rested = statistics.fmean(_spent_us(REST_S) for _ in range(AFTER_REST))
    return {
        "work_us": round(in_a_row, 1),
        "rested_work_us": round(rested, 1),
        "waking_cost": round(rested / in_a_row, 2),
    }


def _spent_us(rest_s: float = 0.0) -> float:
    """CPU us of one piece of work, as a replica does when it reads its workers."""
    if rest_s:
        time.sleep(rest_s)
    began = time.thread_time()
    text = json.dumps(ROWS)
    json.loads(text)
    re.sub(r"worker-(\d+)", r"\1", text[:4_000])
    return (time.thread_time() - began) * 1e6
