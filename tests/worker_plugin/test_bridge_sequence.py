"""Numbered batches: gaps, losses, repetitions and restarts, with an engine whose replay lacks some batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmfleet_worker.bridge.sequence import ReplayError, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Engine:
    """Batches are texts ``process.number``. kept: how many of them the engine can replay."""

    process: int = 0
    made: int = 0
    kept: int = 10_000
    replays: bool = True
    drop: set[int] = field(default_factory=set)  # numbers that the next replay loses on its way

    def payload(self, number: int) -> bytes:
        return f"{self.process}.{number}".encode()

    def publish(self) -> tuple[int, bytes]:
        self.made += 1
        return self.made - 1, self.payload(self.made - 1)

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        if not self.replays:
            raise ReplayError("none")
        drop, self.drop = self.drop, set()
        for number in range(max(start, self.made - self.kept), self.made):
            if number not in drop:
                yield number, self.payload(number)


class Heard:
    """Batches that the listener got from the followed process; None stands for a loss."""

    def __init__(self) -> None:
        self.batches: list[str | None] = []
        self.restarts = 0

    def batch(self, payload: bytes) -> None:
        self.batches.append(payload.decode())

    def lost(self) -> None:
        self.batches.append(None)

    def restarted(self) -> None:
        self.batches.clear()
        self.restarts += 1


def whole(engine: Engine) -> list[str]:
    return [engine.payload(number).decode() for number in range(engine.made)]


def followed(engine: Engine) -> tuple[Heard, Sequence]:
    heard = Heard()
    return heard, Sequence(heard, engine.replay)


def test_a_late_subscriber_gets_everything_by_replay() -> None:
    engine = Engine(made=50)
    heard, sequence = followed(engine)
    assert sequence.verify()
    assert heard.batches == whole(engine)


def test_a_gap_is_filled_and_what_comes_twice_is_dropped() -> None:
    engine = Engine()
    heard, sequence = followed(engine)
    sequence.live(*engine.publish())
    missed = [engine.publish() for _ in range(3)]
    sequence.live(*engine.publish())
    for batch in missed:
        sequence.live(*batch)
    assert heard.batches == whole(engine)
    assert (sequence.gaps, sequence.repeated, sequence.lost) == (1, 3, 0)


def test_a_loss_at_the_end_is_found_without_another_batch() -> None:
    engine = Engine()
    heard, sequence = followed(engine)
    sequence.live(*engine.publish())
    engine.publish()
    assert sequence.verify()
    assert heard.batches == whole(engine)


def test_a_replay_that_lacks_batches_is_asked_again() -> None:
    engine = Engine(made=20, drop={3, 4, 11})
    heard, sequence = followed(engine)
    sequence.verify()
    assert heard.batches == whole(engine)
    assert sequence.lost == 0


def test_what_the_engine_has_forgotten_is_a_loss() -> None:
    engine = Engine(kept=5)
    heard, sequence = followed(engine)
    sequence.live(*engine.publish())
    for _ in range(9):
        engine.publish()
    sequence.live(*engine.publish())
    assert heard.batches == ["0.0", None, *whole(engine)[6:]]
    assert sequence.lost == 5


def test_without_a_replay_a_gap_is_a_loss() -> None:
    engine = Engine(replays=False)
    heard, sequence = followed(engine)
    sequence.live(*engine.publish())
    engine.publish()
    sequence.live(*engine.publish())
    assert heard.batches == ["0.0", None, "0.2"]


def test_a_restart_is_seen_whatever_its_numbers_are() -> None:
    """A restart is noticed if the engine has fewer batches than before, as many, more, or none."""
    for after in (0, 2, 5, 6, 9):
        engine = Engine()
        heard, sequence = followed(engine)
        for _ in range(5):
            sequence.live(*engine.publish())
        engine.process, engine.made = 1, 0
        for _ in range(after):
            engine.publish()
        sequence.verify()
        assert (heard.restarts, heard.batches) == (1, whole(engine))


def test_a_restarted_engine_without_replay_shows_by_an_earlier_number() -> None:
    engine = Engine(replays=False)
    heard, sequence = followed(engine)
    for _ in range(5):
        sequence.live(*engine.publish())
    engine.process, engine.made = 1, 0
    sequence.live(*engine.publish())
    assert (heard.restarts, heard.batches) == (1, whole(engine))


steps = st.lists(
    st.sampled_from(["deliver", "deliver", "deliver", "drop", "repeat", "restart", "verify", "reply loses", "flood"]),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.integers(2, 12))
def test_whatever_happens_the_batches_are_those_of_one_process_in_order(steps: list[str], kept: int) -> None:
    engine = Engine(kept=kept)
    heard, sequence = followed(engine)
    delivered: list[tuple[int, bytes]] = []
    for step in steps:
        if step == "deliver":
            delivered.append(engine.publish())
            sequence.live(*delivered[-1])
        elif step == "drop":
            engine.publish()
        elif step == "flood":
            for _ in range(kept + 2):
                engine.publish()
        elif step == "repeat" and delivered:
            sequence.live(*delivered[len(delivered) // 2])
        elif step == "restart":
            engine.process, engine.made = engine.process + 1, 0
            sequence.verify()  # the connection broke, which the bridge notices
            delivered.clear()
        elif step == "reply loses":
            engine.drop = set(range(engine.made - 2, engine.made - 1))
        else:
            sequence.verify()
        known = [batch for batch in heard.batches if batch is not None]
        assert known == [engine.payload(int(batch.split(".")[1])).decode() for batch in known]
        numbers = [int(batch.split(".")[1]) for batch in known]
        assert numbers == sorted(set(numbers))
        joined = list(zip(heard.batches, heard.batches[1:], strict=False))
        assert all(int(b.split(".")[1]) == int(a.split(".")[1]) + 1 for a, b in joined if a and b)
    engine.drop = set()
    sequence.verify()
    assert sequence.last == engine.made - 1
