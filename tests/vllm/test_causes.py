"""The judge of the chaos test. Each cause needs its evidence; without it, a wrong prediction stays unexplained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.vllm.causes import Judge, Strikes
from tests.vllm.history import Booking, Engine, Index, Stay

from warmfleet.fleet import Lease, Stage

CHAIN = tuple(bytes([n] * 8) for n in range(4))
LAST = CHAIN[3]
PLACE = 10  # position of the decision in Redis' log
AT = 100.0  # seconds at which the decision is made
LOOKED = 100.5  # seconds at which the engine looks


class Case:
    """A decision for worker w, slot 1, that predicted the whole chain. Each test adds its own circumstances."""

    def __init__(self, cached: int, matched: int = 4) -> None:
        self.index, self.engine, self.strikes = Index(), Engine(), Strikes()
        self.index.ticks = [90 + n / 20 for n in range(300)]
        self._request("r", PLACE, AT, matched)
        self.engine.stays["r"] = Stay("r", AT, CHAIN, LOOKED, cached, LOOKED)

    def _request(self, name: str, place: int, at: float, matched: int) -> None:
        made = Booking(name, place, at, 1, "w", matched, CHAIN)
        self.index.bookings[name] = made
        for block in CHAIN:
            self.index.makers[1, block].append(made)

    def indexed(self, *, there: bool = True) -> Case:
        self.index.blocks.change((1, LAST), PLACE - 1, there=there)
        return self

    def block(self, appeared: float, gone: float | None = None) -> Case:
        self.engine.blocks.change(LAST, appeared, there=True)
        if gone is not None:
            self.engine.blocks.change(LAST, gone, there=False)
        return self

    def maker(self, ran: float | None, ended: float | None, preempted: float | None = None) -> Case:
        self._request("m", 5, 98.0, 0)
        self.index.leases.change("m", 5, there=True)
        self.engine.stays["m"] = Stay("m", 98.0, CHAIN, ran or 0.0, 0, ran, preempted, ended)
        return self

    def gave_up(self, told: float | None) -> Case:
        """Book a maker of the blocks, two seconds before, which no engine ever sees."""
        self._request("m", 5, 98.0, 0)
        self.index.leases.change("m", 5, there=True)
        if told is not None:
            self.index.told["m"] = told
        return self

    def struck(self, **strikes: list[float]) -> Case:
        self.strikes = Strikes(**strikes)
        return self

    def stalled(self) -> Case:
        self.index.ticks = [tick for tick in self.index.ticks if not 97.5 < tick < 99.5]
        return self

    @property
    def cause(self) -> str:
        engines = {"w": self.engine}
        return Judge(self.index, engines, self.strikes)._cause(self.index.bookings["r"], self.engine.stays["r"], "w")


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        (Case(4), "exact"),
        (Case(3).indexed().block(50, gone=100.2), "short: evicted while it waited"),
        (Case(3).indexed().block(50, gone=99.8), "short: eviction not yet reported"),
        (Case(3).indexed().block(50, gone=98.0), "short: unexplained"),
        (Case(3).indexed().block(50, gone=98.0).stalled(), "short: eviction not yet reported"),
        (Case(3).indexed().block(50, gone=98.0).struck(redis_back=[95.0]), "short: Redis had just come back"),
        (Case(3).indexed().block(50, gone=98.0).struck(redis_back=[80.0]), "short: unexplained"),
        (Case(3).indexed(), "short: unexplained"),
        (Case(3), "short: unexplained"),
        (Case(3).maker(ran=None, ended=None), "short: its maker waits, too"),
        (Case(3).gave_up(100.1), "short: its maker never came, told late"),
        (Case(3).gave_up(102.2), "short: unexplained"),
        (Case(3).gave_up(None), "short: unexplained"),
        (Case(3).maker(ran=None, ended=100.1), "short: its maker was cancelled"),
        (Case(3).maker(ran=98.1, ended=99.5), "short: its maker was cancelled"),
        (Case(3).maker(ran=98.1, ended=99.5).block(50, gone=90), "short: its maker was cancelled"),
        (Case(3).maker(ran=98.1, ended=98.4), "short: unexplained"),
        (Case(3).maker(ran=99.0, ended=None), "short: its maker is at it"),
        (Case(3).maker(ran=99.0, ended=None, preempted=99.5), "short: its maker was preempted"),
        (Case(3).maker(ran=98.1, ended=99.5).block(98.1, gone=99.7), "short: evicted, credit lingered"),
        (Case(3).maker(ran=98.1, ended=98.2).block(98.1, gone=98.3), "short: unexplained"),
        (
            Case(3).maker(ran=98.1, ended=98.4).block(98.1, gone=98.5).struck(replica_lost=[98.2]),
            "short: credit of a lost outcome",
        ),
        (Case(4, matched=3).block(100.2), "over: made while it waited"),
        (Case(4, matched=3).block(99.9), "over: block not yet reported"),
        (Case(4, matched=3).block(98.0), "over: unexplained"),
        (Case(4, matched=3).block(99.9).indexed(), "over: was in the index: unexplained"),
        (Case(4, matched=3), "over: not in the table: unexplained"),
    ],
)
def test_a_cause_needs_its_evidence(case: Case, cause: str) -> None:
    assert case.cause == cause


def test_another_prompt_is_never_explained() -> None:
    case = Case(4)
    case.engine.stays["r"].chain = CHAIN[:2]
    assert case.cause == "another prompt: unexplained"


def test_a_prompt_that_a_replica_did_not_hash_is_never_explained() -> None:
    """A Redis that has just come back explains nothing: replicas keep their tokenizers."""
    case = Case(4, matched=0).struck(redis_back=[AT - 1])
    case.index.bookings["r"] = replace(case.index.bookings["r"], chain=())
    assert case.cause == "another prompt: unexplained"


def test_a_request_that_the_witness_did_not_see_is_unexplained_unless_redis_died_then() -> None:
    case = Case(4)
    del case.index.bookings["r"]
    for strikes, cause in (
        (Strikes(redis_lost=[99.5]), "decided as Redis was killed"),
        (Strikes(redis_lost=[90.0]), "no decision: unexplained"),
    ):
        verdict = Judge(case.index, {"w": case.engine}, strikes).verdict()
        assert dict(verdict.causes) == {cause: 1}
        assert bool(verdict.odd) == ("unexplained" in cause)


def test_a_probe_is_nobodys_decision() -> None:
    case = Case(4)
    del case.index.bookings["r"]
    case.engine.stays["r"].probe = True
    assert not Judge(case.index, {"w": case.engine}, Strikes()).verdict().causes


@pytest.mark.parametrize(("checkpoints", "counts"), [(CHAIN[:1], True), ((), False)])
def test_a_lease_makes_blocks_only_while_it_has_checkpoints(checkpoints: tuple[bytes, ...], counts: bool) -> None:
    """A reservation whose blocks were reported explains no block that is missing."""
    case = Case(3).maker(ran=99.0, ended=None)
    lease = Lease(1, 1, 0, 10, 0, 130, Stage.STARTED, "w", checkpoints).pack()
    case.index.place = 6
    case.index._lease(99.2, [b"HSET", b"wf:{m}:lease", b"m", lease], [])
    assert case.cause == ("short: its maker is at it" if counts else "short: unexplained")
