"""All metrics of a router. app/docs/metrics.md is generated from here.

Their names follow a rule (tests/contract/test_metrics.py): ``warmfleet_``, then the things that are counted, in the
plural, or what is measured with its base unit at the end; a counter has ``_total`` behind that. Every label is bounded:
none names a user or a request. ``model`` is the tag of a pool, ``client`` a name in the file of clients' keys,
``worker`` a worker of the last reading, whose samples go when it leaves the fleet.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from warmfleet.version import version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

ANSWERS = STREAM, PLAIN = "stream", "plain"
LIMIT_RESULTS = ("requests", "tokens", "unchecked")
#: Reasons (labels) that each model's counters have from the start, with value 0, besides the codes of errors: why the
#: queue rejected a request, and why a decision was made without Redis.
REJECTIONS = ("full", "displaced", "bytes", "deadline", "sessions")
FALLBACKS = ("away", "open", "no_worker")
_HELD_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SESSION_STATES = ("running", "idle", "new", "paused", "out")
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Number:
    """A metric's value without a lock: only one thread writes it. Adding takes a tenth of the library's time."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def get(self) -> float:
        return self.value

    def set(self, value: float) -> None:
        self.value = value

    def get_exemplar(self) -> None:
        """Return None, because no sample has an exemplar."""


class Counter(prometheus_client.Counter):
    """A metric that only grows. If it has labels, callers keep what ``labels`` returns, to save look-ups."""

    _value: Number  # the library's type has a lock

    def _metric_init(self) -> None:
        self._value, self._created = Number(), 0.0

    def inc(self, amount: float = 1, exemplar: object = None) -> None:  # noqa: ARG002  the library's signature
        self._value.value += amount


class Gauge(prometheus_client.Gauge):
    """A metric that goes up and down."""

    _value: Number

    def _metric_init(self) -> None:
        self._value = Number()

    def inc(self, amount: float = 1) -> None:
        self._value.value += amount

    def dec(self, amount: float = 1) -> None:
        self._value.value -= amount

    def set(self, value: float) -> None:
        self._value.value = float(value)


class Histogram(prometheus_client.Histogram):
    """A metric that counts values by ranges, and adds them up."""

    _sum: Number
    _buckets: list[Number]

    def _metric_init(self) -> None:
        self._sum, self._created = Number(), 0.0
        self._buckets = [Number() for _ in self._upper_bounds]

    def observe(self, amount: float, exemplar: object = None) -> None:  # noqa: ARG002  the library's signature
        self._sum.value += amount
        self._buckets[bisect_left(self._upper_bounds, amount)].value += 1


