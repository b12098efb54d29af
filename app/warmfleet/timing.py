"""The times by which a replica waits and repeats its work, where tests of a whole replica need others.

Operators cannot set these; ``settings`` has the times that they can. A time that no such test changes is a constant in
the module that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from warmfleet.protocol.wire import WORKER_TTL_SECONDS


@dataclass(frozen=True)
class Timing:
    """The times of a replica, which ``main`` passes to every part that waits."""

    # between two rounds of background work
    #: Time between two reads of a pool's workers from Redis, doubled for a pool without requests. If the last read is
    #: 3 s old, Redis counts as away; after 5 s engines get text in place of token ids.
    view_interval_s: float = 1.0
    apply_interval_s: float = 0.05  # least time between two steps that apply cache events; plugins send every 0.1 s
    tick_within_s: float = 0.4  # longest time between such steps while requests come, to find a new worker in 0.5 s
    clear_interval_s: float = 5.0  # time between two removals of expired leases, which live 30 s
    truth_interval_s: float = 5.0  # time between two reads of the index's figures for /metrics, as often as heartbeats
    renew_interval_s: float = 10.0  # time between two renewals of a reservation, which lives 30 s, so that two may fail
    #: Time between checks of engines without the plugin, and of all engines in an outage. A passed check counts as the
    #: engine's heartbeat, so the interval is a third of the workers' TTL of 15 s.
    health_interval_s: float = 5.0
    files_interval_s: float = 1.0  # time between two looks for changes of the clients' keys and of certificates
    pools_interval_s: float = 1.0  # time between two looks for changes of the registry of pools
    #: Time between two reads of the /metrics of an engine without the plugin; one read costs that engine some 20 ms.
    facts_interval_s: float = 30.0
    limit_interval_s: float = 1.0  # time between two looks for requests over a time limit
    hung_interval_s: float = 5.0  # time between two looks for engines that keep requests waiting
    #: Time between two probes (test prompts that prove its block hashes) of a proven worker, by any replica. The
    #: longest probe takes 35 s: 30 s for answers, 5 s for blocks.
    probe_interval_s: float = 600.0
    traces_interval_s: float = 1.0  # time between two sendings of spans by the exporter's thread

    # how long an engine may take
    connect_timeout_s: float = 2.0  # longest wait for a connection (usually milliseconds), then another worker is tried
    #: Longest wait for token ids from an engine, plus a time per byte of text; a longer wait costs more than a prefill.
    tokenize_timeout_s: float = 0.25
    #: Wait for a first byte after which the engine is asked for /health. The request goes on if the engine answers,
    #: because a plain answer, which comes whole, may take much longer.
    hung_after_s: float = 10.0
    hung_timeout_s: float = 5.0  # longest wait for an answer to /health
    check_timeout_s: float = 3.0  # longest wait for each answer in a check of an engine without the plugin
    blocks_timeout_s: float = 5.0  # longest wait after a probe's answer for events of its blocks, sent every 0.1 s

    # how long a client may take
    handshake_timeout_s: float = 10.0  # longest TLS handshake, two round trips; slower clients only occupy connections
    header_timeout_s: float = 10.0  # longest wait for headers, a packet or two; slower clients only occupy connections
    body_timeout_s: float = 60.0  # longest upload: the largest body at 4.5 Mbit/s; slower ones hold memory too long
    body_look_s: float = 10.0  # time between two checks whether a body comes quickly enough
    write_timeout_s: float = 60.0  # time in which a client must take a byte of its answer, or is disconnected

    # how long until another try
    #: Time from a failed probe to the next: the first value, doubled after each further failure up to the second value.
    backoff_s: tuple[float, float] = (5.0, 60.0)
    #: Least time from a worker's last probe to the next while the worker is suspected (an answer or cache event was not
    #: as expected): the first value, doubled for each probe in a row that disproved a suspicion, up to the second.
    suspected_s: tuple[float, float] = (5.0, 600.0)
    load_retry_s: float = 10.0  # time until a tokenizer that failed to load is loaded again
    traces_retry_s: tuple[float, float] = (1.0, 3.0)  # waits before the second and the third try to send spans

    # how long something stays as it is
    grace_s: float = WORKER_TTL_SECONDS  # time without a heartbeat after which a worker counts as lost
    #: Time added to ``grace_s`` for a worker that may be moving to another pool: meanwhile no pool gets its heartbeats,
    #: for at most 15 s (``ASK_SECONDS`` of the plugin's ``pool_assignment``).
    parted_s: float = 15.0
    quiet_s: float = 3.0  # time without a byte after which a request at a lost worker is given up
    identity_wait_s: float = 5.0  # longest wait of a first probe for the tokenizer; without, it tests only hashing
    redis_retry_s: float = 1.0  # time without any call to Redis after two failed calls in a row
    leave_s: float = 30.0  # time for which a removed pool is kept: gateways may settle its reservations (30 s)
    snapshot_s: float = 1.0  # longest use of one snapshot for all requests to /status.json
