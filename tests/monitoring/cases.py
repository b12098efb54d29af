"""For each alert: samples with which it fires, samples just short of that, and the labels that it fires with.

promtool reads samples as ``start+growth x count``, one in each step, which is a minute unless a case says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MINUTES = 60
LATENCIES = ("0.01", "0.02", "0.05", "5", "10", "30", "+Inf")  # the buckets that a case needs


def steady(value: float) -> str:
    """A gauge that keeps its value."""
    return f"{value}x{MINUTES}"


def rising(per_minute: float, minutes: int = MINUTES) -> str:
    """A counter that grows by this amount a minute."""
    return f"0+{per_minute}x{minutes}"


def waits(metric: str, labels: str, above: str, share: float) -> dict[str, str]:
    """The series of a histogram: of 100 values a minute this share is above a bound, and none above the next."""
    at = LATENCIES.index(above)
    counts = [100 * (1 - share) if place <= at else 100 for place, _ in enumerate(LATENCIES)]
    return {
        f'{metric}_bucket{{{labels},le="{bound}"}}': rising(count)
        for bound, count in zip(LATENCIES, counts, strict=True)
    }


@dataclass(frozen=True)
class Case:
    """fires, quiet: series by their names. labels: of the alert that fires, besides its severity. at: the minute."""

    alert: str
    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    at: int = 45
    step: str = "1m"


M = 'model="m"'
MODEL = {"model": "m"}
SERVED = {"served_model": "m"}
REPLICA = {"job": "router", "instance": "a"}
BUILT = {'warmfleet_build_info{job="router",instance="a"}': steady(1)}
DAY = 24 * MINUTES


def workers(routable: int, pool: str = "m") -> dict[str, str]:
    """Both replicas see ``routable`` proven workers of the pool, and another that is not routable."""
    series: dict[str, str] = {}
    for instance in "ab":
        series |= {
            f'warmfleet_workers{{model="{pool}",instance="{instance}",state="{state}"}}': steady(count)
            for state, count in (("proven", routable), ("identity", 0), ("unheard", 0), ("unroutable", 1))
        }
    return series


def answers(errors_a_minute: float, pool: str = "m", count: int = 1_000) -> dict[str, str]:
    """Two replicas give this many answers a minute."""
    good, bad = rising((count - errors_a_minute) / 2), rising(errors_a_minute / 2)
    return {
        f'warmfleet_requests_total{{model="{pool}",instance="{instance}",status="{status}"}}': values
        for instance in "ab"
        for status, values in (("200", good), ("503", bad))
    }


def matched(now: float) -> dict[str, str]:
    """A day with 60 of 100 prompt tokens matched in ten minutes, and two hours with fewer."""
    tens = DAY // 10
    return {
        f"warmfleet_prompt_tokens_total{{{M}}}": f"0+100x{tens + 12}",
        f"warmfleet_matched_tokens_total{{{M}}}": f"0+60x{tens} {60 * tens}+{now}x12",
    }


def worker(routable: int, state: str) -> dict[str, str]:
    named = f'{M},worker="gpu1.0"'
    return {
        f'warmfleet_worker_routable{{{named},instance="a"}}': steady(routable),
        f'warmfleet_worker_info{{{named},instance="a",state="{state}"}}': steady(1),
    }


def by_load(share: float) -> dict[str, str]:
    return {
        f'warmfleet_load_only_requests_total{{{M},reason="parts"}}': rising(100 * share),
        f'warmfleet_identified_requests_total{{{M},kind="load"}}': rising(100 * share),
        f'warmfleet_identified_requests_total{{{M},kind="exact"}}': rising(100 * (1 - share)),
    }


def in_pools(metric: str, values: str, labels: str = 'instance="a"') -> dict[str, str]:
    """Equal series in each of two pools of a model."""
    return {f'{metric}{{model="{pool}",{labels}}}': values for pool in ("m#1", "m#2")}


def one(metric: str, values: str, labels: str = 'instance="a"') -> dict[str, str]:
    return {f"{metric}{{{labels}}}": values}


CASES = (
    Case("WarmfleetFewReplicas", BUILT, BUILT | {'warmfleet_build_info{job="router",instance="b"}': steady(1)}),
    Case("WarmfleetFewReplicas", {"up": steady(0)}, BUILT | {"warmfleet_build_info": steady(1)}),
    Case("WarmfleetNoWorker", workers(0), workers(1), SERVED),
    Case("WarmfleetNoWorker", workers(0, "m#1") | workers(0, "m#2"), workers(0, "m") | workers(1, "m#2"), SERVED),
    Case("WarmfleetErrors", answers(60), answers(40), SERVED),
    Case(
        "WarmfleetErrors",
        answers(0, "m#1") | answers(80, "m#2", 100),
        answers(0, "m#1") | answers(40, "m#2", 100),
        SERVED,
    ),
    Case(
        "WarmfleetStreamsBreak",
        one("warmfleet_stream_errors_total", rising(0.6), M),
        one("warmfleet_stream_errors_total", rising(0.4), M),
        SERVED,
    ),
    Case(
        "WarmfleetStreamsBreak",
        in_pools("warmfleet_stream_errors_total", rising(0.3)),
        in_pools("warmfleet_stream_errors_total", rising(0.2)),
        SERVED,
    ),
    Case(
        "WarmfleetRefuses",
        one("warmfleet_queue_rejections_total", rising(7), f'{M},reason="full"'),
        one("warmfleet_queue_rejections_total", rising(5), f'{M},reason="full"'),
        SERVED | {"reason": "full"},
    ),
    Case(
        "WarmfleetRefuses",
        in_pools("warmfleet_queue_rejections_total", rising(4), 'reason="full"'),
        in_pools("warmfleet_queue_rejections_total", rising(2), 'reason="full"'),
        SERVED | {"reason": "full"},
    ),
    Case(
        "WarmfleetQueueIsLong",
        waits("warmfleet_queue_seconds", M, "5", 0.12),
        waits("warmfleet_queue_seconds", M, "5", 0.08),
        MODEL,
    ),
    Case(
        "WarmfleetSlowFirstToken",
        waits("warmfleet_first_byte_seconds", f'{M},answer="stream"', "10", 0.12),
        waits("warmfleet_first_byte_seconds", f'{M},answer="stream"', "10", 0.08)
        | waits("warmfleet_first_byte_seconds", f'{M},answer="plain"', "10", 1),
        MODEL,
    ),
    Case(
        "WarmfleetReplicaIsBusy",
        BUILT | one("process_cpu_seconds_total", rising(54), 'job="router",instance="a"'),
        BUILT
        | one("process_cpu_seconds_total", rising(48), 'job="router",instance="a"')
        | {'process_cpu_seconds_total{job="other",instance="c"}': rising(59)},
        REPLICA,
    ),
    Case(
        "WarmfleetCertificateEnds",
        one("warmfleet_tls_certificate_expiry_timestamp_seconds", steady(6 * 86_400)),
        one("warmfleet_tls_certificate_expiry_timestamp_seconds", steady(8 * 86_400))
        | {'warmfleet_tls_certificate_expiry_timestamp_seconds{instance="without"}': steady(0)},
        {"instance": "a"},
    ),
    Case("WarmfleetHitRatioFell", matched(25), matched(35), MODEL, at=DAY + 90, step="10m"),
    Case("WarmfleetPlacesByLoad", by_load(0.25), by_load(0.15), MODEL),
    Case(
        "WarmfleetWorkerIsOut",
        worker(0, "unreachable"),
        worker(0, "draining"),
        MODEL | {"worker": "gpu1.0"},
    ),
    Case(
        "WarmfleetWorkerIsOut",
        worker(0, "silent"),
        worker(1, "proven"),
        MODEL | {"worker": "gpu1.0"},
    ),
    Case(
        "WarmfleetWorkersDiffer",
        one("warmfleet_outvoted_workers", steady(1), 'what="identity"'),
        one("warmfleet_outvoted_workers", steady(0), 'what="identity"'),
        {"what": "identity"},
    ),
    Case(
        "WarmfleetRedisIsAway",
        one("warmfleet_view_age_seconds", steady(11)) | {'warmfleet_view_age_seconds{instance="b"}': steady(1)},
        one("warmfleet_view_age_seconds", steady(9)),
    ),
    Case(
        "WarmfleetPlacesWithoutRedis",
        one("warmfleet_fallback_requests_total", rising(7), f'{M},reason="away"'),
        one("warmfleet_fallback_requests_total", rising(5), f'{M},reason="away"'),
        {"reason": "away"},
    ),
    Case(
        "WarmfleetSlowDecisions",
        waits("warmfleet_decision_seconds", M, "0.02", 0.02),
        waits("warmfleet_decision_seconds", M, "0.01", 0.05),
    ),
    Case(
        "WarmfleetMemoryFills",
        one("warmfleet_memory_used_ratio", steady(0.76)),
        one("warmfleet_memory_used_ratio", steady(0.74)),
    ),
    Case(
        "WarmfleetMemoryIsShort",
        one("warmfleet_memory_short_models", steady(1)),
        one("warmfleet_memory_short_models", steady(0)),
    ),
    Case(
        "WarmfleetIndexLags",
        one("warmfleet_apply_lag_seconds", steady(6)),
        one("warmfleet_apply_lag_seconds", steady(4)),
    ),
    Case(
        "WarmfleetIndexDiffers",
        one("warmfleet_diverged_workers", steady(1)),
        one("warmfleet_diverged_workers", f"1x20 0x{MINUTES}"),
    ),
    Case(
        "WarmfleetAuditFailed",
        one("warmfleet_audit_mismatches_total", f"0x20 1x{MINUTES}"),
        one("warmfleet_audit_mismatches_total", steady(1)),
    ),
    Case(
        "WarmfleetTaskFails",
        one("warmfleet_task_failures_total", rising(0.7), 'task="view"'),
        one("warmfleet_task_failures_total", rising(0.5), 'task="view"'),
        {"task": "view"},
    ),
)


def unit_tests(alert: str, rules: str, severity: str) -> dict[str, Any]:
    """The cases of one alert as a file for ``promtool test rules``. rules: the path of a file with this alert alone."""
    tests = []
    cases = [case for case in CASES if case.alert == alert]
    for case in cases:
        for series, fires in (case.fires, True), (case.quiet, False):
            labels = case.labels | {"severity": severity}
            expected = [{"exp_labels": labels}] if fires else []
            tests.append(
                {
                    "name": f"{case.alert} {'fires' if fires else 'is quiet'}",
                    "interval": case.step,
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "alert_rule_test": [{"alertname": case.alert, "eval_time": f"{case.at}m", "exp_alerts": expected}],
                }
            )
    return {"rule_files": [rules], "evaluation_interval": cases[0].step, "tests": tests}
