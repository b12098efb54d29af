"""The bench ``picker``: how it sums up its rounds."""

from __future__ import annotations

from tests.bench.bench_picker import ALONE, DUPLEX, ENDED, KINDS, OWN, Way, figures


def way(name: str, replica_us: float, envoy_us: float) -> Way:
    """A way on which each further chunk takes a tenth of a plain request."""
    made = Way(name, 0, told=True)
    for kind, (chunks, gap_ms) in KINDS.items():
        factor = 1 + chunks / 10 * bool(gap_ms)
        made.spent[kind] = [(noise * factor * replica_us, factor * envoy_us) for noise in (1.0, 3.0, 1.0)]
    made.latency_ms = [1.0, envoy_us / 10, 9.0]
    return made


def test_ratios_are_within_rounds_and_chunks_are_differences() -> None:
    found = figures([way(OWN, 100, 0), way(ALONE, 0, 50), way(DUPLEX, 150, 70), way(DUPLEX + ENDED, 120, 60)])
    assert found["over_own_ended"] == 1.2
    assert (found["over_own_plain"], found["over_own_at_once"], found["over_own_streamed"]) == (1.5, 1.5, 1.5)
    assert found["us_chunk"] == 15.0
    assert found[DUPLEX]["added_ms"] == 2.0
    assert found[ALONE] == {
        "envoy_us_plain": 50,
        "envoy_us_at_once": 50,
        "envoy_us_stream": 140,
        "envoy_us_chunk": 5.0,
    }
    assert "envoy_us_plain" not in found[OWN]
