"""Compares a served model's pools: none is empty, all have the same announcements, no two share a Redis master."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from warmfleet.background import announced
from warmfleet.cli.doctor.finding import Finding, fault, note, ok, skipped
from warmfleet.cli.pools.served import registry_of, runs
from warmfleet.errors import WarmfleetError
from warmfleet.fleet.connection.pool_masters import crowded, next_tag
from warmfleet.protocol.pools import PoolEntry, served_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.protocol.redis_address import SlotRange

UNEVEN = 1.5  # least ratio of two pools' mean blocks per engine that makes a note
MOVING_S = 60.0  # longest move between pools: a server's processes leave within 15 s of each other, then join


async def pools_of(url: str, models: Sequence[str]) -> tuple[tuple[PoolEntry, ...], dict[str, str]]:
    """Return the pools of these models, and model -> why its registry could not be read. models: names or tags.

    The pools are those of the registry in Redis; without a registry, or if it cannot be read, those in ``models``. A
    pool in ``models`` that the registry lacks is left out; ``unregistered`` makes a finding of it.
    """
    found: dict[str, PoolEntry] = {}
    unread: dict[str, str] = {}
    for name in dict.fromkeys(map(served_model, models)):
        entries: Sequence[PoolEntry] = ()
        try:
            async with registry_of(url, name) as registry:
                entries = await registry.read()
        except WarmfleetError as error:
            unread[name] = str(error)
        found |= {
            entry.tag: entry for entry in entries or [PoolEntry(tag) for tag in models if served_model(tag) == name]
        }
    return tuple(found.values()), unread


def registries(unread: Mapping[str, str], tags: Sequence[str]) -> list[Finding]:
    """Make a fault for each registry that could not be read. tags: of the pools that are checked all the same."""
    return [
        fault(
            "registry",
            f"the registry of {name}'s pools cannot be read ({why}): of its pools only"
            f" {', '.join(tag for tag in tags if served_model(tag) == name)} are checked, which are named here",
            f"bring back the Redis master that has the keys of {name}; until then name its other pools with --model",
        )
        for name, why in unread.items()
    ]


def unknown(unread: Iterable[str]) -> list[Finding]:
    """Make a "skipped" finding for each registry that could not be read; used if no checked pool answers."""
    text = "the registry of {0}'s pools cannot be read: name those that may be on other masters with --model"
    return [skipped("registry", text.format(name)) for name in unread]


async def on_their_way(url: str, model: str, now: float) -> dict[str, str]:
    """Find servers that may be moving, one half (core or API server) before the other: name -> the pool they go to.

    now: this machine's clock, in seconds. Raises FleetUnavailable.
    """
    async with registry_of(url, model) as registry:
        places = await registry.placements()
    return {name: place.pool for name, place in places.items() if abs(now - place.moved_ms / 1_000) < MOVING_S}


async def strays(url: str, name: str, pools: Sequence[PoolEntry], named: Sequence[str], now: float) -> list[Finding]:
    """Find servers that run in a pool which the registry of this model lacks. named: model tags of the settings.

    now: this machine's clock, in seconds. Raises FleetUnavailable.
    """
    known = {*named, *(entry.tag for entry in pools)}
    async with registry_of(url, name) as registry:
        places = await registry.placements()
    found: dict[str, list[str]] = {}
    for server, place in places.items():
        if place.pool not in known and runs(place, now):
            found.setdefault(place.pool, []).append(server)
    return [
        note(
            "pools",
            f"{', '.join(servers)}: in {tag}, which the registry lacks, so no router sends requests there",
            f"start with WARMFLEET_MODEL={name}, or with one of its pools; or enter it: warmfleet pools add {tag}",
        )
        for tag, servers in found.items()
    ]


def unregistered(models: Sequence[str], pools: Sequence[PoolEntry]) -> list[Finding]:
    """Find pools that the settings name, and the registry does not have."""
    known = {entry.tag for entry in pools}
    registered = {served_model(entry.tag) for entry in pools if entry.since_ms}
    return [
        note(
            "pools",
            f"{tag} is named here, but the registry of {served_model(tag)} has no such pool: only routers that name it"
            " serve it, and only while it has workers. Engines leave it, except those whose WARMFLEET_MODEL names it",
            f"enter it (warmfleet pools add {tag}), or take it out of WARMFLEET_MODELS",
        )
        for tag in models
        if "#" in tag and tag not in known and served_model(tag) in registered
    ]


def beside_each_other(pools: Sequence[PoolEntry], workers: Mapping[str, Sequence[WorkerView]]) -> list[Finding]:
    """Compare the pools of a served model. workers: by tag, of the pools that could be read."""
    serving = [entry.tag for entry in pools if not entry.draining]
    ready = {tag: [worker for worker in workers.get(tag, ()) if worker.routable] for tag in serving}
    findings = [
        note("pools", f"{entry.tag} is drained and has no worker", f"remove it: warmfleet pools remove {entry.tag}")
        for entry in pools
        if entry.draining and not any(worker.heard for worker in workers.get(entry.tag, ()))
    ]
    findings += [
        fault(
            "pools",
            f"{tag} has no worker that takes requests: its prompts go to other pools, mostly cold",
            "see the checks of its workers above",
        )
        for tag, routable in ready.items()
        if not routable and any(ready.values()) and any(worker.heard for worker in workers.get(tag, ()))
    ]
    if not any(ready.values()):
        with_routable = [tag for tag, known in workers.items() if any(worker.routable for worker in known)]
        findings += [_all_drained(entry) for entry in pools if entry.tag in with_routable]
    # Pools get prompts in proportion to their number of workers, so blocks are compared per worker.
    sizes = {tag: [worker.load.capacity_blocks for worker in routable] for tag, routable in ready.items() if routable}
    blocks = {tag: round(fmean(of_workers)) for tag, of_workers in sizes.items()}
    if blocks and max(blocks.values()) > UNEVEN * min(blocks.values()):
        most, least = max(blocks, key=blocks.__getitem__), min(blocks, key=blocks.__getitem__)
        text = (
            f"an engine has {blocks[most]} blocks in {most} and {blocks[least]} in {least}, on average, and gets as"
            " many prompts: the smaller ones are full sooner"
        )
        remedy = (
            f"let both pools have engines of both sizes: WARMFLEET_MODEL={least} pins one there (app/docs/pools.md)"
        )
        findings.append(note("pools", text, remedy))
    return [*findings, *_differing(ready)]


def _all_drained(entry: PoolEntry) -> Finding:
    """Make the finding about a drained pool (entry) that has workers, while no undrained pool has any."""
    text = f"{entry.tag} is drained, and no pool that serves has a worker that takes requests: all requests go there"
    if entry.moving:
        return note("pools", text, "wait while its workers move to other pools, 45 s each")
    undo = f"let it serve again: warmfleet pools drain {entry.tag} --undo"
    return fault("pools", text, f"{undo}; or send its workers to the others: --move")


def _differing(ready: Mapping[str, Sequence[WorkerView]]) -> list[Finding]:
    """Compare the announcements of workers of different pools; ``fleet_checks`` compares those inside a pool."""
    firsts = {tag: next((worker for worker in routable if worker.server), None) for tag, routable in ready.items()}
    known = [(tag, worker) for tag, worker in firsts.items() if worker is not None]
    if len(known) < 2:
        return []
    (first, model), *others = known
    findings = [
        fault(
            "pools",
            f"{tag} announces another {announced.listed(found)} than {first}: a prompt is identified for each of them",
            "start all engines of the model with the same files, flags and version of vLLM",
        )
        for tag, worker in others
        if (found := [*_schemes(worker, model), *announced.differences(worker, model)])
    ]
    return findings or [ok("pools", f"{len(known)} pools with workers, which announce the same")]


def _schemes(worker: WorkerView, other: WorkerView) -> list[str]:
    return [] if worker.record.get("scheme") == other.record.get("scheme") else ["hash scheme"]


def masters(busy: Sequence[str], tags: Sequence[str], ranges: Sequence[SlotRange]) -> list[Finding]:
    """Find busy pools that share a Redis master while another is idle. busy: tags of pools with workers, of all models.

    tags: of all pools of every model.
    """

    def new_tag(name: str) -> str:
        own = [tag for tag in tags if served_model(tag) == name]
        return next_tag(name, own, ranges, [tag for tag in tags if tag not in own])

    return [
        note(
            "masters",
            f"{' and '.join(found.tags)} are on the Redis master {found.master[0]}:{found.master[1]}, while another "
            "master has no pool: they share one core",
            f"add a pool there and drain one of these: warmfleet pools add {new_tag(served_model(found.tags[0]))}",
        )
        for found in crowded(busy, ranges)
    ]