class _Families(prometheus_client.CollectorRegistry):
    """A registry that returns metrics which were collected before, for the library's writer of the text format."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class Metrics:
    """All metrics of one router process. ``render`` returns them in Prometheus' text format.

    models: tags. Counters of these models are 0 from the start, because Prometheus' rate over a sample that appears
    only with its first event would miss this event.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Iterable[str] = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.build_info = self._gauge("build_info", "1; the labels name the versions", "version python")
        self.build_info.labels(version(), platform.python_version()).set(1)
        self._of_requests()
        self._of_decisions()
        self._of_prompts()
        self._of_waits()
        self._of_the_queue()
        self._of_background()
        self._of_workers()
        self._of_each_worker()
        self._of_redis()
        for model in models:
            self.expect(model)
        for where in ("same", "another"):
            self.retries.labels(where)

    def expect(self, model: str) -> None:
        """Create the samples of this pool, so that its counters begin at 0. model: its tag."""
        for metric in (
            *(self.stream_errors, self.prompt_tokens, self.matched_tokens, self.queued),
            *(self.decision_seconds, self.queue_seconds, self.held, self.held_seconds),
        ):
            metric.labels(model)
        for answer in ANSWERS:
            self.first_byte_seconds.labels(model, answer)
        for counter, reasons in ((self.queue_rejections, REJECTIONS), (self.fallback, FALLBACKS)):
            for reason in reasons:
                counter.labels(reason, model)

    def forget_pool(self, model: str) -> None:
        """Drop the gauges of a pool that has ended, and keep its counters. model: the pool's tag.

        Gauges that stayed at 0 would show a pool without workers.
        """
        for metric in vars(self).values():
            for family in metric.collect() if isinstance(metric, Gauge) else ():
                for sample in family.samples:
                    if sample.labels.get("model") == model:
                        metric.remove(*sample.labels.values())

    def _of_requests(self) -> None:
        self.requests = self._counter(
            "requests",
            "Requests that were answered (status `unseen`: the answer passes a picker by); `model` is empty where a "
            "request was refused before its model was known",
            "endpoint status reservation model",
        )
        self.in_flight = self._gauge("in_flight_requests", "Requests that are being served now")
        self.connections = self._gauge("connections", "Connections of clients that are open now")
        self.tls_certificate_expiry = self._gauge(
            "tls_certificate_expiry_timestamp_seconds", "Unix time at which the certificate in use ends; 0 without TLS"
        )
        self.body_bytes = self._gauge("body_bytes", "Request bodies that are held in memory now")
        self.connections_closed = self._counter(
            "closed_connections", "Connections that were closed for a fault or a limit, by reason (api.md)", "reason"
        )
        self.retries = self._counter(
            "retries", "Further tries: `same` worker after a stale connection, or `another` worker", "where"
        )
        self.stream_errors = self._counter("stream_errors", "Answers that were cut off after their first byte", "model")
        self.continued = self._counter(
            "continued_streams",
            "Streams that may be continued and broke off: `continued` at another worker, `unfit`, `budget`, `failed`",
            "result",
        )
        self.hedged = self._counter(
            "hedged_streams",
            "Streams without a first byte after `WARMFLEET_HEDGE_AFTER_S`: the second worker `won`, `lost`, was `none` "
            "(no room, or it failed), or the `budget` was empty",
            "result",
        )
        self.splits = self._counter(
            "split_requests",
            "Requests of pools with prefill and decode engines: `split` over two; decided for one because that was "
            "`cheaper`, the request or the policy is `unfit`, or the pool has `no_pair`; decided anew because the "
            "prefill engine `failed`, `refused` or was `late`, or the request turned out `unfit`",
            "result model",
        )
        self.log_lines_dropped = self._counter(
            "dropped_log_lines",
            "Log lines that were dropped because the log's reader is too slow or gone, or written in ASCII because "
            "their format cannot hold them",
        )
        self.given_up = self._counter("given_up_requests", "Requests ended here because their worker fell silent")
        self.time_limits = self._counter(
            "time_limits", "Requests ended by a time limit of the settings: `stream_idle`, `request_max`", "limit"
        )
        self.traces = self._counter(
            "traces",
            "Requests that were sampled: their spans were `exported`, `dropped` (too many waited), or `failed` (the "
            "collector did not take them)",
            "result",
        )

    def _of_decisions(self) -> None:
        self.decision_seconds = self._histogram(
            "decision_seconds", "Time that a request waited for its decision", "model"
        )
        self.decisions = self._counter(
            "decisions", "Decisions by policy and by the rule that decided (operate.md)", "policy why model"
        )
        self.decision_log = self._counter(
            "decision_log_records",
            "Records of the decision log: `written`, `dropped` (the disk is slow), `failed`",
            "result",
        )
        self.fallback = self._counter(
            "fallback_requests", "Requests that were placed without a decision of Redis", "reason model"
        )
        self.passed_over = self._counter(
            "passed_over_pools",
            "Requests for which a home pool was not asked, or could not serve: `away`, `late`, `empty`, `no_worker`",
            "reason model",
        )
        self.client_limits = self._counter(
            "limited_requests",
            "Requests refused by a limit of their key (`requests`, `tokens`), or placed without looking (`unchecked`)",
            "client result",
        )
        self.settled = self._counter("settled_reservations", "Reservations by how their request ended", "outcome")
        self.left = self._counter(
            "left_reservations",
            "Reservations that a picker left to their engines, which report the end (picker.md)",
        )
        self.settle_failures = self._counter(
            "settle_failures", "Settlements that Redis did not take; they are sent again, or the lease expires"
        )
        self.renewed = self._counter(
            "renewed_reservations",
            "Renewals of open reservations: `renewed`, `rebuilt` after a loss, `refused`",
            "result",
        )

    def _of_prompts(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of all decided requests", "model")
        self.matched_tokens = self._counter(
            "matched_tokens", "Prompt tokens that the chosen worker held already", "model"
        )
        self.cached_predictions = self._counter(
            "cached_predictions",
            "Answers of engines without the plugin that reported their cached tokens: as_predicted, more or fewer "
            "(then the knowledge of that engine was corrected)",
            "result",
        )
        self.identity = self._counter(
            "identified_requests",
            "Requests by how their prompt was identified: exact, engine, text, prefix, load",
            "kind model",
        )
        self.identified_tokens = self._counter(
            "identified_tokens",
            "Tokens of exact prompts: `known` from earlier prompts, or made anew (`new`)",
            "source model",
        )
        self.load_only = self._counter(
            "load_only_requests", "Requests that were placed by load alone, by reason (identity.md)", "reason model"
        )
        self.prefix_only = self._counter(
            "prefix_only_requests",
            "Requests of which only the text before an image or other part is known, by reason (identity.md)",
            "reason model",
        )
        self.image_counts = self._counter(
            "image_counts",
            "Answers that report their images' tokens: `as_predicted`, `more`, `fewer`, `other` (identity.md)",
            "result model",
        )
        self.image_reports = self._counter(
            "image_reports",
            "Reports of engines about images: `read`, `malformed`, `other` (an engine with other settings), or `wrong` "
            "(forgotten, as an answer counted other tokens)",
            "result model",
        )
        self.asked = self._counter(
            "asked_engines",
            "Engines asked for token ids: `answered`, `refused` (4xx), `failed`, `busy` (not asked)",
            "result",
        )
        self.template_limits = self._counter(
            "template_limits", "Renderings of unapproved templates that met a limit (security.md)", "limit"
        )
        self.template_processes = self._counter("template_processes", "Processes started for unapproved templates")
        self.handoff = self._counter(
            "handoff_requests", "Requests by whether their engine was sent token ids (identity.md)", "result"
        )

    def _of_waits(self) -> None:
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds",
            "Time from reading a request to the first byte of its answer: of a `stream` that is its first token; a "
            "`plain` answer, errors of engines included, comes whole",
            "model answer",
        )
        self.ttft_seconds = self._gauge(
            "ttft_seconds",
            "Percentile of the time to first byte of the last minute's streams; to join replicas, use the histogram",
            "model percentile",
        )
        self.objective_seconds = self._gauge(
            "ttft_objective_seconds", "Time to first token that decisions aim at now; 0 = none", "model"
        )

    def _of_the_queue(self) -> None:
        self.queued = self._gauge(
            "queued_requests",
            "Requests that wait in this replica, each until the worker that suits it has room",
            "model",
        )
        self.engine_wait_seconds = self._gauge(
            "engine_wait_seconds",
            "Prefill that engines get ahead before requests wait: `WARMFLEET_MAX_ENGINE_WAIT_S`, or more where "
            "requests need long to reach them or their steps take long",
            "model",
        )
        self.queue_seconds = self._histogram("queue_seconds", "Time that requests waited in the queue", "model")
        self.queue_rejections = self._counter(
            "queue_rejections",
            "Requests that the queue refused: `full`, `displaced`, `bytes`, `deadline`, and new `sessions` of agents",
            "reason model",
        )
        self.sessions = self._gauge(
            "sessions",
            "Sessions of agents while the caches are too small for all: `running` or `idle` with a place, `new` or "
            "`paused` without (held), `out` (neither). Every replica reads the same values: take the maximum, no sum",
            "state model",
        )
        self.held = self._gauge(
            "held_requests", "Requests that this replica holds until the caches have room for their session", "model"
        )
        self.held_seconds = self._histogram(
            "held_seconds", "Time that requests were held for their session", "model", _HELD_SECONDS
        )

    def _of_background(self) -> None:
        self.task_failures = self._counter("task_failures", "Rounds of background tasks that failed", "task")
        self.applied_blocks = self._counter("applied_blocks", "Block events that this replica applied to the index")
        self.audited_blocks = self._counter("audited_blocks", "Blocks of the index that this replica audited")
        self.audit_mismatches = self._counter("audit_mismatches", "Workers whose index an audit found to be wrong")
        self.health_checks = self._counter(
            "health_checks",
            "Servers asked for /health because heartbeats cannot be heard: `answered`, `silent`",
            "result",
        )
        self.vouched = self._counter(
            "vouched_workers",
            "Engines that answered though no heartbeat came: `vouched`, `renewed`, `refused` (worker-life.md)",
            "result",
        )
        self.view_age_seconds = self._gauge(
            "view_age_seconds", "Age of the last reading of the fleet, of the model that was read longest ago"
        )

    def _of_workers(self) -> None:
        """Make the metrics of this replica's findings about workers, and of its actions on them."""
        self.workers = self._gauge(
            "workers",
            "Workers by state, at the last reading: `proven` (or suspected), `identity` (load-only), `approximate`,"
            " `warming`, `draining`, `paused`, `ejected`, `misnamed`, `unheard`, `left`, `unroutable` (all others)",
            "state model",
        )
        self.probes = self._counter(
            "probes", "Probes by result: `proven`, `identity`, `url`, `none` (nothing was learned)", "result"
        )
        self.downgrades = self._counter(
            "downgrades", "Proven workers that are placed by load only from now on, by cause (identity.md)", "cause"
        )
        self.ejections = self._counter(
            "ejections",
            "Verdicts on workers: `ejected`, `readmitted`, `refused` (half are out), `same` (worker-life.md)",
            "result",
        )
        self.warmings = self._counter(
            "warmings",
            "Joining workers that were warmed: `done`, `slow`, `failed`, `refused`, `needed`, `lost` (operate.md)",
            "result",
        )
        self.warmed_tokens = self._counter("warmed_tokens", "Prompt tokens that joining workers were asked to compute")
        self.unreadable_records = self._gauge(
            "unreadable_records", "Records of workers and servers that are ignored because a field has a wrong type"
        )
        self.outvoted_workers = self._gauge(
            "outvoted_workers",
            "Workers unlike most of their model in `identity`, `scheme` or `images`; `unhashed`: with a fifth scheme",
            "what",
        )

    def _of_each_worker(self) -> None:
        """Make the metrics of each worker at the last reading. All replicas read equal values: query max, not sum.

        ``background/worker_gauges`` and ``background/index_health`` set them all anew, so that a worker that left does
        not stay.
        """

        def gauge(name: str, text: str, more: str = "") -> Gauge:
            return self._gauge(f"worker_{name}", text, f"model worker {more}")

        self.worker_info = gauge(
            "info",
            "1; labels: the worker's state by any of its names (worker-life.md), its last probe's result, its version",
            "state proof version",
        )
        self.worker_routable = gauge("routable", "1 if requests may go to the worker, else 0")
        self.worker_requests = gauge("in_flight_requests", "Requests of all replicas that the worker has")
        self.worker_prefill_tokens = gauge("prefill_tokens", "Prompt tokens booked there, with those of other clients")
        self.worker_decode_tokens = gauge("decode_tokens", "Answer tokens booked there, with those of other clients")
        self.worker_speed = gauge("prefill_tokens_per_second", "Measured speed of prefill; 0 while it is not known")
        self.worker_held_blocks = gauge("held_blocks", "Blocks that its cache holds")
        self.worker_cache_blocks = gauge("cache_blocks", "Blocks that its cache has room for; 0 if it does not say")
        self.worker_heartbeat_age = gauge("heartbeat_age_seconds", "Time since it was last heard, if it ever was")
        self.worker_lag_batches = gauge("apply_lag_batches", "Entries of its stream that nobody has applied")
        self.worker_lag_seconds = gauge("apply_lag_seconds", "Age of the oldest of these entries")

    def _of_redis(self) -> None:
        """Make the metrics of Redis and its index. Every replica reads the same values: take the maximum, no sum."""
        self.memory_used_ratio = self._gauge("memory_used_ratio", "Used share of Redis's memory limit; 0 without one")
        self.memory_short = self._gauge(
            "memory_short_models", "Models whose new blocks are not indexed: memory is short"
        )
        self.memory_used_bytes = self._gauge("memory_used_bytes", "Memory that Redis uses")
        self.apply_lag_batches = self._gauge(
            "apply_lag_batches", "Stream entries of a live worker that nobody has applied, of the worst worker"
        )
        self.apply_lag_seconds = self._gauge("apply_lag_seconds", "Age of the oldest entry that nobody has applied")
        self.digest_age_seconds = self._gauge(
            "digest_age_seconds", "Time since a live worker's digest was compared, of the worst worker; 5 is normal"
        )
        self.diverged_workers = self._gauge(
            "diverged_workers", "Live workers whose index is known to be wrong and who await a snapshot"
        )
        self.divergences = self._gauge("divergences", "Divergences of the present workers: `found`, `healed`", "state")
        self.resyncs = self._gauge(
            "resyncs", "Snapshots taken over since Redis was empty, by cause (lua/README.md)", "cause"
        )
        self.index_events = self._gauge(
            "index_events", "Counters of the index since Redis was empty (lua/README.md)", "kind"
        )
        self.index_entries = self._gauge("index_entries", "Pairs of a block and a worker in the index")
        self.retired_slots = self._gauge("retired_slots", "Slots whose entries are still to be collected")

    def render(self) -> bytes:
        """Return the text of all metrics."""
        return b"".join(self.families())

    def families(self) -> Iterator[bytes]:
        """Yield the text of all metrics, one after the other; with 1,000 workers all at once would take 0.1 s."""
        for family in self.registry.collect():
            yield generate_latest(_Families([family]))

    def forget_clients(self, names: Iterable[str]) -> None:
        """Drop the samples of clients that the file of keys does not name any more."""
        for name in names:
            for result in LIMIT_RESULTS:
                with suppress(KeyError):
                    self.client_limits.remove(name, result)

    def _counter(self, name: str, text: str, labels: str = "") -> Counter:
        """Make a metric. labels: names, separated by spaces, here and in the next two methods."""
        return Counter(f"warmfleet_{name}", text, labels.split(), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: str = "") -> Gauge:
        return Gauge(f"warmfleet_{name}", text, labels.split(), registry=self.registry)

    def _histogram(self, name: str, text: str, labels: str = "", buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"warmfleet_{name}", text, labels.split(), registry=self.registry, buckets=buckets)
