"""The fit finds the coefficients that made the samples, and the check compares two engines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.engines.simulated import running

from warmfleet_loadtest import calibrate
from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.measuring.client import Client, Reply
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import PRESETS, StepCosts, StepWork, load_costs
from warmfleet_loadtest.traces.workload import Mix
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from pathlib import Path

    from warmfleet_loadtest.simulator.engine_core import EngineCore

LIMITS = Limits(2_048, 64, 8_192, 32)
TRUTH = StepCosts(0.008, 3e-4, 0.0, 2e-8, 6e-4, 2e-7, 0.004, 1e-6)


def made_by(costs: StepCosts) -> dict[str, object]:
    """Return the samples that ``measure`` would take on an engine with these costs."""

    def ttft(cached: int, new: int) -> float:
        done, tokens, total = cached, cached + new, costs.arrival_seconds(cached + new) + costs.first_token_s
        while done < tokens:
            chunk = min(LIMITS.step_tokens, tokens - done)
            total += costs.seconds(StepWork(chunk, 1, chunk * (done + chunk / 2), 0, 0))
            done += chunk
        return total

    def interval(streams: int, context: int) -> float:
        return costs.seconds(StepWork(0, 0, 0, streams, streams * (context + calibrate.DECODED_TOKENS // 2)))

    return {
        "prefill": [[0, new, ttft(0, new)] for new in calibrate.COLD_TOKENS]
        + [[cached, new, ttft(cached, new)] for cached, new in calibrate.CACHED_TOKENS],
        "decode": [[streams, context, interval(streams, context)] for streams, context in calibrate.STREAMS],
    }


def test_the_fit_finds_the_truth_again() -> None:
    found = calibrate.fit(made_by(TRUTH), LIMITS)
    for name in ("base_s", "prefill_token_s", "prefill_pair_s", "decode_request_s", "decode_context_s", "request_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name


def test_samples_that_cannot_be_times_are_refused() -> None:
    samples = made_by(TRUTH)
    samples["decode"] = [[1, 64, 0.0]]
    with pytest.raises(ValueError, match="not positive"):
        calibrate.fit(samples, LIMITS)


class EngineTimed(Client):
    """Answers take as long as the engine computes meanwhile, however busy this machine is."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__("demo")
        self._core = core

    async def complete(
        self, url: str, prompt: list[int] | str, output_tokens: int, late_s: float = 0.0, session: str = ""
    ) -> Reply:
        before = self._core.busy_s
        reply = await super().complete(url, prompt, output_tokens, late_s, session)
        return replace(reply, total_s=self._core.busy_s - before)


async def test_intervals_are_right_however_chunks_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated engine takes 4 ms for a step, for any number of streams."""
    monkeypatch.setattr(calibrate, "REPEATS", 3)
    scheme = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 32)
    config = EngineConfig(scheme, LIMITS, 1_024, StepCosts(0.004, 0.0))
    async with running(config) as up, EngineTimed(up.engine.core) as client:
        bench = calibrate.Measurements(client, up.url, 0)
        assert [await bench.decode(streams, 64) for streams in (1, 4)] == pytest.approx([0.004, 0.004], rel=0.25)


def test_coefficients_are_never_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert calibrate.non_negative(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])
    assert calibrate.non_negative(matrix, np.array([2.0, 3.0, 4.0])).tolist() == pytest.approx([1.0, 1.0])


LEAST_STEP_S = 0.003  # a step takes 4 ms, of which a first chunk that is late hides a part


async def measured(url: str) -> dict[str, Any]:
    """Measure decoding, and again when a busy machine delayed first chunks by more than the part that they may hide."""
    for _ in range(4):
        samples = await calibrate.measure(url, "demo", 0)
        if all(sample[2] >= LEAST_STEP_S for sample in samples["decode"]):
            break
    return samples


async def test_measuring_and_checking_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the simulator twice, so the quantiles agree."""
    monkeypatch.setattr(calibrate, "REPEATS", 2)  # the default of seven is for a machine with other work
    monkeypatch.setattr(calibrate, "STREAMS", calibrate.STREAMS[::3])
    scheme = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 32)
    config = EngineConfig(scheme, LIMITS, 1_024, StepCosts(0.004, 2e-5))
    async with running(config) as up:
        samples = await measured(up.url)
        (line,) = await calibrate.check(up.url, "demo", config, [Mix(30.0, 1.5, 2)])
    assert [sample[0] for sample in samples["decode"]] == [streams for streams, _context in calibrate.STREAMS]
    assert all(sample[2] >= LEAST_STEP_S for sample in samples["decode"])
    assert line["real_hit"] == pytest.approx(line["sim_hit"], abs=0.05)
    assert line["real_errors"] == line["sim_errors"] == 0
    assert {"p50_error", "p90_error", "real_p50_ms", "sim_p90_ms"} <= set(line)


def test_the_fit_command_writes_what_the_engine_reads(tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    samples.write_text(json.dumps(made_by(TRUTH)))
    out = tmp_path / "costs.json"
    assert calibrate.main(["fit", str(samples), "--out", str(out)]) == 0
    assert load_costs(str(out)).base_s == pytest.approx(0.008, rel=0.05)


def test_costs_by_name_factor_or_file(tmp_path: Path) -> None:
    assert load_costs("fast") is PRESETS["fast"]
    assert load_costs("2") == PRESETS["demo"].scaled(2.0)
    bad = tmp_path / "bad.json"
    bad.write_text('{"prefill": 1}')
    for name in ("nothing", str(bad)):
        with pytest.raises(ValueError, match=r"neither a file|expected an object"):
            load_costs(name)


def test_an_engine_that_does_not_answer_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = ["--url", "http://127.0.0.1:9", "--model", "demo"]
    assert calibrate.main(["measure", *nobody, "--out", str(tmp_path / "samples.json")]) == 2
    assert "error: http://127.0.0.1:9: ClientConnectorError" in capsys.readouterr().err
    assert calibrate.main(["check", *nobody, "--costs", "fast", "--seconds", "1", "--rate", "5"]) == 2
    assert "no request of the real engine was answered" in capsys.readouterr().err
