"""Sessions that the ledger holds wait in line, are let in or refused, and leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.routing.test_pool_choice import Fixture, Store
from tests.support.polling import poll

from warmfleet.api import access_log, request_reasons
from warmfleet.api.request_facts import facts
from warmfleet.errors import Overloaded, QueueTimeout, RateLimited
from warmfleet.fleet import Decision, SessionEnd, Standing
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.routing import admission_queue
from warmfleet.routing.admission_queue import AdmissionQueue
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.explain_header import answer_headers
from warmfleet.routing.tickets import LinePolls
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from warmfleet.routing.call import Job

TOOLS = b"\x01"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinePolls, "poll_s", 0.01)
    monkeypatch.setattr(LinePolls, "first_pause_s", 0.01)


class Agents(Fixture):
    """One pool, unless a test asks for more, whose requests declare tools."""

    @property
    def first(self) -> Store:
        return self.stores["m#1"]

    def agent(self, pools: int = 1, session: bytes = TOOLS, **more: Any) -> Job:
        return self.job(self.pools[:pools], **more)._replace(session=session)

    async def held(self, count: int = 1) -> None:
        await poll(lambda: self.count("held") == count, 10, f"{count} requests are held")

    def count(self, gauge: str) -> float:
        return float(sum(getattr(self.metrics, gauge).labels(pool.tag)._value.get() for pool in self.pools))

    def refusals(self, reason: str) -> float:
        return float(self.metrics.queue_rejections.labels(reason, "m#1")._value.get())


async def test_a_held_session_is_let_in_at_its_turn_under_the_id_that_it_was_told() -> None:
    fixture = Agents()
    fixture.script("hold hold book")
    assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    assert fixture.first.sessions == [TOOLS, TOOLS + b"made", TOOLS + b"made"]
    assert fixture.first.polled, "the replica renews the session in the line"
    assert fixture.first.ends == [SessionEnd(b"made", "?", 100)]
    assert fixture.count("held") == 0
    assert fixture.metrics.held_seconds.labels("m#1")._sum.get() > 0
    assert fixture.metrics.queue_seconds.labels("m#1")._sum.get() == 0, "no wait in the queue"


async def test_a_session_that_was_let_in_may_wait_for_its_engine() -> None:
    fixture = Agents()
    fixture.script("hold queue book")
    assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    assert fixture.metrics.queue_seconds.labels("m#1")._sum.get() > 0


async def test_a_session_that_redis_does_not_know_is_decided_like_a_new_one() -> None:
    fixture = Agents()
    fixture.first.standing = Standing.UNKNOWN
    fixture.script("hold book")
    assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    assert fixture.first.sessions == [TOOLS, TOOLS + b"made"], "if Redis has only dropped it, it comes to its old place"


async def test_nobody_is_held_while_redis_is_away() -> None:
    fixture = Agents()
    fixture.script("hold away away away")
    fixture.first.standing = Standing.WAITS
    job, attempt = fixture.attempt(fixture.agent())
    sent = asyncio.create_task(fixture.queue.admit(job, attempt))
    await fixture.held()
    fixture.first.away = True
    async with asyncio.timeout(10):
        assert (await sent).flagged, "it was chosen without Redis"
    attempt.release("finished")
    fixture.first.away = False
    await fixture.settlements.drained()


@pytest.mark.parametrize("in_line", [1, 2])
async def test_a_client_that_hangs_up_leaves_the_line(in_line: int) -> None:
    fixture = Agents()
    fixture.script("hold " * 4)
    fixture.first.standing = Standing.WAITS
    made = [fixture.attempt(fixture.agent(session=b"\x02nA")) for _ in range(in_line)]
    sent = [asyncio.create_task(fixture.queue.admit(*each)) for each in made]
    await fixture.held(in_line)
    for task, (_, attempt) in zip(sent, made, strict=True):
        assert (fixture.first.held, fixture.first.asked) == ({b"nA"}, in_line), "a request of the session waits on"
        task.cancel()
        await asyncio.wait([task])
        attempt.release("cancelled")
        polled = len(fixture.first.polled)
        if task is not sent[-1]:
            await poll(lambda before=polled: len(fixture.first.polled) > before + 1, 10, "polls go on")  # type: ignore[misc]
    await fixture.nothing_left()


async def test_all_requests_of_a_session_have_their_turn_with_it() -> None:
    fixture = Agents()
    fixture.script("hold hold book book")
    fixture.first.standing = Standing.WAITS
    made = [fixture.attempt(fixture.agent(session=b"\x02nA")) for _ in range(2)]
    sent = [asyncio.create_task(fixture.queue.admit(*each)) for each in made]
    await fixture.held(2)
    fixture.first.standing = Standing.TURN
    assert all(isinstance(decision, Decision) for decision in await asyncio.gather(*sent))
    for _, attempt in made:
        attempt.release("finished")
    await fixture.nothing_left()


async def test_a_new_session_that_would_be_held_for_long_is_refused_at_once() -> None:
    fixture = Agents()
    fixture.first.hold = replace(fixture.first.hold, predicted_s=Settings().session_wait_max_s + 7.0, ahead=40)
    fixture.script("hold")
    with pytest.raises(Overloaded, match="40 sessions wait before it") as refused:
        await fixture.admit(fixture.agent())
    assert refused.value.retry_after_s == 7, "then the line is short enough, if nobody else comes"
    assert (fixture.refusals("sessions"), fixture.count("held")) == (1, 0)


@pytest.mark.parametrize("known_by", ["ledger", "messages", "an earlier try"])
async def test_a_session_with_earlier_steps_is_never_refused(known_by: str) -> None:
    fixture = Agents()
    fixture.first.hold = replace(fixture.first.hold, predicted_s=9_999.0, paused=known_by == "ledger")
    fixture.script("hold book")
    job = fixture.agent()
    if known_by == "messages":
        body = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
        job = job._replace(request=bodies.parse(KNOWN["/v1/chat/completions"], body))
    if known_by == "an earlier try":
        Attempt(fixture.settlements, job).release("failed")
    assert (await fixture.admit(job))[0] == "m#1"


async def test_a_session_that_waits_already_is_not_refused_later() -> None:
    fixture = Agents()
    fixture.script("hold hold book")
    sent = asyncio.create_task(fixture.admit(fixture.agent()))
    await fixture.held()
    fixture.first.hold = replace(fixture.first.hold, predicted_s=9_999.0)
    assert (await sent)[0] == "m#1"


@pytest.mark.parametrize("at_last", ["book", "full"])
async def test_a_new_session_is_held_little_longer_than_it_was_told(
    at_last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "LATE_S", 0.05)
    fixture = Agents()
    fixture.first.standing, fixture.first.hold = Standing.WAITS, replace(fixture.first.hold, predicted_s=0.1)
    fixture.script(f"hold {at_last}")
    began = time.perf_counter()
    if at_last == "full":
        with pytest.raises(Overloaded):
            await fixture.admit(fixture.agent())
    else:
        assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    assert time.perf_counter() - began > 0.14
    assert fixture.first.sessions[1:] == [b""], "any worker with room serves it, whatever the ledger says"


@pytest.mark.parametrize("pools", [1, 2])
async def test_a_paused_session_goes_on_without_the_ledger_after_its_bound(
    pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "LATE_S", 0.05)
    fixture = Agents()
    settings = Settings(models=("m",), paused_max_s=0.0, queue_timeout_s=30.0)
    fixture.queue = AdmissionQueue(fixture.choice, fixture.settlements.tickets, settings, fixture.metrics)
    fixture.first.standing, fixture.first.hold = Standing.WAITS, replace(fixture.first.hold, paused=True)
    fixture.script("hold queue book", "full full full full")

    async def turn() -> None:
        await poll(lambda: bool(fixture.first.tickets), 10, "it waits for a worker")
        fixture.first.standing = Standing.TURN

    (tag, _), _ = await asyncio.gather(fixture.admit(fixture.agent(pools)), turn())
    assert tag == "m#1"
    assert fixture.first.sessions == [TOOLS, b"", b""]


async def test_the_clients_limit_counts_and_that_of_the_queue_does_not() -> None:
    fixture = Agents()
    settings = Settings(models=("m",), queue_timeout_s=0.0)
    fixture.queue = AdmissionQueue(fixture.choice, fixture.settlements.tickets, settings, fixture.metrics)
    fixture.script("hold hold hold book")
    assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    fixture.first.standing = Standing.WAITS
    fixture.script("hold full")
    with pytest.raises(QueueTimeout):
        await fixture.admit(fixture.agent(patience_s=0.05))


async def test_a_request_without_room_for_its_body_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Agents()
    monkeypatch.setattr(fixture.queue, "_max_bytes", 0)
    assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    assert fixture.first.sessions == [b""]


async def test_of_two_pools_the_one_with_the_shorter_line_is_taken_and_the_other_line_left() -> None:
    fixture = Agents()
    second = fixture.stores["m#2"]
    second.hold = replace(second.hold, predicted_s=3.0)
    fixture.script("hold", "hold book")
    assert (await fixture.admit(fixture.agent(2)))[0] == "m#2"
    asked = second.asked
    fixture.script("hold hold hold book", "hold")
    second.hold = replace(second.hold, predicted_s=9.0)
    assert (await fixture.admit(fixture.agent(2)))[0] == "m#1"
    assert second.asked == asked + 1, "a session that is held looks for no other pool"
    fixture.script("hold", "book")
    second.cost_s = 1.0
    assert (await fixture.admit(fixture.agent(2)))[0] == "m#2", "1 s there costs less than half of 8 s"
    fixture.script("hold book", "book")
    second.cost_s, second.ahead = 9.0, 900
    assert (await fixture.admit(fixture.agent(2)))[0] == "m#1", "half of 8 s costs less than half of 9 s and 1 s"


async def test_people_learn_why_a_request_was_held() -> None:
    fixture = Agents()
    fixture.script("hold book")
    job, attempt = fixture.attempt(fixture.agent())
    decision = await fixture.queue.admit(job, attempt)
    attempt.chosen.explanation = b'{"policy":"cost"}'
    explained = dict(answer_headers("id", attempt, decision, "all"))[b"x-warmfleet-explain"]
    assert explained.startswith(b'{"held_ms":')
    assert explained.endswith(b'"held":"new","ahead":2,"policy":"cost"}')
    attempt.release("finished")
    record = job.call.record
    record.began_at = record.tries[0].began_at
    record.identified("m", "exact", "", 100, streams=True)
    record.end(200, complete=True)
    told = facts(record)
    assert (told["held"], told["ahead"]) == ("new", 2)
    assert told["held_ms"] >= 10
    assert f"held {told['held_ms']} ms (new, 2 ahead), queue 0.0 ms" in access_log.text_of(told)
    because = request_reasons.told(record, time.perf_counter())["because"]
    assert "until the caches have room for its session (it was new, 2 sessions before it)" in because
    await fixture.nothing_left()


async def test_held_requests_leave_room_for_those_that_wait_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Agents()
    monkeypatch.setattr(fixture.queue, "_max_bytes", 4 * len(fixture.agent().body) + 3)
    fixture.script("hold hold book book")
    fixture.first.standing = Standing.WAITS
    (job, attempt), second = fixture.attempt(fixture.agent()), fixture.attempt(fixture.agent())
    first = asyncio.create_task(fixture.queue.admit(job, attempt))
    await fixture.held()
    assert isinstance(await fixture.queue.admit(*second), Decision), "a second body is not held"
    assert fixture.first.sessions == [TOOLS, TOOLS, b""]
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    for each in (attempt, second[1]):
        each.release("finished")
    assert fixture.queue._held_bytes == 0


async def test_a_held_request_waits_on_while_its_client_is_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held requests count for no limit, so at its turn others of the client may be under way."""
    monkeypatch.setattr(admission_queue, "LIMITED_S", 0.01)
    fixture = Agents()
    fixture.script("hold limit limit hold limit book")
    assert (await fixture.admit(fixture.agent()))[0] == "m#1"
    monkeypatch.setattr(admission_queue, "HELD_TIMES", 0.0)
    monkeypatch.setattr(admission_queue, "LATE_S", 0.2)
    fixture.script("hold " + "limit " * 1_000)
    with pytest.raises(RateLimited):
        await fixture.admit(fixture.agent())
    await fixture.nothing_left()
    fixture.script("limit")
    with pytest.raises(RateLimited):
        await fixture.admit(fixture.agent())
