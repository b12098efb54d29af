"""Pairs prefill engines of a pool with the decode engines for which they could compute prompts; why others do not pair.

Engines announce their roles and settings (``protocol/transfer``). Only engines with equal settings pair, because the
handshake of others fails. Whether two engines pair depends on nothing but these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from warmfleet.protocol.transfer import NIXL_HASH, OF_A_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from warmfleet.fleet import WorkerView
    from warmfleet.pools.capabilities import TokenCapability
    from warmfleet.protocol.transfer import Transfer

CONFIG = "--kv-transfer-config"
#: Role -> the role of its partners, and vLLM's word for that.
OTHERS = {"prefill": ("decode", "kv_consumer"), "decode": ("prefill", "kv_producer")}
#: What routers do with the pairs.
SPLIT = "requests may be split over them"
NOT_SPLIT = (
    "requests are not split over them: only over NIXL that pulls, and over Mooncake of vLLM 0.32 and newer "
    "without sliding windows"
)
BY_POLICY = "requests are not split over them: only the policy cost does that"
WITHOUT_IDS = "requests are not split over them: their engines take no token ids from routers"
HANDOFF_OFF = "requests are not split over them: WARMFLEET_TOKEN_HANDOFF=0 keeps token ids from engines"
NO_PAIRS = "each engine serves alone"
#: Least lease of a prefill engine, in seconds. Nothing extends it before a pair's first handshake, which may take 9 s.
#: With NIXL, a decode engine that reads blocks after the lease gets those of another prompt, and does not notice.
LEAST_LEASE_S = 20
#: The setting of the lease, and its default in seconds, by library.
LEASES = {
    "NIXL": ("kv_lease_duration", f"in kv_connector_extra_config of {CONFIG}", 30),
    "Mooncake": ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "in its environment", 480),
}
#: What the address is called at which partners ask for memory, and what to do about a local one, by library.
SIDE_CHANNELS = {
    "NIXL": (
        "side channel",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST of the prefill engine to its own address; in Kubernetes to its pod's IP",
    ),
    "Mooncake": (
        "bootstrap server",
        f"leave bootstrap_server_address out of {CONFIG}, so that the prefill engine starts a server of its own",
    ),
}


class Obstacle(NamedTuple):
    """Why engines do not pair, and what to do about it."""

    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """The result. pairs, refused: by prefill engine and decode engine; each two engines that could pair are in one.

    splitting: those of ``pairs`` over which routers can split requests. roles: by worker id, of the engines that can
    hand over requests. unable: engines with a role that they cannot have.
    """

    roles: Mapping[str, str]
    pairs: frozenset[tuple[str, str]]
    refused: Mapping[tuple[str, str], tuple[Obstacle, ...]]
    unable: Mapping[str, Obstacle]
    splitting: frozenset[tuple[str, str]] = frozenset()

    def having(self, *roles: str) -> list[str]:
        """List the engines that have one of these roles."""
        return [worker_id for worker_id, role in self.roles.items() if role in roles]

    @property
    def lonely(self) -> dict[str, Obstacle]:
        """The engines for which the pool has no engine of the other role, whatever its settings."""
        return {
            worker_id: Obstacle(
                f"no {other} engine of its pool takes requests",
                f'start one with "kv_role": "{word}" in {CONFIG}, in the same pool (WARMFLEET_MODEL)',
            )
            for role, (other, word) in OTHERS.items()
            if not self.having(other, "both")
            for worker_id in self.having(role)
        }


class Splits(NamedTuple):
    """How requests may be split: over these pairs, and on endpoints on which each of their engines takes token ids.

    Both engines must compute the same ids: if the decode engine's prompt is longer, it dies, and if it is another one,
    its answer is wrong.
    """

    pairs: frozenset[tuple[str, str]]
    endpoints: frozenset[str]


def splits_of(found: Pairing, takes_ids: Mapping[str, TokenCapability]) -> Splits | None:
    """Return how requests may be split over the pairs; None if no pair can. takes_ids: by worker id."""
    able = {
        pair: takes_ids[pair[0]].endpoints & takes_ids[pair[1]].endpoints
        for pair in found.splitting
        if all(worker_id in takes_ids for worker_id in pair)
        and takes_ids[pair[0]].identity_key == takes_ids[pair[1]].identity_key
    }
    pairs = frozenset(pair for pair, endpoints in able.items() if endpoints)
    return Splits(pairs, frozenset.intersection(*(able[pair] for pair in pairs))) if pairs else None


def pairing(workers: Iterable[WorkerView]) -> Pairing:
    """Pair the workers of one pool. Workers that take no requests now, or have no KV connector, count for nothing."""
    ready = [(worker, transfer) for worker in workers if worker.routable and (transfer := worker.transfer)]
    prefill = [(worker, transfer) for worker, transfer in ready if transfer.prefills]
    decode = [(worker, transfer) for worker, transfer in ready if transfer.decodes]
    pairs: set[tuple[str, str]] = set()
    splitting: set[tuple[str, str]] = set()
    refused: dict[tuple[str, str], tuple[Obstacle, ...]] = {}
    for one, ours in prefill:
        for other, theirs in decode:
            if one is other:
                continue
            obstacles = tuple(_obstacles(ours, theirs, together=_host(one) == _host(other)))
            if obstacles:
                refused[one.worker_id, other.worker_id] = obstacles
                continue
            pairs.add((one.worker_id, other.worker_id))
            if ours.splits:
                splitting.add((one.worker_id, other.worker_id))
    return Pairing(
        {worker.worker_id: transfer.role for worker, transfer in ready if transfer.library},
        frozenset(pairs),
        refused,
        {
            worker.worker_id: Obstacle(
                f"{transfer.connector} hands no request from engine to engine", "use NixlConnector or MooncakeConnector"
            )
            for worker, transfer in ready
            if not transfer.library and transfer.role != "both"
        },
        frozenset(splitting),
    )


def _obstacles(prefill: Transfer, decode: Transfer, *, together: bool) -> Iterator[Obstacle]:
    """Yield why the decode engine cannot take what the prefill engine computes. together: they are on one machine."""
    if prefill.same != decode.same:
        yield from _differences(dict(prefill.same), dict(decode.same))
    if not decode.recomputes:
        yield Obstacle(
            "kv_load_failure_policy of the decode engine is fail: a failed transfer would fail its request",
            f'start the decode engine with "kv_load_failure_policy": "recompute" in {CONFIG}',
        )
    if prefill.library in SIDE_CHANNELS and prefill.is_local and not together:
        channel, remedy = SIDE_CHANNELS[prefill.library]
        yield Obstacle(
            f"the prefill engine's {channel} is at {prefill.host}, which the decode engine's machine cannot reach",
            remedy,
        )
    if prefill.library in LEASES and prefill.lease_s < LEAST_LEASE_S:
        name, where, default = LEASES[prefill.library]
        yield Obstacle(
            f"{name} of the prefill engine is {prefill.lease_s} s: blocks may be gone before they are read",
            f"set it to {LEAST_LEASE_S} or more {where}; vLLM's default is {default}",
        )
    if prefill.has_fixed_id or decode.has_fixed_id:
        whose = "prefill" if prefill.has_fixed_id else "decode"
        yield Obstacle(
            f"engine_id of the {whose} engine is set: its partners would take it for the same engine after a restart",
            f"take engine_id out of {CONFIG}: vLLM draws a new one at each start",
        )


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the settings that differ: of different versions only that, and NIXL's hash only if nothing explains it."""
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    named = [name for name in differing if name != NIXL_HASH] or differing
    for name in [name for name in OF_A_VERSION if name in named][:1] or named:
        here, there = ours.get(name, "not told"), theirs.get(name, "not told")
        upgrade = "upgrade one: engines of one version pair"
        yield Obstacle(
            f"{name}: {here} at the prefill engine, {there} at the decode engine",
            upgrade if name in OF_A_VERSION else f"start both with the same {name}",
        )


