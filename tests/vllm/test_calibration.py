"""The simulator's step times, fitted to real vLLM and compared with it on mixed loads that the fit has not seen.

This needs a quiet machine: the simulator sleeps where vLLM computes, so other work slows only one of them. The fit
is left in out/vllm-cpu-small.json.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.vllm.engine import ROOT, SERVED_NAME, EngineOptions, running

from warmfleet_loadtest import calibrate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=30,
        shows="the simulator is as fast as the real vLLM that it was fitted to (needs a quiet machine)",
    ),
]

BLOCKS, MAX_MODEL_LEN = 1_024, 8_192


@pytest.mark.timeout(1_200)
def test_the_simulator_is_as_fast_as_the_engine_it_was_fitted_to(tmp_path: Path) -> None:
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    samples, costs = tmp_path / "samples.json", out / "vllm-cpu-small.json"
    arguments = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
    options = EngineOptions(
        model=ROOT / "models" / "small", blocks=BLOCKS, max_model_len=MAX_MODEL_LEN, arguments=arguments
    )
    with running(options) as [engine]:
        target = ["--url", engine.url, "--model", SERVED_NAME, "--blocks", str(BLOCKS)]
        assert calibrate.main(["measure", *target, "--out", str(samples)]) == 0
        engine.reset_prefix_cache()
        assert calibrate.main(["fit", str(samples), "--out", str(costs)]) == 0
        print(json.dumps(json.loads(costs.read_text())))
        off = []
        for seed, rate in enumerate(("1.5", "2")):
            engine.reset_prefix_cache()
            load = ["--rate", rate, "--seconds", "100", "--seed", str(201 + seed), "--costs", str(costs)]
            off += [rate] * calibrate.main(["check", *target, *load])
        assert off == [], "requests per second at which p50 or p90 is off by more than 15 %"
