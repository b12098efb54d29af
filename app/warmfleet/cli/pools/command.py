"""``warmfleet pools``: lists the pools of a served model; adds, drains and removes them while the fleet runs."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.running_stack import models_of, models_of_settings
from warmfleet.cli.pools.served import all_tags, entries_of, pool_of, registry_of, runs, slot_ranges
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, print_answer
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.connection.pool_masters import next_tag
from warmfleet.fleet.connection.reply_errors import RefusedCall
from warmfleet.fleet.pool_registry import clear, master_of
from warmfleet.protocol.pools import DRAINING, MAX_POOLS, SERVING, PoolEntry, read_registry, served_model
from warmfleet.protocol.wire import WireError, model_tag

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    from warmfleet.fleet import WorkerView

from warmfleet.fleet.pool_registry import PoolRegistry

HEADER = ("POOL", "STATE", "WORKERS", "BLOCKS", "IN FLIGHT", "QUEUE", "REDIS")
#: Pause after a pool was removed from the registry, in which replicas notice it (1 s), and its workers begin to leave.
LET_GO_S = 3.0
MOVING = "moving"  # state of a drained pool whose workers move to other pools at once


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A pool in figures. workers: number that take requests; known: number of all that have not moved to another pool.

    capacity_blocks: of workers that take requests. redis: host and port of the pool's master; empty if all share one.
    unreachable: why the pool's Redis does not answer, "" if it does; all figures are 0 without an answer.
    """

    pool: str
    state: str
    since_ms: int
    workers: int = 0
    known: int = 0
    capacity_blocks: int = 0
    in_flight: int = 0
    waiting: int = 0
    redis: str = ""
    unreachable: str = ""


