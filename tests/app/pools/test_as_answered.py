"""Answers of several pools are used in the order of their arrival; one pool's failure affects no other pool."""

from __future__ import annotations

import asyncio

import pytest

from warmfleet.errors import FleetUnavailable
from warmfleet.pools.served_models import all_of, as_answered


def question() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def test_an_open_question_keeps_no_answer_waiting() -> None:
    early, never, taken = question(), question(), asyncio.Event()

    async def take(name: str, answer: int) -> None:
        assert (name, answer) == ("early", 1)
        taken.set()

    asking = asyncio.create_task(as_answered({never: "never", early: "early"}, take))
    early.set_result(1)
    async with asyncio.timeout(20):
        await taken.wait()
    assert not asking.done()
    asking.cancel()
    await asyncio.wait([asking])
    assert never.cancelled(), "nobody would hear of its failure"


async def test_the_first_failure_is_raised_once_all_are_answered() -> None:
    questions = {question(): name for name in ("away", "spoilt", "good")}
    away, spoilt, good = questions
    taken: list[str] = []

    async def take(name: str, _answer: int) -> None:
        taken.append(name)
        if name == "spoilt":
            raise ValueError(name)

    away.set_exception(FleetUnavailable("away"))
    asking = asyncio.create_task(as_answered(questions, take))
    await asyncio.sleep(0)
    spoilt.set_result(1)
    good.set_result(1)
    with pytest.raises(FleetUnavailable):
        await asking
    assert {*taken} == {"spoilt", "good"}
    await as_answered({}, take)


async def test_a_failure_ends_no_other_work() -> None:
    done: list[str] = []

    async def fails() -> None:
        raise ValueError("away")

    async def works() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        done.append("works")

    with pytest.raises(ValueError, match="away"):
        await all_of([fails(), works()])
    assert done == ["works"]