def _host(worker: WorkerView) -> str:
    try:
        return urlsplit(worker.url).hostname or ""
    except ValueError:
        return worker.url


def use_of_pairs(found: Pairing, *, able: bool = True, handoff: bool = True, policy: str = "cost") -> str:
    """Tell what routers do with the pairs. able: some pair takes token ids. handoff: setting. policy: in force."""
    if not found.pairs:
        return NO_PAIRS
    if not found.splitting:
        return NOT_SPLIT
    if not handoff:
        return HANDOFF_OFF
    return WITHOUT_IDS if not able else SPLIT if policy == "cost" else BY_POLICY


def pairs_in_words(
    found: Pairing, *, able: bool = True, handoff: bool = True, policy: str = "cost"
) -> dict[str, int | str] | None:
    """Count the engines by role, and their pairs; None without an engine that has a role. Further: ``use_of_pairs``."""
    if not found.roles:
        return None
    counts = {role: len(found.having(role)) for role in ("prefill", "decode", "both")}
    return {**counts, "pairs": len(found.pairs), "told": use_of_pairs(found, able=able, handoff=handoff, policy=policy)}


def roles_in_words(found: Pairing) -> dict[str, dict[str, Any]]:
    """Tell of each engine its role, with how many of those that it could pair with it does, and why not with others."""
    partners: dict[str, set[str]] = {worker_id: set() for worker_id in found.roles}
    others: dict[str, set[str]] = {worker_id: set() for worker_id in found.roles}
    apart: dict[str, dict[Obstacle, set[str]]] = {worker_id: {} for worker_id in (*found.roles, *found.unable)}
    for pair in (*found.pairs, *found.refused):
        for worker_id, other in (pair, pair[::-1]):
            others[worker_id].add(other)
            if pair in found.pairs:
                partners[worker_id].add(other)
            for obstacle in found.refused.get(pair, ()):
                apart[worker_id].setdefault(obstacle, set()).add(other)
    for worker_id, obstacle in (*found.lonely.items(), *found.unable.items()):
        apart[worker_id][obstacle] = set()
    return {
        worker_id: {
            "role": found.roles.get(worker_id, ""),
            "partners": len(partners.get(worker_id, ())),
            "of": len(others.get(worker_id, ())),
            "apart": [{"from": sorted(names), **obstacle._asdict()} for obstacle, names in reasons.items()],
        }
        for worker_id, reasons in apart.items()
    }
