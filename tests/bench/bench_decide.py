"""Measures the cost of decisions: ``make -s bench NAME=decide`` prints one JSON object as its last line.

    make -s bench NAME=decide                       # 64 workers, 1 M (block, worker) pairs
    make -s bench NAME=decide ARGS="--queue"        # calls of the fleet's queue, with 100 to 10,000 tickets
    make -s bench NAME=decide ARGS="--masters"      # six pools on one, two and three masters of a Cluster
    make -s bench NAME=decide ARGS="--beside ../old"  # beside the script of another checkout, in one run

All figures are CPU time in µs. "hot": calls back to back, from the server's own counters. "cold": one call at a time
with pauses and polluted caches, from the scheduler's clock. The keys of the queue are explained in ``decide_queue``,
those of masters in ``decide_masters``, those of ``--beside`` in ``decide_beside``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from tests.bench import decide_beside, decide_masters, decide_queue
from tests.bench.filled_store import Data, FilledStore
from tests.bench.output import say
from tests.support.redis.servers import server, valkey_binary

from warmfleet.fleet import Hint


def decisions(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of decide and settle with prompts of 625 and 6,250 blocks."""
    store = FilledStore(url, options.workers)
    data, bytes_per_entry = store.prepare(625, options.pairs)
    decide, settle = store.hot(data.query, options.rounds, 400)
    say(f"hot 625: decide {decide:.0f} us, settle {settle:.0f} us")
    plain, tools = (store.in_ledger(hint, data.query, options.rounds, 200) for hint in (0, Hint.TOOLS))
    say(f"while the ledger binds, of a new session: {plain:.0f} us; with tools, which gets a place: {tools:.0f} us")
    cold = sorted(store.cold(data.query, 300))
    say(f"cold 625: mean {sum(cold) / len(cold):.0f}, p50 {cold[150]:.0f}, p99 {cold[296]:.0f} us")
    data, _ = store.prepare(6250, options.pairs)
    decide_long, settle_long = store.hot(data.query, options.rounds, 100)
    say(f"hot 6250: decide {decide_long:.0f} us, settle {settle_long:.0f} us")
    worst = Data(options.workers, 6250, 0, random.Random(3))
    worst.load_distinct(store.client, store.keys.prefix.encode())
    distinct, _ = store.hot(lambda: worst.chains[0], options.rounds, 20)
    say(f"6250, all depths distinct: {distinct:.0f} us")
    info: Any = store.client.info("server")
    return {
        "cpu_us_hot_625": round(decide, 1),
        "cpu_us_ledger_plain": round(plain, 1),
        "cpu_us_ledger_tools": round(tools, 1),
        "cpu_us_cold_625": round(sum(cold) / len(cold), 1),
        "cpu_us_hot_6250": round(decide_long, 1),
        "cpu_us_hot_6250_distinct": round(distinct, 1),
        "cpu_us_settle_625": round(settle, 1),
        "routes_per_s": round(1e6 / (decide + settle)),
        "bytes_per_entry": round(bytes_per_entry, 1),
        "workers": options.workers,
        "server": f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info['redis_version']}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--queue", action="store_true", help="measure the calls of the queue instead")
    part.add_argument("--masters", action="store_true", help="measure decisions on the masters of a Cluster instead")
    part.add_argument("--beside", type=Path, metavar="CHECKOUT", help="compare decide with that of this checkout")
    parser.add_argument("--workers", type=int, default=64, help="(default %(default)s; --queue: 8 and 64)")
    parser.add_argument("--pairs", type=int, default=1_000_000, help="of the index (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the cheapest counts (default %(default)s)")
    parser.add_argument("--server", default=os.environ.get("WARMFLEET_BENCH_SERVER"), help="path of redis or valkey")
    parser.add_argument("--quick", action="store_true", help="little data: shows that a part works")
    options = parser.parse_args()
    if options.masters:
        found = decide_masters.run(quick=options.quick, rounds=options.rounds)
    else:
        binary = options.server or shutil.which("redis-server") or valkey_binary()
        say(f"server: {binary}")
        with server(binary) as url:
            if options.beside:
                found = decide_beside.run(url, options.beside, quick=options.quick)
            elif options.queue:
                found = decide_queue.run(url, 1 if options.quick else options.rounds, quick=options.quick)
            else:
                found = decisions(url, options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
