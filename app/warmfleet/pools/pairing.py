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
    from warmfleet.protocol.transfer import Transfer

CONFIG = "--kv-transfer-config"
#: Role -> the role of its partners, and vLLM's word for that.
OTHERS = {"prefill": ("decode", "kv_consumer"), "decode": ("prefill", "kv_producer")}
#: What happens to requests until routers can split them.
NOT_SPLIT = "requests are not split over pairs yet: one engine serves each alone"


class Obstacle(NamedTuple):
    """Why engines do not pair, and what to do about it."""

    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """The result. pairs, refused: by prefill engine and decode engine; each two engines that could pair are in one.

    roles: of the engines that can hand over requests, by worker id. unable: engines with a role that they cannot have.
    """

    roles: Mapping[str, str]
    pairs: frozenset[tuple[str, str]]
    refused: Mapping[tuple[str, str], tuple[Obstacle, ...]]
    unable: Mapping[str, Obstacle]

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


def pairing(workers: Iterable[WorkerView]) -> Pairing:
    """Pair the workers of one pool. Workers that take no requests now, or have no KV connector, count for nothing."""
    ready = [(worker, transfer) for worker in workers if worker.routable and (transfer := worker.transfer)]
    prefill = [(worker, transfer) for worker, transfer in ready if transfer.prefills]
    decode = [(worker, transfer) for worker, transfer in ready if transfer.decodes]
    pairs: set[tuple[str, str]] = set()
    refused: dict[tuple[str, str], tuple[Obstacle, ...]] = {}
    for one, ours in prefill:
        for other, theirs in decode:
            if one is other:
                continue
            obstacles = tuple(_obstacles(ours, theirs, together=_host(one) == _host(other)))
            if obstacles:
                refused[one.worker_id, other.worker_id] = obstacles
            else:
                pairs.add((one.worker_id, other.worker_id))
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
    if prefill.is_local and not together:
        yield Obstacle(
            f"the prefill engine's side channel is at {prefill.host}, which the decode engine's machine cannot reach",
            "set VLLM_NIXL_SIDE_CHANNEL_HOST of the prefill engine to its own address; in Kubernetes to its pod's IP",
        )
    if prefill.library == "NIXL" and (prefill.has_fixed_id or decode.has_fixed_id):
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


def pairs_in_words(found: Pairing) -> dict[str, int | str] | None:
    """Count the engines by role, and their pairs; None without an engine that has a role."""
    if not found.roles:
        return None
    counts = {role: len(found.having(role)) for role in ("prefill", "decode", "both")}
    return {**counts, "pairs": len(found.pairs), "told": NOT_SPLIT}


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
