"""The plugin tells which reservations an engine has and when they end; the engine's thread only appends to a queue."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import redis
from tests.support.fleet.engine_with_ends import request_id, reservation
from tests.support.fleet.publishing import WORKER, config, publishing, stream
from tests.support.polling import poll
from tests.worker_plugin.test_vllm_hooks import plain_reporter

from warmfleet_worker.protocol import wire
from warmfleet_worker.reservations import LOST, MOST_RUNNING, MOST_WAITING, Reservations
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

ONE, OTHER, SEVERAL = reservation(1), reservation(2), reservation(3, "-")


@pytest.mark.in_turn
async def test_an_end_arrives_with_the_next_flush_behind_its_prefill(fleet: Fleet, redis_url: str, model: str) -> None:
    told_of = Reservations(list)
    with publishing(redis_url, model, Tracker(), reservations=told_of) as publisher:
        await poll(lambda: publisher.state.joined)
        told: dict[str, float] = {}
        for number in range(15):
            await asyncio.sleep(0.03)
            reserved = reservation(number)
            told[reserved] = time.time()
            publisher.progress(reserved, 0, 100)
            told_of.end([(request_id(reserved), 7, "stop")])
        await asyncio.sleep(0.2)
        delays, prefilled = {}, set()
        for entry_id, entry in await stream(fleet):
            if entry[b"o"] == b"progress":
                prefilled |= {item[0] for item in json.loads(entry[b"d"])}
            if entry[b"o"] == b"ended":
                for reserved, tokens, reason in json.loads(entry[b"d"]):
                    assert (tokens, reason) == (7, "stop")
                    assert reserved in prefilled
                    delays[reserved] = int(entry_id.split(b"-")[0]) / 1_000 - told[reserved]
        assert delays.keys() == told.keys()
        assert sorted(delays.values())[len(delays) // 4] <= wire.FLUSH_SECONDS


async def test_an_engine_without_the_report_tells_nothing_of_it(fleet: Fleet, redis_url: str, model: str) -> None:
    with publishing(redis_url, model, Tracker()) as publisher:
        await poll(lambda: publisher.state.joined)
        publisher.progress(ONE, 0, 100)

        async def prefilled() -> bool:
            return b"progress" in [entry[b"o"] for _, entry in await stream(fleet)]

        await poll(prefilled)
        entries = await stream(fleet)
        assert not {b"ended", b"running", b"tally"} & {entry[b"o"] for _, entry in entries}
        assert b'"ends"' not in entries[0][1][b"d"]


def test_a_lost_report_is_noticed_when_the_engine_has_lacked_the_request_twice() -> None:
    present = [request_id(ONE), request_id(OTHER)]
    told = Reservations(lambda: present)
    told.start([ONE, OTHER])
    assert told.compare() == ([], [])
    present.remove(request_id(ONE))
    assert told.compare() == ([], []), "the report may be on its way"
    assert told.compare() == ([(ONE, 0, LOST)], [])
    assert told.running == [OTHER]


def test_a_request_without_a_report_is_told_when_it_was_there_twice() -> None:
    told = Reservations(lambda: [request_id(ONE), "cmpl-foreign"])
    assert told.compare() == ([], [])
    assert told.compare() == ([], [ONE])
    told.start([ONE])
    assert told.compare() == ([], [])


def engine_with(*names: str) -> Reservations:
    """Reservations of an engine that has these requests, and that cannot list them: none is needed for an end."""
    told = Reservations(lambda: None)
    for name in names:
        told.arrive(name)
    return told


PARTS = {
    "answers": [request_id(ONE, child) for child in range(2)],
    "prompts": [f"cmpl-{SEVERAL}.client-{prompt}" for prompt in range(2)],
    "beams": [f"{request_id(ONE)}-beam-{beam}" for beam in range(2)],
    "chunks": [f"embd-{ONE}.client-0-prompt-{chunk}" for chunk in range(2)],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_a_reservation_ends_with_the_last_of_its_requests(parts: list[str]) -> None:
    """Also in an engine that cannot tell which requests it has, because it has too many or after an error."""
    told = engine_with(*parts)
    told.end([(parts[1], 5, "stop")])
    assert told.take(1) == ([], [])
    told.end([(parts[0], 6, "length")])
    reserved = SEVERAL if SEVERAL in parts[0] else ONE
    assert told.take(1) == ([], [(reserved, 11, "length")])


def test_parts_that_end_in_the_same_step_are_one_end() -> None:
    names = [request_id(ONE, child) for child in range(3)]
    told = engine_with(*names)
    for name in names:
        told.end([(name, 5, "stop")])
    assert told.take(1) == ([], []), "the publisher may have read the length of the queue between two of them"
    assert told.take(2) == ([], [(ONE, 15, "stop")])


def test_a_part_that_comes_before_the_first_ones_end_is_told_joins_it() -> None:
    first, second = (request_id(ONE, child) for child in range(2))
    told = engine_with(first)
    told.end([(first, 5, "length")])
    told.arrive(second)
    assert told.take(1) == ([], [])
    told.end([(second, 6, "length")])
    assert told.take(1) == ([], [(ONE, 11, "length")])


def test_a_part_that_comes_after_the_first_ones_end_was_told_loses_no_tokens() -> None:
    first, second = (request_id(ONE, child) for child in range(2))
    told = engine_with(first)
    told.end([(first, 5, "length")])
    assert told.take(1) == ([], [(ONE, 5, "length")])
    told.arrive(second)
    assert told.take(0) == ([ONE], []), "the engine has it again"
    assert told.running == [ONE]
    told.end([(second, 6, "length")])
    assert told.take(1) == ([], [(ONE, 11, "length")])
    assert told.running == []


def test_what_was_told_as_ended_is_bounded() -> None:
    told = engine_with()
    for number in range(MOST_WAITING + 10):
        told.end([(request_id(f"wf-{number:022}"), 1, "stop")])
        told.take(1)
    assert len(told._over) == MOST_WAITING


def test_a_count_that_is_wrong_lasts_until_the_second_look() -> None:
    """A request whose end the hook has not seen would keep its reservation forever."""
    told = Reservations(list)
    told.arrive(request_id(ONE))
    assert told.take(0) == ([], [])
    told.start([ONE])
    assert told.compare() == ([], [])
    assert told.compare() == ([(ONE, 0, LOST)], [])
    told.arrive(request_id(ONE))
    told.end([(request_id(ONE), 6, "stop")])
    assert told.take(1) == ([ONE], [(ONE, 6, "stop")])


def test_the_queues_are_bounded_and_foreign_requests_are_left_out() -> None:
    told = engine_with()
    for _ in range(MOST_WAITING + 10):
        for name in ("cmpl-foreign", request_id(ONE)):
            told.arrive(name)
            told.end([(name, 1, "stop")])
    assert len(told) == len(told._arrived) == MOST_WAITING
    assert told.take(MOST_WAITING) == ([], [(ONE, MOST_WAITING // 2, "stop")])


def test_an_engine_with_too_many_requests_cannot_tell_which_it_has() -> None:
    """A list that lacked some of them would end these."""
    present = [request_id(f"wf-0{number:021}") for number in range(MOST_RUNNING + 1)]
    told = Reservations(lambda: present)
    assert told.compare() is None
    assert told.restart() is None
    present.pop()
    assert told.compare() is not None
    assert len(told.restart() or ()) == MOST_RUNNING


def test_an_engine_that_cannot_tell_what_it_has_sends_no_tally_and_says_so_once(
    redis_url: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    present: list[str] | None = []
    publisher = WorkerPublisher(config(redis_url, model), Tracker(), reservations=Reservations(lambda: present))
    store, at = redis.Redis.from_url(redis_url), 1_000.0
    events = wire.Keys(model).events(WORKER)

    def tallies() -> int:
        nonlocal at
        at += wire.HEARTBEAT_SECONDS
        publisher.step(at)
        entries: Any = store.xrange(events)
        return sum(fields[b"o"] == b"tally" for _, fields in entries)

    assert tallies()
    present = None
    before = tallies()
    assert [tallies() for _ in range(2)] == [before, before]
    assert caplog.text.count("cannot tell") == 1
    present = []
    assert tallies() > before
    store.close()


# ---------------------------------------------------------------- the hook of vLLM's scheduler


class Heard:
    """In place of the publisher and of its reservations."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def progress(self, reserved: str, _cached: int, _prompt: int) -> None:
        self.told.append(("progress", reserved))

    def arrive(self, name: str) -> None:
        self.told.append(("arrived", name))

    def end(self, ended: list[tuple[str, int, str]]) -> None:
        self.told += [(status, name) for name, _tokens, status in ended]


