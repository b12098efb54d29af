"""The figures of a run, from its tally."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.users.tally import SEPARATOR, count, distribution, mean, quantile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet_loadtest.users.tally import Tally

ALL = "all"
BUSY_SHARE = 0.8  # most CPU time of a load generator, as a share of a core; a busier one measures its own delay
LATE_SHARE = 0.05  # most lateness of a generator's requests (p99), as a share of the mean TTFT


def figures(tally: Tally, since: float, until: float = float("inf")) -> dict[str, dict[str, float]]:
    """Return the figures by kind, and of all kinds under ALL, counted between the Unix times since and until."""
    counts, kinds = tally.total(since, until), tally.kinds()
    named = {kind: [kind] for kind in kinds} | {ALL: kinds}
    return {name: _of_kinds(counts, chosen) for name, chosen in named.items()}


def _of_kinds(counts: Counter[str], kinds: list[str]) -> dict[str, float]:
    """Return counts, hit ratio (share of prompt tokens), and times in ms."""
    prompt = count(counts, "prompt", kinds)
    ttft, total = distribution(counts, "ttft", kinds), distribution(counts, "total", kinds)
    gap = distribution(counts, "gap", kinds)
    return {
        "sent": count(counts, "sent", kinds),
        "answered": count(counts, "answered", kinds),
        "failed": count(counts, "failed", kinds),
        "hit_ratio": round(count(counts, "cached", kinds) / prompt, 4) if prompt else 0.0,
        "prompt_tokens": prompt,
        "output_tokens": count(counts, "output", kinds),
        "ttft_mean": round(mean(ttft), 1),
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p90": quantile(ttft, 0.9),
        "ttft_p99": quantile(ttft, 0.99),
        "gap_p50": quantile(gap, 0.5),
        "gap_p99": quantile(gap, 0.99),
        "answer_p50": quantile(total, 0.5),
    }


def split_figures(tally: Tally, roles: Mapping[str, str], since: float, until: float = float("inf")) -> dict[str, Any]:
    """Return the figures of requests that were split over two engines, beside those that an engine served alone.

    roles: of engines by name. Numbers are of the whole run; TTFT, in ms, is counted between the Unix times since and
    until.
    """
    counts, kinds = tally.total(since, until), tally.kinds()
    split = Counter(dict(distribution(counts, "split_ttft", kinds)))
    alone = Counter(dict(distribution(counts, "ttft", kinds))) - split
    prefill, decode, worker = (by_engine(tally, name) for name in ("prefill", "decode", "worker"))
    answered, number = sum(worker.values()), sum(prefill.values())
    return {
        "answered": answered,
        "split": number,
        "share": round(number / answered, 4) if answered else 0.0,
        "ttft": {
            name: {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}
            for name, values in (("split", sorted(split.items())), ("alone", sorted(alone.items())))
        },
        "engines": {
            name: {"role": role, "prefill": prefill[name], "decode": decode[name]}
            | {"alone": worker[name] - decode[name]}
            for name, role in roles.items()
        },
    }


def generator(tally: Tally, seconds: float) -> dict[str, Any]:
    """Return the load generator's own health over a run of ``seconds``.

    busiest_share: of a core, used by the busiest of its processes. lag_p99_ms: how late the event loops of these were.
    late_p99_ms: how late requests were sent. was_busy, was_late: the figures may show the generator, not the fleet.
    """
    counts = tally.total()
    cpu_s = {name: used / 1e6 for name, used in _named(counts, "cpu").items()}
    late = distribution(counts, "late", tally.kinds())
    ttft = distribution(counts, "ttft", tally.kinds())
    busiest = max(cpu_s.values(), default=0.0) / max(seconds, 1e-9)
    late_p99 = quantile(late, 0.99)
    return {
        "cpu_s": {name: round(used, 2) for name, used in sorted(cpu_s.items())},
        "busiest_share": round(busiest, 3),
        "lag_p99_ms": quantile(distribution(counts, "lag", cpu_s), 0.99),
        "late_p50_ms": quantile(late, 0.5),
        "late_p99_ms": late_p99,
        "was_busy": busiest > BUSY_SHARE,
        "was_late": late_p99 > LATE_SHARE * mean(ttft),
    }


def by_name(tally: Tally, name: str) -> dict[str, int]:
    """Return the counter ``name`` of the whole run by what it counts, for example ``worker`` by the workers' ids."""
    return dict(sorted(_named(tally.total(), name).items()))


def by_engine(tally: Tally, name: str) -> Counter[str]:
    """Return the counter ``name`` of the whole run, which counts by workers' ids, by the engines' names."""
    found: Counter[str] = Counter()
    for worker_id, times in by_name(tally, name).items():
        found[worker_id.rpartition(".")[0]] += times  # behind the point is the data-parallel rank
    return found


def _named(counts: Counter[str], name: str) -> dict[str, int]:
    split = [(full.split(SEPARATOR), times) for full, times in counts.items()]
    return {parts[1]: times for parts, times in split if parts[0] == name and len(parts) == 2}


def over_time(tally: Tally, began: float, seconds: float, window_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return by figure (seconds from the begin, value) of intervals of ``window_s`` seconds.

    rate: requests per second. hit_ratio: share of prompt tokens. ttft_p50, ttft_p90, gap_p50: ms; an interval without
    answers has no value of these. failed, broken: numbers. began: Unix time. seconds: length of the run.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    kinds = tally.kinds()
    for number in range(int(seconds / window_s)):
        at = number * window_s
        counts = tally.total(began + at, began + at + window_s)
        found = _of_kinds(counts, kinds)
        values = {"rate": found["sent"] / window_s, "failed": found["failed"]}
        values["broken"] = sum(_named(counts, "broken").values())
        if found["answered"]:
            values |= {name: found[name] for name in ("hit_ratio", "ttft_p50", "ttft_p90", "gap_p50")}
        for name, value in values.items():
            lines.setdefault(name, []).append((at + window_s / 2, value))
    return lines
