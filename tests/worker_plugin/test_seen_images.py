"""Images that an engine sees are told once, and again when Redis may have forgotten them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fleet.publishing import publishing, upkeep
from tests.support.polling import poll
from tests.support.requests.image_rules import MADE

from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.image_tokens import MAX_ID
from warmfleet_worker.seen_images import AGAIN_SECONDS, MOST_TOLD, MOST_WAITING, SeenImages
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import SnapshotRequest

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

PROMPT = [5, 7, 7, 7, 9, 7, 7, 7, 8, 5]


def told(images: SeenImages, limit: int = 10_000) -> list[str]:
    return [json.loads(report)[0] for report in images.reports(limit)]


def test_the_tokens_of_an_image_are_told_as_runs() -> None:
    images = SeenImages()
    images.note("a", PROMPT, 1, 8)
    assert list(images.reports(10)) == ['["a",[7,3,9,1,7,3,8,1]]']


def test_an_image_is_told_once_and_again_after_a_while() -> None:
    now = [0.0]
    images = SeenImages(lambda: now[0])
    for _ in range(3):
        images.note("a", PROMPT, 1, 3)
    assert told(images) == ["a"]
    now[0] += AGAIN_SECONDS - 1
    images.note("a", PROMPT, 1, 3)
    assert told(images) == []
    now[0] += 1
    images.note("a", PROMPT, 1, 3)
    assert told(images) == ["a"]
    images.begin_anew()
    images.note("a", PROMPT, 1, 3)
    assert told(images) == ["a"]


def test_both_memories_are_bounded() -> None:
    images = SeenImages()
    for number in range(MOST_WAITING + 3):
        images.note(str(number), PROMPT, 1, 3)
    assert images.dropped == 3
    assert len(told(images, 100)) == 100
    images.note(str(MOST_WAITING), PROMPT, 1, 3)  # an image that was dropped is told when it is seen again
    assert told(images)[-1] == str(MOST_WAITING)
    for number in range(MOST_TOLD + 1):
        images.note(f"more {number}", PROMPT, 1, 3)
        told(images)
    images.note("0", PROMPT, 1, 3)
    assert told(images) == ["0"]


@pytest.mark.parametrize(("identifier", "prompt"), [("x" * (MAX_ID + 1), PROMPT), ("x", list(range(2_000)))])
def test_an_image_that_no_router_could_keep_is_dropped(identifier: str, prompt: list[int]) -> None:
    images = SeenImages()
    images.note(identifier, prompt, 0, len(prompt))
    assert told(images) == []
    assert images.dropped == 1


async def announce(fleet: Fleet, worker_id: str) -> None:
    server, facts = worker_id.rpartition(".")[0], {"images": {"made": MADE}}
    await fleet.redis.hset(fleet.keys.servers, server, wire.dumps({"facts": facts}))


@pytest.mark.usefixtures("short_periods")
async def test_images_come_to_redis_and_come_again_after_a_new_join_or_a_loss(
    fleet: Fleet, redis_url: str, model: str
) -> None:
    async def known(*names: str) -> bool:
        reports: list[Any] = await fleet.redis.zrange(fleet.keys.images, 0, -1)
        return {json.loads(report[len(MADE) :])[0] for report in reports} == set(names)

    with publishing(redis_url, model, Tracker()) as publisher:
        async with upkeep(fleet):
            await announce(fleet, publisher.config.worker_id)
            await poll(lambda: publisher.state.acknowledged)
            for name in ("a", "b", "a"):
                publisher.images.note(name, PROMPT, 1, 3)
            await poll(lambda: known("a", "b"))
            await fleet.redis.delete(*await fleet.redis.keys(fleet.keys.prefix + "*"))
            await poll(lambda: publisher.state.joins == 2)
            await announce(fleet, publisher.config.worker_id)
            publisher.images.note("a", PROMPT, 1, 3)
            await poll(lambda: known("a"))
            await fleet.redis.delete(fleet.keys.images)  # as if the entry were lost; a snapshot follows a gap
            snapshots = publisher.state.snapshots
            publisher._snapshot_request = SnapshotRequest()
            await poll(lambda: publisher.state.snapshots > snapshots)
            publisher.images.note("a", PROMPT, 1, 3)
            await poll(lambda: known("a"))
    assert "malformed" not in await fleet.index.counts()