def request_of(name: str, *, finished: bool = True) -> Any:
    return SimpleNamespace(request_id=name, num_output_tokens=3, status="stop", is_finished=lambda: finished)


def test_an_end_in_a_step_is_told_behind_the_steps_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter, heard = plain_reporter(monkeypatch, {}), Heard()
    reporter._publisher = reporter._reporting = heard
    stats = SimpleNamespace(num_cached_tokens=0, num_prompt_tokens=9)
    output = SimpleNamespace(outputs=[SimpleNamespace(request_id=request_id(ONE), prefill_stats=stats)])
    step = SimpleNamespace(total_num_scheduled_tokens=9, num_scheduled_tokens={"": 9}, scheduled_spec_decode_tokens={})
    reporter.updates = True
    reporter.freed(request_of(request_id(ONE)))
    assert heard.told == []
    reporter.done(step, {0: output})
    reporter.updated()
    assert heard.told == [("progress", ONE), ("stop", request_id(ONE))]
    reporter.freed(request_of(request_id(OTHER)))
    assert heard.told[2:] == [("stop", request_id(OTHER))], "aborted between two steps"


def test_a_request_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM adds further input of a request that it has by the same function."""
    name = request_id(ONE)
    requests: dict[str, Any] = {}
    reporter, heard = plain_reporter(monkeypatch, requests), Heard()
    reporter._publisher = reporter._reporting = heard
    for _ in range(2):
        reporter.added(request_of(name, finished=False))
        requests[name] = request_of(name, finished=False)
    assert heard.told == [("arrived", name)]


@pytest.mark.parametrize("report", ["added", "freed"])
def test_after_an_error_the_engine_cannot_tell(monkeypatch: pytest.MonkeyPatch, report: str) -> None:
    """Its counts may be wrong from then on."""
    reporter = plain_reporter(monkeypatch, {})
    reporter._publisher = reporter._reporting = Heard()
    assert reporter.requests() == []
    getattr(reporter, report)(object())
    assert reporter.requests() is None


def test_requests_of_a_pool_that_the_engine_has_left_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {name: request_of(name, finished=False) for name in (request_id(ONE), request_id(OTHER))}
    reporter, heard = plain_reporter(monkeypatch, requests), Heard()
    reporter._publisher = reporter._reporting = heard
    assert reporter.requests() == list(requests)
    reporter.moved()
    reporter.freed(requests[request_id(ONE)])
    assert reporter.requests() == heard.told == []


def test_a_finished_request_whose_blocks_are_still_sent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    name = request_id(ONE)
    assert plain_reporter(monkeypatch, {name: request_of(name)}).requests() == []


def test_an_engine_whose_requests_cannot_be_read_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = plain_reporter(monkeypatch, {"": object()})
    reporter._publisher = reporter._reporting = Heard()
    for _ in range(2):
        assert reporter.requests() is None
        reporter.freed(object())
    assert len([record for record in caplog.records if "could not read" in record.getMessage()]) == 2
    assert "does not report the ends of requests" in caplog.text
