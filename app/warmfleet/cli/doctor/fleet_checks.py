"""Checks of a pool's workers in Redis: missing cores, states, hash schemes, identities, and errors of the index."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from warmfleet.background import announced
from warmfleet.background.worker_words import CAUSES, REMEDIES, remedy, why
from warmfleet.cli.doctor.finding import Finding, fault, note, ok
from warmfleet.cli.terminal.output import in_short
from warmfleet.fleet import Flag, WorkerState
from warmfleet.fleet.worker.state import heard
from warmfleet.pools.capabilities import token_capabilities
from warmfleet.pools.pairing import BY_POLICY, CONFIG, SPLIT, Obstacle, pairing, splits_of, use_of_pairs
from warmfleet.protocol.pools import served_model
from warmfleet.protocol.wire import UNMATCHED, Scheme, WireError, default_none_hash
from warmfleet.settings import without_userinfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import Truth, WorkerView
    from warmfleet.fleet.inspection.server import Streams
    from warmfleet.pools.pairing import Pairing

UNREAD_S = 5.0  # longest time in which no replica reads the streams of cache events; each reads once a second or more
LATE_S = 5.0  # age of an unapplied stream entry that is a fault; usually 0.5 s at most, 2 s in a pool at rest
LONG_LEASE_S = 60
GAP_S = 0.1  # longest time without a token of an answer that is no note; readers notice more
EITHER = f'"kv_role": "kv_both" in {CONFIG}'
SEEDS = 1_024  # number of values of PYTHONHASHSEED (0, 1, ...) that are recognised

PLUGIN_HELP = "see vLLM's log; models that vLLM renders without a template have none"
BRIDGE_HELP = (
    "see the log of `warmfleet bridge`: it names what it could not load; give it --tokenizer FOLDER, or set"
    " WARMFLEET_TOKENIZER at the routers"
)
JOIN_HELP = "look for lines with `warmfleet:` in vLLM's log, and compare WARMFLEET_REDIS_URL and WARMFLEET_MODEL"
#: States that make a note and no fault: the worker serves, will soon serve, or is out of use by the operator's will.
HARMLESS = (WorkerState.DRAINING, WorkerState.PAUSED, WorkerState.WARMING, WorkerState.PENDING, WorkerState.SUSPECTED)


@dataclass(frozen=True, slots=True)
class PoolReading:
    """A pool as read from Redis. others: names of this Redis's other models, if known. drained: by the operator.

    moved: workers and servers that are alive in another pool, or on their way to one: name -> that pool.
    beside: other pools of the model, which have engines.
    configured: WARMFLEET_MODEL of this pool's engines: the model's name if a registry has the pool, else the tag.
    policy: in force at a router. handoff: WARMFLEET_TOKEN_HANDOFF.
    """

    tag: str
    workers: Sequence[WorkerView]
    truth: Truth
    streams: Streams
    others: Sequence[str] = ()
    drained: bool = False
    moved: Mapping[str, str] = field(default_factory=dict)
    beside: Sequence[str] = ()
    configured: str = ""
    policy: str = "cost"
    handoff: bool = True

    @property
    def name(self) -> str:
        return self.configured or self.tag


def all_of(pool: PoolReading) -> list[Finding]:
    findings = [applied(pool.streams, pool.tag, pool.name)]
    findings += _missing_cores(pool)
    gone = {worker.worker_id: to for worker in pool.workers if not worker.state.alive and (to := _place(worker, pool))}
    here = [worker for worker in pool.workers if worker.worker_id not in gone]
    if gone:
        where = " or ".join(dict.fromkeys(gone.values()))
        findings.append(ok("moved", f"{in_short(list(gone))} moved to {where}, or will be there within a minute"))
    left = [worker.worker_id for worker in here if worker.state is WorkerState.LEFT]
    here = [worker for worker in here if worker.worker_id not in left]
    if gone and not here and not any(served_model(to) == served_model(pool.tag) for to in gone.values()):
        findings.append(fault("workers", f"no engine of {pool.tag} is left", "start one that serves this name"))
    elif not here and not findings[1:] and not pool.drained:
        findings.append(_no_engine(pool, left))
    elif left:
        findings.append(ok("left", f"{in_short(left)} said goodbye"))
    findings += [worker_finding(worker, pool.tag) for worker in here]
    exact = [worker for worker in here if not worker.approximate]
    takes_ids = token_capabilities(announced.Grouping().by_identity([worker for worker in exact if worker.heard]))
    able = splits_of(pairing(exact), takes_ids) is not None
    use = use_of_pairs(pairing(exact), able=able, handoff=pool.handoff, policy=pool.policy)
    paired = pairs(exact, use, pool.tag) + full_steps(exact, use)
    findings += schemes(exact) + identities(exact) + shared_urls(exact) + paired
    findings += [finding for worker in exact for finding in index(worker, pool.truth)]
    return [*findings, *dropped(pool.truth)]


def _place(worker: WorkerView, pool: PoolReading) -> str:
    """Return the pool that a worker has moved to; empty if it has not moved."""
    return pool.moved.get(worker.worker_id) or pool.moved.get(str(worker.record.get("server_id", "")), "")


def applied(streams: Streams, tag: str, configured: str) -> Finding:
    """Check that a router applies the pool's cache events to the index. configured: engines' WARMFLEET_MODEL."""
    if streams.ticked_s is not None and streams.ticked_s <= UNREAD_S:
        return ok("routers", "a router applies the workers' streams")
    since = "ever since this Redis is empty" if streams.ticked_s is None else f"for {streams.ticked_s:.0f} s"
    waiting = f"; {len(streams.waiting)} streams wait unread" if streams.waiting else ""
    return fault(
        "routers",
        f"no router has looked at the streams of {tag} {since}: no worker can join, and the index stands"
        f" still{waiting}",
        f"start one with WARMFLEET_MODELS={configured} and this Redis: warmfleet serve",
    )


def _no_engine(pool: PoolReading, left: Sequence[str]) -> Finding:
    """Make the finding about a pool without engines. left: the workers that ended in an orderly manner."""
    if pool.beside:
        return note(
            "workers",
            f"no engine has joined {pool.tag}, while {in_short(pool.beside)} have some: its prompts go there",
            f"start engines: with WARMFLEET_MODEL={pool.name} they join the pool with the least capacity; or send"
            f" those of another pool: warmfleet pools drain {pool.beside[0]} --move (app/docs/pools.md)",
        )
    if left:
        return fault("workers", f"no engine of {pool.tag} is left: {in_short(left)} said goodbye", "start an engine")
    others = sorted(pool.others, key=lambda name: SequenceMatcher(None, name, pool.tag).ratio(), reverse=True)
    meant = f"if one of {in_short(others)} is meant, which this Redis has: --model NAME; else " if others else ""
    return fault(
        "workers",
        f"no engine has joined {pool.tag}",
        f"{meant}install the plugin beside vLLM, set WARMFLEET_REDIS_URL there to this Redis and"
        f" WARMFLEET_MODEL={pool.name}; {JOIN_HELP}; if VLLM_PLUGINS is set, add `warmfleet` to it",
    )


def _missing_cores(pool: PoolReading) -> list[Finding]:
    known = {str(worker.record.get("server_id", "")) for worker in pool.workers}
    return [
        fault(
            "halves",
            f"the API server {server} has joined, its engine core has not: nothing can be sent there",
            f"{JOIN_HELP} of the engine core's process; the plugin says there why it reports nothing",
        )
        for server in sorted(pool.streams.servers - known - pool.moved.keys())
    ]


# ---------------------------------------------------------------- a worker


def worker_finding(worker: WorkerView, tag: str) -> Finding:
    """Make the finding about a worker's state, with the reason if the worker gets no requests, and the remedy."""
    name, state = worker.worker_id, worker.state
    version = f", version {worker.record['version']}" if worker.record.get("version") else ""
    if state in (WorkerState.PROVEN, WorkerState.APPROXIMATE):
        return ok("worker", f"{name} is {state} at {shown(worker.url)}{version}")
    if state is WorkerState.JOINING:
        return _half(worker)
    if state is WorkerState.PENDING and not heard(worker.heartbeat_age_s):  # a silent worker is not probed
        text = f"{name} is {state}{_ago(worker.heartbeat_age_s)}"
        return fault("worker", text, REMEDIES[WorkerState.UNHEARD])
    make = note if state in HARMLESS and not (state is WorkerState.PENDING and worker.record.get("reason")) else fault
    return make("worker", f"{name} is {state}: {why(worker, tag)}", remedy(worker, tag))