def run(options: argparse.Namespace) -> int:
    """Run the chosen action; return 0. Raises CommandError."""
    logging.basicConfig(level=logging.CRITICAL)  # an outage is told by the command's error, not by log lines
    _check(options)
    asyncio.run(_run(options))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check the options; raise CommandError for options that do not fit together."""
    action, tags = options.action, options.tags
    if (action == "list") == bool(tags):
        raise CommandError("list takes no pool (--model names the model); add, drain and remove take at least one")
    fitting = {"json": "list", "spread": "add", "move": "drain", "undo": "drain", "force": "remove"}
    for name, of_action in fitting.items():
        if getattr(options, name) and action != of_action:
            raise CommandError(f"--{name} is for {of_action}, not for {action}")
    if options.spread and "#" in "".join(tags):
        raise CommandError("--spread chooses the tag: name the model without #")
    if options.move and options.undo:
        raise CommandError("--move sends workers away, --undo lets them stay: choose one of them")
    for tag in tags:
        try:
            model_tag(tag)
        except WireError as error:
            raise CommandError(str(error)) from error
    if len({served_model(tag) for tag in tags}) > 1:
        raise CommandError("name pools of one model at a time")


async def _run(options: argparse.Namespace) -> None:
    url, tags = options.redis, list(dict.fromkeys(options.tags))
    if options.action == "list":
        chosen = models_of(options)
        names = list(dict.fromkeys(map(served_model, chosen)))
        named = [tag for tag in chosen if "#" in tag] + models_of_settings(options)
        found = {name: await _figures(url, name, named) for name in names}
        for name, figures in found.items():
            if not any(pool.since_ms or pool.known or pool.unreachable for pool in figures):
                _warn(f"no worker and no registry of {name} is known: is its name right?")
        answer = {name: [asdict(pool) for pool in pools] for name, pools in found.items()}
        print_answer(answer, lambda: _parts(found), as_json=options.json)
        return
    async with registry_of(url, tags[0]) as registry:
        if options.action == "add":
            named = [tag for tag in models_of_settings(options) if served_model(tag) == registry.name]
            new = [await _new_tag(url, registry, options, named)] if options.spread else tags
            await _add(url, registry, new, named)
        elif options.action == "drain":
            await _drain(registry, tags, undo=options.undo, move=options.move)
        else:
            await _remove(url, registry, tags, force=options.force)


# ---------------------------------------------------------------- list


async def _figures(url: str, name: str, named: Sequence[str]) -> list[PoolFigures]:
    """List the pools of a model. named: tags from options and environment, used if the model has no registry."""
    of_model = dict.fromkeys(tag for tag in named if served_model(tag) == name)
    entries = await entries_of(url, name, list(of_model))
    looked = await asyncio.gather(*[_look(url, entry) for entry in entries])
    found: list[PoolFigures] = []
    for pool, workers in looked:
        others = [worker for other, its_workers in looked if other is not pool for worker in its_workers]
        elsewhere = {worker.worker_id for worker in others if worker.heard}
        moved = sum(not worker.heard and worker.worker_id in elsewhere for worker in workers)
        found.append(replace(pool, known=pool.known - moved))
    return found


async def _look(url: str, entry: PoolEntry) -> tuple[PoolFigures, Sequence[WorkerView]]:
    """Return a pool's figures, in which ``known`` includes workers that moved away, and the pool's workers."""
    state = MOVING if entry.moving else DRAINING if entry.draining else SERVING
    async with pool_of(url, entry.tag) as fleet:
        try:
            workers, line = await fleet.workers.read(), await fleet.queue.poll()
        except FleetUnavailable as error:
            return PoolFigures(entry.tag, state, entry.since_ms, unreachable=str(error)), ()
        ready = [worker for worker in workers if worker.routable]
        figures = PoolFigures(
            pool=entry.tag,
            state=state,
            since_ms=entry.since_ms,
            workers=len(ready),
            known=len(workers),
            capacity_blocks=sum(worker.load.capacity_blocks for worker in ready),
            in_flight=sum(worker.load.in_flight for worker in workers),
            waiting=line.waiting,
            redis=master_of(fleet.redis),
        )
        return figures, workers


def _parts(found: Mapping[str, Sequence[PoolFigures]]) -> list[Part]:
    parts: list[Part] = []
    for name, pools in found.items():
        parts += ["", (Toned(name, Tone.HEAD), f"  {len(pools)} pool{'s' * (len(pools) != 1)}")]
        parts.append(Table(HEADER, [_row(pool) for pool in pools]))
        parts += [(Toned(f"{pool.pool}: ", Tone.BAD), pool.unreachable) for pool in pools if pool.unreachable]
    return parts[1:]


def _row(pool: PoolFigures) -> tuple[object, ...]:
    if pool.unreachable:
        return pool.pool, Toned("unreachable", Tone.BAD), "-", "-", "-", "-", "-"
    tone = Tone.MIND if pool.state != SERVING else Tone.GOOD if pool.workers else Tone.BAD
    workers = f"{pool.workers}" if pool.workers == pool.known else f"{pool.workers} of {pool.known}"
    return (
        *(pool.pool, Toned(pool.state, tone), workers, pool.capacity_blocks, pool.in_flight, pool.waiting),
        pool.redis or "-",
    )


# ---------------------------------------------------------------- add, drain, remove


async def _add(url: str, registry: PoolRegistry, tags: Sequence[str], named: Sequence[str]) -> None:
    """Add pools to the registry. If the model has no registry, add its present pools, too: the pool with the model's
    name, and the pools ``named`` by the settings, if they have workers.
    """
    entries = {entry.tag: entry for entry in await registry.read()}
    new, used = [tag for tag in tags if tag not in entries], list[str]()
    if not entries:
        others = [tag for tag in dict.fromkeys((registry.name, *named)) if tag not in tags]
        used = [tag for tag in others if await _any_worker(url, [tag])]
        new = [*used, *new]
        for tag in used:
            print(f"{tag} has workers: it stays a pool beside the others")
        if not used and not await _any_worker(url, tags):
            _warn(
                f"no worker and no registry of {registry.name} is known under these names. If routers serve other "
                f"pools of it (their WARMFLEET_MODELS), add those, too; if the name is wrong: warmfleet pools remove "
                f"{' '.join(tags)} --force"
            )
    if len(entries) + len(new) > MAX_POOLS:
        raise CommandError(f"a model has {MAX_POOLS} pools at most")
    # New pools get the operator's policy and approved templates of an old pool, else of the first named that has any.
    await _same_orders(url, [next(iter(entries))] if entries else [registry.name, *used, *tags], new)
    await registry.write([PoolEntry(tag) for tag in new])
    for tag in tags:
        if tag in new:
            print(f"{tag} serves: new workers join the pool with the least capacity")
        elif entries[tag].draining:
            print(f"{tag} is there, but drained: `warmfleet pools drain {tag} --undo` lets it serve again")
        else:
            print(f"{tag} is there")


def _warn(text: str) -> None:
    print(f"warmfleet pools: warning: {text}", file=sys.stderr)


async def _any_worker(url: str, tags: Iterable[str]) -> bool:
    for tag in tags:
        async with pool_of(url, tag) as fleet:
            if await fleet.workers.read():
                return True
    return False


async def _new_tag(url: str, registry: PoolRegistry, options: argparse.Namespace, named: Sequence[str]) -> str:
    """Find a tag that puts a new pool on the Redis master with the fewest pools, counting all models of the settings.

    named: the model's pools in the settings, used if the model has no registry.
    """
    of_others: Sequence[str] = ()
    with suppress(CommandError):  # no model is named: only this model's pools count
        of_others = [tag for tag in models_of(options) if served_model(tag) != registry.name]
    others = await all_tags(url, map(served_model, of_others), of_others)
    existing = [entry.tag for entry in await registry.read()] or [registry.name, *named]
    return next_tag(registry.name, existing, await slot_ranges(url), others)


async def _same_orders(url: str, old: Sequence[str], new: Iterable[str]) -> None:
    """Copy the operator's policy and approved templates to new pools: those of the first old pool that has any.

    A new pool that has its own keeps these. A router's Redis user may not write them: a message says so, and the pools
    are added all the same, because in Kubernetes routers add pools before they start.
    """
    policy, approved, first = "", frozenset[str](), ""
    for first in old:
        async with pool_of(url, first) as fleet:
            policy, approved = await fleet.operator.switched(), await fleet.operator.approved()
        if policy or approved:
            break
    for tag in [tag for tag in new if tag != first]:
        async with pool_of(url, tag) as fleet:
            try:
                if policy and not await fleet.operator.switched():
                    await fleet.operator.switch(policy)
                if approved and not await fleet.operator.approved():
                    await fleet.operator.approve(approved)
            except RefusedCall as error:
                text = f"policy and approved templates of {first} do not hold in {tag} ({error}): as `admin` call"
                print(f"{text} `warmfleet policy` and `warmfleet artifacts approve` again", file=sys.stderr)


async def _drain(registry: PoolRegistry, tags: Sequence[str], *, undo: bool, move: bool) -> None:
    entries = {entry.tag: entry for entry in await registry.read()}
    _check_registered(registry, entries, tags)
    if not undo and all(entry.draining or entry.tag in tags for entry in entries.values()):
        raise CommandError(f"no other pool of {registry.name} serves: `warmfleet pools add` makes one")
    await registry.write([PoolEntry(tag, draining=not undo, moving=move) for tag in tags])
    pinned = {} if undo else await _pinned(registry, tags)
    for tag in tags:
        if undo:
            print(f"{tag} serves again" if entries[tag].draining else f"{tag} serves: it was not drained")
        elif move:
            print(f"the workers of {tag} move to other pools, an eighth of the model's or one at a time, 45 s each")
        else:
            print(f"{tag} gets no new requests; its workers join other pools when they are started again")
        if tag in pinned:
            print(pinned[tag])


async def _remove(url: str, registry: PoolRegistry, tags: Sequence[str], *, force: bool) -> None:
    """Remove pools from the registry, and delete their keys in Redis."""
    entries = {entry.tag: entry for entry in await registry.read()}
    if not entries and registry.name in tags:
        raise CommandError(
            f"{registry.name} has no registry: it is the pool of a model that has one pool. Stop its engines, and take "
            "it out of the routers' WARMFLEET_MODELS"
        )
    last = bool(entries) and entries.keys() <= set(tags)
    if last and not force:
        raise CommandError(f"{registry.name} would have no pool: its last one goes with --force, if no worker is there")
    if last or not force:
        for tag in tags:
            await _unused(registry, url, tag, last=last)
    else:
        await _others_serve(url, entries, tags)
    for text in (await _pinned(registry, [tag for tag in tags if tag in entries])).values():
        print(text)
    for tag in entries.keys() & set(tags):
        await registry.remove(tag)
    if entries.keys() & set(tags):
        await asyncio.sleep(LET_GO_S)
    if last and read_registry(registry.name, await registry.ask()):
        raise CommandError(
            f"{registry.name} keeps its last pool: a router serves it, and has written the registry back. Take "
            f"{registry.name} out of its WARMFLEET_MODELS first"
        )
    for tag in tags:  # also of a pool that the registry lacks: an interrupted `remove` may have left keys
        await _delete(url, tag, shared=tag == registry.name, there=tag in entries)


async def _delete(url: str, tag: str, *, shared: bool, there: bool) -> None:
    """Delete the keys of a pool in Redis. there: the registry had the pool. Raises CommandError, FleetUnavailable."""
    try:
        async with pool_of(url, tag) as fleet:
            deleted = await clear(fleet, shared=shared)
    except RefusedCall:
        raise
    except FleetUnavailable as error:
        text = f"its Redis does not answer: call again when it is there to delete what is left ({error})"
        if not there:
            raise CommandError(f"no pool {tag} in the registry; {text}") from error
        print(f"{tag} is out of the registry; {text}")
    else:
        left = "deleted what was left of it" if deleted else "Redis has nothing of it either"
        print(f"{tag} is removed" if there else f"no pool {tag} in the registry; {left}")


async def _pinned(registry: PoolRegistry, tags: Sequence[str]) -> dict[str, str]:
    """Return pool -> sentence about its servers that WARMFLEET_MODEL ties to this pool. Raises FleetUnavailable."""
    found: dict[str, list[str]] = {}
    for name, place in (await registry.placements()).items():
        if place.pinned and place.pool in tags and runs(place, time.time()):
            found.setdefault(place.pool, []).append(name)
    return {
        tag: f"{', '.join(names)} will not leave {tag}, which WARMFLEET_MODEL names there: start with"
        f" WARMFLEET_MODEL={registry.name} whatever shall move"
        for tag, names in found.items()
    }


async def _unused(registry: PoolRegistry, url: str, tag: str, *, last: bool) -> None:
    """Raise CommandError if the pool has workers or requests, or if its Redis does not answer."""
    async with pool_of(url, tag) as fleet:
        try:
            workers = await fleet.workers.read()
        except RefusedCall:
            raise
        except FleetUnavailable as error:
            text = f"the Redis that has {tag} does not answer, so nobody can tell whether it is in use ({error})"
            if not last:
                text += (
                    f": `warmfleet pools drain {tag} --move` works all the same; --force takes it out of the registry"
                )
            raise CommandError(text) from error
    alive = [worker.worker_id for worker in workers if worker.heard]
    open_requests = sum(worker.load.in_flight for worker in workers)
    if alive or open_requests:
        has = f"{tag} has {len(alive)} live workers and {open_requests} requests in flight"
        if last:
            raise CommandError(f"{has}, and the model has no other pool: stop its engines first")
        stay = "".join(f". {text}" for text in (await _pinned(registry, [tag])).values())
        raise CommandError(
            f"{has}: `warmfleet pools drain {tag} --move` sends its workers to other pools; with --force it is removed "
            f"all the same, and they go at once{stay}"
        )


async def _others_serve(url: str, entries: Mapping[str, PoolEntry], tags: Sequence[str]) -> None:
    """Raise CommandError if the model would have no worker until the workers of the pools ``tags`` join other pools."""
    going = [tag for tag in entries if tag in tags and await _takes_requests(url, tag) is not False]
    staying = [tag for tag, entry in entries.items() if tag not in tags and not entry.draining]
    if going and not any([await _takes_requests(url, tag) for tag in staying]):
        raise CommandError(
            f"no pool that serves besides {', '.join(going)} has a worker that takes requests: without it every request"
            f" would fail for some 15 s. `warmfleet pools drain {going[0]} --move` sends its workers to another pool"
            " while they serve; `warmfleet pools add` makes one"
        )


async def _takes_requests(url: str, tag: str) -> bool | None:
    """Tell whether some worker of the pool takes requests; None if its Redis does not answer."""
    async with pool_of(url, tag) as fleet:
        try:
            return any(worker.routable for worker in await fleet.workers.read())
        except FleetUnavailable:
            return None


def _check_registered(registry: PoolRegistry, entries: Mapping[str, PoolEntry], tags: Sequence[str]) -> None:
    for tag in tags:
        if tag not in entries:
            has = ", ".join(entries) or "none; `warmfleet pools add` enters some"
            raise CommandError(f"{registry.name} has no pool {tag!r} in its registry; it has: {has}")
