"""Names of all metrics of a router, in one place. Labels are bounded: no worker, user or request in them.

``model`` is a tag of WARMFLEET_MODELS, of which there are few.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One set for one router process; ``render`` is what /metrics answers."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # not annotated there
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests", "endpoint", "status", "reservation")
        self.settled = self._counter("settled", "Reservations by how they ended", "outcome")
        self.settle_failures = self._counter("settle_failures", "Settles that Redis did not take; the lease expires")
        self.decide_seconds = self._histogram("decide_seconds", "One decision, as the router waits for it")
        self.decisions = self._counter("decisions", "Decisions by policy and by what decided", "policy", "why")
        self.decision_log = self._counter(
            "decision_log", "Records of the decision log, by what became of them", "result"
        )
        self._of_waits()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of decided requests")
        self.matched_tokens = self._counter("matched_tokens", "Of these, held by the chosen worker")
        self.identity = self._counter(
            "identity", "How prompts were identified: exact, engine, text, prefix, load", "kind"
        )
        self.identified_tokens = self._counter(
            "identified_tokens", "Tokens of exact prompts: known from earlier prompts, or made anew", "source"
        )
        self.load_only = self._counter("load_only", "Requests routed by load alone, by reason", "reason")
        self.asked = self._counter("asked_engines", "Engines asked for token ids, by result", "result")
        self.template_limits = self._counter(
            "template_limits", "Renders of unapproved templates cut off, by limit", "limit"
        )
        self.template_processes = self._counter("template_processes", "Processes started for unapproved templates")
        self.handoff = self._counter("handoff", "Requests by whether the engine was given token ids", "result")
        self.fallback = self._counter("fallback", "Requests routed without Redis, by reason", "reason")
        self.retries = self._counter("retries", "Second tries: same worker (stale connection) or another", "where")
        self.stream_errors = self._counter("stream_errors", "Answers cut off after their first byte")
        self.given_up = self._counter("given_up", "Waits for a worker that fell silent, ended here")
        self.health_checks = self._counter("health_checks", "Servers asked while heartbeats tell nothing", "result")
        self.queued = self._gauge("queued", "Requests that wait here for a worker with room", "model")
        self.queue_seconds = self._histogram("queue_seconds", "Waits for a worker with room, whatever came of them")
        self.queue_rejected = self._counter("queue_rejected", "Requests refused by the queue, by reason", "reason")
        self.in_flight = self._gauge("in_flight", "Requests being served")
        self.task_failures = self._counter("task_failures", "Background rounds that failed", "task")
        self.applied_blocks = self._counter("applied_blocks", "Block events that this replica applied")
        self.audited_blocks = self._counter("audited_blocks", "Blocks of the index that this replica audited")
        self.audit_mismatches = self._counter("audit_mismatches", "Workers whose index differed from its digest")
        self._of_redis()
        self.renewed = self._counter("renewed", "Reservations renewed, rebuilt after a loss, refused", "result")
        self.view_age_seconds = self._gauge("view_age_seconds", "Age of the last reading of the fleet, oldest model")
        self._of_workers()

    def _of_waits(self) -> None:
        """How long clients wait for their first byte."""
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds", "Request read to first byte of the answer", "model"
        )
        self.ttft_seconds = self._gauge(
            "ttft_seconds", "Of streamed answers of the last minute: request read to first byte", "model", "quantile"
        )
        self.objective_seconds = self._gauge(
            "ttft_objective_seconds", "Time to first token aimed at; 0 = none", "model"
        )

    def _of_workers(self) -> None:
        """What this replica found out about them, and what it did."""
        self.probes = self._counter("probes", "Probes by result", "result")
        self.downgrades = self._counter("downgrades", "Proven workers that are routed by load only now", "cause")
        self.warmings = self._counter(
            "warmings", "Joining workers that were given common prefixes, by result", "result"
        )
        self.warmed_tokens = self._counter("warmed_tokens", "Prompt tokens that these were asked for")
        self.workers = self._gauge("workers", "Workers by state, at the last reading", "state")
        self.unreadable_records = self._gauge(
            "unreadable_records", "Records of workers and servers that are left out: they are none"
        )
        self.outvoted_workers = self._gauge("outvoted_workers", "Workers that differ from most of their model", "what")

    def _of_redis(self) -> None:
        """Of Redis and the index in it, as one replica reads them: the same on all."""
        self.memory_used_ratio = self._gauge("memory_used_ratio", "Used share of Redis's memory limit; 0 without one")
        self.memory_short = self._gauge("memory_short", "Models whose new blocks are not indexed: memory is short")
        self.memory_used_bytes = self._gauge("memory_used_bytes", "Memory that Redis uses")
        self.apply_lag_batches = self._gauge("apply_lag_batches", "Entries that nobody applied, of the worst worker")
        self.apply_lag_seconds = self._gauge("apply_lag_seconds", "Age of the oldest entry that nobody applied")
        self.digest_age_seconds = self._gauge("digest_age_seconds", "Since a digest was compared, of the worst worker")
        self.diverged_workers = self._gauge("diverged_workers", "Workers whose index differs and awaits a snapshot")
        self.divergences = self._gauge("divergences", "Divergences of the present workers: found, healed", "state")
        self.resyncs = self._gauge("resyncs", "Snapshots taken over, of the whole fleet, by cause", "cause")
        self.index_events = self._gauge("index_events", "Counters of lua/README.md, of the whole fleet", "kind")
        self.index_entries = self._gauge("index_entries", "(block, worker) pairs in the index")
        self.retired_slots = self._gauge("retired_slots", "Slots whose entries are being collected")

    def render(self) -> bytes:
        """The text of all metrics."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warmfleet_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"warmfleet_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"warmfleet_{name}", text, labels, registry=self.registry, buckets=_SECONDS)