def _half(worker: WorkerView) -> Finding:
    server = str(worker.record.get("server_id", ""))
    if worker.server is None:
        text = f"the engine core {worker.worker_id} has joined, its API server {server} has not: it gets no requests"
    else:
        text = f"{worker.worker_id}: its API server {server} is not heard any more{_ago(worker.server_age_s)}"
    return fault("halves", text, REMEDIES[WorkerState.JOINING])


def _ago(age_s: float | None) -> str:
    return "" if age_s is None else f", last heard {age_s:.0f} s ago"


def shown(url: str) -> str:
    """Return the URL without user and password."""
    return without_userinfo(url) or "no URL"


# ---------------------------------------------------------------- schemes and seeds


def schemes(workers: Sequence[WorkerView]) -> list[Finding]:
    """Check that all workers have one hash scheme, and seeds that stay the same after a restart."""
    groups: dict[Scheme, list[str]] = {}
    findings: list[Finding] = []
    for worker in workers:
        try:
            groups.setdefault(Scheme.from_dict(worker.record["scheme"]), []).append(worker.worker_id)
        except (WireError, KeyError, TypeError) as error:
            text = f"routers cannot compute the block hashes of {worker.worker_id}: {error}"
            keeps_none = (worker.record.get("scheme") or {}).get("algorithm") in UNMATCHED
            findings.append(fault("scheme", text, CAUSES["unmatched" if keeps_none else "scheme"]))
    if len(groups) == 1:
        (scheme,) = groups
        findings.append(ok("scheme", f"{_in_words(scheme)}, {seed_of(scheme) or 'a seed that is not known here'}"))
    elif groups:
        findings.append(_differing(groups))
    unknown = [name for scheme, names in groups.items() if not seed_of(scheme) for name in names]
    if unknown:
        findings.append(_random_seed(unknown, several=len(groups) > 1))
    return findings


