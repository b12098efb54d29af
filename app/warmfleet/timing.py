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
    #: Between two readings of the fleet's workers, and twice as long for a pool at rest: a reading that is 3 s old
    #: counts as an outage of Redis, and token hand-off uses none older than 5 s.
    view_interval_s: float = 1.0
    apply_interval_s: float = 0.05  # least gap between two steps; less than the plugin's flush of 0.1 s
    tick_within_s: float = 0.4  # longest gap, but at rest: a new worker is found within half a second
    clear_interval_s: float = 5.0  # for leases that have expired, which live 30 s
    truth_interval_s: float = 5.0  # for the index's figures in /metrics: the interval of heartbeats
    renew_interval_s: float = 10.0  # a reservation lives 30 s, so two renewals may fail
    #: Between checks of engines without the plugin, and of all engines during an outage. A passed check counts as the
    #: engine's heartbeat, so the interval is a third of the workers' TTL of 15 s.
    health_interval_s: float = 5.0
    files_interval_s: float = 1.0  # for changes of the clients' keys and of certificates
    pools_interval_s: float = 1.0  # for changes of the registry of pools
    #: Between two readings of a stock engine's /metrics, which cost the engine some 20 ms; also after a failure.
    facts_interval_s: float = 30.0
    limit_interval_s: float = 1.0  # for requests over a time limit
    hung_interval_s: float = 5.0  # for engines that keep requests waiting
    #: Between two probes of a proven worker by any replica. A probe lasts up to 30 s for its answers and 5 s for its
    #: blocks, and the next probe must not begin before its end.
    probe_interval_s: float = 600.0
    traces_interval_s: float = 1.0  # for spans that wait: no request wakes the thread

    # how long an engine may take
    connect_timeout_s: float = 2.0  # a live engine accepts within milliseconds; then another worker is tried
    #: For an engine's answer with token ids, besides a time for each byte: a longer wait costs more than a prefill.
    tokenize_timeout_s: float = 0.25
    #: An engine that owes a first byte for so long is asked for /health; a plain answer's may come much later.
    hung_after_s: float = 10.0
    hung_timeout_s: float = 5.0  # for the answer of /health
    check_timeout_s: float = 3.0  # for a check of a stock engine
    blocks_timeout_s: float = 5.0  # from a probe's answer until its blocks are reported: engines do so every 0.1 s

    # how long a client may take
    handshake_timeout_s: float = 10.0  # for TLS, two round trips: a slower client holds a connection for nothing
    header_timeout_s: float = 10.0  # headers fit into a packet or two: a slower client holds a connection for nothing
    body_timeout_s: float = 60.0  # the largest body at 4.5 Mbit/s; a slower client would hold memory for longer
    body_look_s: float = 10.0  # between two looks whether a body comes quickly enough
    write_timeout_s: float = 60.0  # a client that takes no byte of its answer for so long is gone, or means harm

    # how long until another try
    #: From a failed probe to the next; doubled after each further failure, from the first figure to the second.
    backoff_s: tuple[float, float] = (5.0, 60.0)
    #: From a probe to the probe of a worker suspected after it; doubled while suspicions prove wrong.
    suspected_s: tuple[float, float] = (5.0, 600.0)
    load_retry_s: float = 10.0  # until a token identity that could not be loaded is loaded again
    traces_retry_s: tuple[float, float] = (1.0, 3.0)  # the second and the third try to send a batch of spans

    # how long something stays as it is
    grace_s: float = WORKER_TTL_SECONDS  # until a silent worker counts as lost
    #: Added to ``grace_s`` for a worker that may move to another pool: meanwhile it is alive in neither pool, for
    #: ``ASK_SECONDS`` of the plugin's seat at most.
    parted_s: float = 15.0
    quiet_s: float = 3.0  # without a byte, until a request at a lost worker is given up
    identity_wait_s: float = 5.0  # a new worker's probe waits so long for its tokenizer, then tests the scheme only
    redis_retry_s: float = 1.0  # without a question to Redis after two failures in a row
    leave_s: float = 30.0  # a removed pool is kept so long: the life of a lease, in which a gateway may settle
    snapshot_s: float = 1.0  # all requests for the status within this time get one answer: workers are read as often
