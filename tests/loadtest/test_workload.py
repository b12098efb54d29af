"""Mixed loads are reproducible, and their prompts share prefixes."""

from __future__ import annotations

from warmfleet_loadtest.traces.workload import Mix, mixed


def test_a_mix_is_reproducible_and_holds_its_rate() -> None:
    mix = Mix(rate=4.0, seconds=200.0, seed=5)
    made = mixed(mix)
    assert made == mixed(mix)
    assert 700 < len(made.arrivals) < 900
    assert all(0 < arrival.at_s <= 200 for arrival in made.arrivals)
    assert made != mixed(Mix(rate=4.0, seconds=200.0, seed=6))


def test_turns_extend_their_conversation_and_documents_are_asked_about_again() -> None:
    made = mixed(Mix(rate=4.0, seconds=200.0, seed=5))
    last: dict[int, list[int]] = {}
    extended = 0
    for arrival in made.arrivals:
        if arrival.session >= 0:
            prompt = list(arrival.prompt)
            before = last.get(arrival.session, [])
            assert prompt[: len(before)] == before
            extended += bool(before)
            last[arrival.session] = prompt
    assert extended > 150
    heads = [tuple(arrival.prompt[:64]) for arrival in made.arrivals if arrival.session < 0]
    assert len(set(heads)) < 0.7 * len(heads)