def _differing(groups: dict[Scheme, list[str]]) -> Finding:
    ways = "; ".join(
        f"{_in_words(scheme)}, {seed_of(scheme) or 'unknown seed'}: {in_short(names)}"
        for scheme, names in groups.items()
    )
    return fault(
        "schemes",
        f"workers hash blocks in {len(groups)} ways, and each prompt is hashed in every one of them, up to 4: {ways}",
        "start all engines with the same --prefix-caching-hash-algo (sha256_cbor), --block-size, PYTHONHASHSEED and"
        " version of vLLM",
    )


def _random_seed(names: list[str], *, several: bool) -> Finding:
    text = (
        f"{in_short(names)}: the hash seed is random (vLLM 0.28, or xxhash, without PYTHONHASHSEED) or one of your own"
    )
    remedy = "set PYTHONHASHSEED=0 for every engine of this model, the same in all its processes"
    if several:
        return fault("seed", f"{text}; engines with different seeds have no block hash in common", remedy)
    return note("seed", f"{text}; if it is random, each restart makes a scheme of its own", remedy)


def seed_of(scheme: Scheme) -> str:
    """Return the origin of the hash seed as a text; empty if the seed is not recognised."""
    if scheme.none_hash == default_none_hash(scheme.algorithm) and not scheme.algorithm.startswith("xxhash"):
        return "vLLM's own seed"
    if scheme.algorithm.startswith("xxhash"):
        return ""
    for seed in map(str, range(SEEDS)):
        if scheme.none_hash == default_none_hash(scheme.algorithm, seed):
            return f"PYTHONHASHSEED={seed}"
    return ""


def _in_words(scheme: Scheme) -> str:
    return f"{scheme.algorithm}, blocks of {scheme.block_tokens} tokens, {scheme.extra_keys} keys"


# ---------------------------------------------------------------- identities and addresses


