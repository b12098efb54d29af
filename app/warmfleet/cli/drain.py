"""``warmfleet drain``: takes an engine out of rotation while its requests finish, or puts it back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.pools.served import answers_of, fleets_of, tag_of, tags_of
from warmfleet.cli.terminal.progress import Progress
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, WorkerState

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from warmfleet.fleet import WorkerView

POLL_S = 0.5
#: Time without requests after which a drained worker has finished: a replica that could not reach Redis when the drain
#: began may send requests until its next reading of the fleet.
QUIET_S = 3.0


def run(options: argparse.Namespace) -> int:
    """Drain the named workers, or undo a drain; return 0. Raises CommandError with a sentence for the operator."""
    tags = tags_of(options)
    if options.undo and options.wait:
        raise CommandError("--wait waits for requests to finish, --undo sends new ones: choose one of them")
    asyncio.run(_run(options.workers, options.redis, tags, undo=options.undo, wait=options.wait))
    return 0


async def _run(names: Sequence[str], url: str, tags: Sequence[str], *, undo: bool, wait: bool) -> None:
    async with fleets_of(url, tags) as fleets:
        chosen = await _chosen(names, fleets)
        for fleet, worker in chosen:
            if not await fleet.workers.drain(worker.worker_id, draining=not undo):
                raise CommandError(f"{worker.worker_id} has just been forgotten: nothing runs there")
            done = "is no longer drained" if undo else "gets no new requests"
            where = f" in {tag_of(fleet)}" if len(fleets) > 1 else ""
            print(f"{worker.worker_id} {done}{where}; {_left(worker)}", flush=True)
        if wait:
            with Progress() as progress:
                await _all_finished(chosen, progress)


async def _chosen(names: Sequence[str], fleets: Sequence[Fleet]) -> list[tuple[Fleet, WorkerView]]:
    """Find the workers with these names; the name of a server means all its engine cores.

    Pools that do not answer are left out if each name runs in another pool. Raises FleetUnavailable if none answers.
    """
    answered, lost = await answers_of(fleets, lambda fleet: fleet.workers.read())
    known = [(fleet, worker) for fleet, workers in answered for worker in workers]
    chosen: list[tuple[Fleet, WorkerView]] = []
    for name in names:
        found = [
            (fleet, worker)
            for fleet, worker in known
            if name in (worker.worker_id, str(worker.record.get("server_id", "")))
        ]
        if lost and not any(worker.heard for _, worker in found):  # it may run in a pool that does not answer
            raise CommandError(f"{name!r} runs in no pool that answers; {', '.join(lost)} cannot be asked")
        if not found:
            workers = ", ".join(dict.fromkeys(worker.worker_id for _, worker in known)) or "none"
            raise CommandError(f"no worker is called {name!r}; known are: {workers}")
        chosen += [pair for pair in found if pair not in chosen]
    return chosen


async def _all_finished(chosen: Sequence[tuple[Fleet, WorkerView]], progress: Progress) -> None:
    left = len(chosen)

    async def wait_for(fleet: Fleet, worker_id: str) -> None:
        nonlocal left
        await _finished(fleet, worker_id, progress)
        left -= 1
        progress.step(waiting, len(chosen) - left, len(chosen))

    waiting = f"waiting for requests to finish at {', '.join(worker.worker_id for _, worker in chosen)}"
    progress.step(waiting, 0, len(chosen))
    await asyncio.gather(*[wait_for(fleet, worker.worker_id) for fleet, worker in chosen])


async def _finished(fleet: Fleet, worker_id: str, progress: Progress) -> None:
    """Return when this worker has no requests; print the number of requests left whenever it changes.

    An outage of Redis only delays the return. Raises CommandError if the drain is undone while requests run.
    """
    loop, printed, quiet_since = asyncio.get_running_loop(), "", float("inf")
    while True:
        await asyncio.sleep(POLL_S)
        try:
            worker = next((worker for worker in await fleet.workers.read() if worker.worker_id == worker_id), None)
        except FleetUnavailable:
            left, quiet_since = "Redis does not answer, asking again", float("inf")
        else:
            if worker is None:
                progress.say(f"{worker_id}: it is gone")
                return
            if not worker.draining:
                raise CommandError(f"{worker_id} is no longer drained: an operator undid it, or Redis has lost it")
            left = _left(worker)
            idle = worker.load.in_flight <= 0 and not _foreign_tokens(worker)
            quiet_since = min(quiet_since, loop.time()) if idle else float("inf")
        if loop.time() - quiet_since >= QUIET_S:
            progress.say(f"{worker_id}: nothing runs there any more")
            return
        if left != printed:
            progress.say(f"{worker_id}: {left}")
            printed = left


def _left(worker: WorkerView) -> str:
    foreign = _foreign_tokens(worker)
    direct = f", and {foreign} tokens of requests that no replica has booked" if foreign else ""
    return f"{worker.load.in_flight} requests in flight{direct}"


def _foreign_tokens(worker: WorkerView) -> int:
    """Return the tokens of requests sent to the engine directly, or by a router that could not reach Redis."""
    if worker.state is WorkerState.SILENT:
        return 0  # a silent worker's last report is old, and no newer one will come
    return worker.load.foreign_prefill_tokens + worker.load.foreign_decode_tokens