def identities(workers: Sequence[WorkerView]) -> list[Finding]:
    """Check that all workers announce the same tokenizer, template and facts."""
    groups = announced.Grouping().by_identity([worker for worker in workers if worker.heard])
    nothing = [worker for worker in workers if worker.server and not worker.server.get("artifacts")]
    behind = [worker.worker_id for worker in nothing if bridged(worker)]
    beside = [worker.worker_id for worker in nothing if not bridged(worker)]
    findings = []
    lacking = "announce no tokenizer and no chat template: prompts are placed by load, or an engine is asked"
    for names, help_text in ((behind, BRIDGE_HELP), (beside, PLUGIN_HELP)):
        if names:
            findings.append(note("identity", f"{in_short(names)} {lacking}", help_text))
    if len(groups) == 1:
        ((key, same),) = groups.items()
        findings.append(ok("identity", f"announced by {len(same)}: {announced.in_words(key, same)}"))
    for other in list(groups.values())[1:]:
        first = next(iter(groups.values()))[0]
        differing = announced.listed(announced.differences(other[0], first))
        strangers = in_short([worker.worker_id for worker in other])
        text = f"{strangers} announce other files or facts than {first.worker_id}: {differing}"
        findings.append(fault("identity", text, CAUSES["differs"]))
    return findings


def bridged(worker: WorkerView) -> bool:
    """Tell whether a bridge reports this worker, whose engine then has no plugin, and logs no lines of a plugin."""
    return ((worker.server or {}).get("facts") or {}).get("reports_prefills") is False


def shared_urls(workers: Sequence[WorkerView]) -> list[Finding]:
    """Find servers that announce the same URL, so that requests for one may reach the other."""
    of_url: dict[str, set[str]] = {}
    for worker in workers:
        if worker.heard and worker.url:
            of_url.setdefault(worker.url.rstrip("/"), set()).add(str(worker.record.get("server_id")))
    return [
        fault(
            "address",
            f"{in_short(sorted(servers))} announce the same address {shown(url)}: requests for one reach the other",
            "set WARMFLEET_WORKER_URL of each engine to its own address, or stop the process that was left over",
        )
        for url, servers in of_url.items()
        if len(servers) > 1
    ]


# ---------------------------------------------------------------- prefill and decode


def pairs(workers: Sequence[WorkerView], use: str = SPLIT, tag: str = "") -> list[Finding]:
    """Tell which engines could prefill for which, and note why others could not; no finding without engines' roles.

    use: what ``use_of_pairs`` tells. tag: of the pool.
    """
    found, findings = pairing(workers), []
    if found.pairs:
        prefill, decode = (sorted({pair[end] for pair in found.pairs}) for end in (0, 1))
        text = f"{in_short(prefill)} can prefill for {in_short(decode)} ({len(found.pairs)} pairs); {use}"
        findings.append(ok("pairs", text))
    if use == SPLIT:
        findings += _few_decode_engines(found) + _long_leases(workers, found)
    if use == BY_POLICY and (idle := found.having("prefill")):
        text = f"no request goes to {in_short(idle)}: only the policy cost splits requests"
        how = f"warmfleet policy cost --model {tag}, or WARMFLEET_POLICY=cost; or give them {EITHER}"
        findings.append(note("pairs", text, how))
    reasons: dict[Obstacle, list[tuple[str, str]]] = {}
    for pair, obstacles in found.refused.items():
        for obstacle in obstacles:
            reasons.setdefault(obstacle, []).append(pair)
    for obstacle, refused in reasons.items():
        prefill, decode = (sorted({pair[end] for pair in refused}) for end in (0, 1))
        text = f"{in_short(prefill)} cannot prefill for {in_short(decode)}: {obstacle.why}"
        findings.append(note("pairs", text, obstacle.remedy))
    alone: dict[Obstacle, list[str]] = {}
    for worker_id, obstacle in (*found.lonely.items(), *found.unable.items()):
        alone.setdefault(obstacle, []).append(worker_id)
    for obstacle, names in alone.items():
        text = f"{in_short(names)} could share no request: {obstacle.why}; each request is served by one engine alone"
        findings.append(note("pairs", text, obstacle.remedy))
    return findings


def _few_decode_engines(found: Pairing) -> list[Finding]:
    """Note that there are fewer decode engines than prefill engines, which serve nothing alone."""
    prefill, decode = found.having("prefill"), found.having("decode", "both")
    if not found.splitting or len(decode) >= len(prefill):
        return []
    return [
        note(
            "pairs",
            f"decode engines are fewer ({len(decode)}) than prefill engines ({len(prefill)}), which serve nothing"
            " alone, so few caches must hold the contexts of all answers: in simulation most answers are late from"
            " .7 busy at 6 and 2 engines, about half from .85 at 5 and 3",
            f"give prefill engines {EITHER}, or start decode engines",
        )
    ]


def _long_leases(workers: Sequence[WorkerView], found: Pairing) -> list[Finding]:
    """Note prefill engines that keep blocks which nobody takes for much longer than routers count them."""
    giving = {prefill for prefill, _ in found.splitting}
    told = [(one.worker_id, one.transfer) for one in workers if one.worker_id in giving]
    names = [worker_id for worker_id, transfer in told if transfer and transfer.lease_s > LONG_LEASE_S]
    if not names:
        return []
    return [
        note(
            "pairs",
            f"blocks of requests whose clients leave stay with {in_short(names)} for more than {LONG_LEASE_S} s",
            f"set VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (NIXL: kv_lease_duration) to {LONG_LEASE_S}",
        )
    ]


def full_steps(workers: Sequence[WorkerView], use: str = SPLIT) -> list[Finding]:
    """Tell the gap that a step full of prompts makes in answers, at engines that serve prompts and answers alone.

    use: what ``use_of_pairs`` tells. Silent for engines that do not announce the most tokens of a step, or whose speed
    is not known yet.
    """
    splitting = {worker_id for pair in pairing(workers).splitting for worker_id in pair} if use == SPLIT else set()
    gaps: dict[int, dict[str, float]] = {}
    for worker in workers:
        tokens, speed_tps = worker.record.get("step_tokens", 0), worker.load.speed_tps
        if tokens and speed_tps and worker.routable and worker.worker_id not in splitting:
            gaps.setdefault(tokens, {})[worker.worker_id] = tokens / speed_tps
    return [_full_step(tokens, gap_s) for tokens, gap_s in gaps.items()]


def _full_step(tokens: int, gap_s: Mapping[str, float]) -> Finding:
    """Make the finding about engines with the same most tokens of a step. gap_s: its duration, by engine."""
    longest_s = max(gap_s.values())
    text = (
        f"{in_short(list(gap_s))}: a step with {tokens:,} tokens of prompts takes about {1_000 * longest_s:.0f} ms, in"
        " which no running answer goes on"
    )
    if longest_s <= GAP_S:
        return ok("gap", text)
    remedy = "a smaller --max-num-batched-tokens shortens this gap, for a longer time to first token of long prompts"
    return note("gap", text, remedy)


# ---------------------------------------------------------------- the index


def index(worker: WorkerView, truth: Truth) -> list[Finding]:
    """Check whether a worker's index lags, differs or lacks blocks; no finding if all is well."""
    found, name = [], worker.worker_id
    state = truth.workers.get(name)
    if state is not None and state.lag_s > LATE_S:
        text = f"{name}: {state.lag_batches} entries of its stream wait, the oldest for {state.lag_s:.0f} s"
        advice = "see the CPU of Redis, and whether routers run: applying takes 30 % of Redis at most"
        found.append(fault("lag", text, advice))
    if state is not None and state.diverged:
        mended = f"{state.healed} of {state.found} are mended"
        text = f"{name}: its index differs from the engine's table ({state.cause}); {mended}"
        found.append(note("digest", text, "wait for the snapshot; if a cause keeps rising, see lua/README.md, Truth"))
    if worker.load.flags & Flag.PARTIAL:
        text = f"{name}: Redis was short of memory, so some of its blocks are not indexed"
        found.append(fault("partial", text, "raise maxmemory of Redis; the engine then sends its blocks again"))
    return found


def dropped(truth: Truth) -> list[Finding]:
    """Note stream entries by another process than the worker's present one: a restart, or two engines of one name."""
    count = truth.counts.get("nonce", 0)
    if not count:
        return []
    text = f"{count} entries came from other processes than the ones that had joined last under the same names"
    remedy = "if no engine was restarted, two of them have the same WARMFLEET_WORKER_ID: give each one of its own"
    return [note("names", text, remedy)]


def fights(before: Sequence[WorkerView], after: Sequence[WorkerView]) -> list[Finding]:
    """Find workers that joined anew between two readings: engines fight over a name, or crash again and again."""
    nonces = {worker.worker_id: worker.record.get("nonce") for worker in before}
    remedy = (
        "if the engine was not restarted just now: two engines have this WARMFLEET_WORKER_ID, or it crashes in a loop"
    )
    return [
        fault("names", f"{worker.worker_id} joined anew while this was checked", remedy)
        for worker in after
        if worker.worker_id in nonces and nonces[worker.worker_id] != worker.record.get("nonce")
    ]
