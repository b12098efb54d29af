"""The seconds of a step of an engine: a nearly linear model, with coefficients that ``calibrate`` fits to real vLLM.

A step computes prompt tokens of some requests and one token for each decoding request. Because of attention, a prompt
token costs more the more context it sees, and a decoded token the longer its sequence is.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step. prefill_pairs: pairs of a computed prompt token and a token that it attends to."""

    prefill_tokens: int = 0
    prefill_requests: int = 0
    prefill_pairs: float = 0.0
    decode_requests: int = 0
    decode_context: int = 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds per step, per prompt token, per prompt in a step, per pair, per decoding request and per context token.

    request_s, request_token_s: the API server's time for a request and for each of its prompt tokens, before the engine
    core sees it; the API server has one thread, so requests wait for each other. first_token_s: from the end of a
    request's last prefill step to its first byte; no other request waits for that. weights_s: to read the model's
    weights, which each step does while it computes; ``calibrate`` leaves it 0, as its share is in base_s.
    """

    base_s: float
    prefill_token_s: float
    prefill_request_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_request_s: float = 0.0
    decode_context_s: float = 0.0
    request_s: float = 0.0
    request_token_s: float = 0.0
    first_token_s: float = 0.0
    weights_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step."""
        compute_s = (
            self.prefill_token_s * work.prefill_tokens
            + self.prefill_request_s * work.prefill_requests
            + self.prefill_pair_s * work.prefill_pairs
            + self.decode_request_s * work.decode_requests
        )
        return self.base_s + max(self.weights_s, compute_s) + self.decode_context_s * work.decode_context

    def arrival_seconds(self, prompt_tokens: int) -> float:
        """Return the API server's time for a request, before the engine core sees it."""
        return self.request_s + self.request_token_s * prompt_tokens

    def scaled(self, factor: float) -> StepCosts:
        """Return the same engine, ``factor`` times slower."""
        return StepCosts(**{name: value * factor for name, value in asdict(self).items()})


#: ``fast`` is for tests. On ``demo`` a cache hit is plainly visible. ``trace`` suits replays of the conversation
#: trace at 6 to 8 times its speed with eight engines, ``agents`` replays of the agents' trace at 4 to 16 times.
#: ``trace-fcfs`` and ``agents-fcfs`` are for ``FcfsScheduler``; ``trace-fcfs`` keeps eight engines busy for 61 % of
#: the time at 6 times the trace's speed, under a balancer that counts requests. ``vllm-cpu-small`` is fitted to a real
#: vLLM. ``h100-8b`` is an 8B model on one H100, from data sheets: 16 GB of weights, 16 GFLOP and 128 KiB of KV a token;
#: ``agents-8b`` is the same where a token of a prompt stands for 16 and that of an answer for 4, in trace seconds.
PRESETS = {
    "fast": StepCosts(base_s=0.0005, prefill_token_s=2e-6, decode_request_s=5e-5),
    "trace": StepCosts(base_s=0.002, prefill_token_s=7.95e-4, decode_request_s=1e-4, decode_context_s=1e-7),
    "trace-fcfs": StepCosts(base_s=0.0, prefill_token_s=6.8e-4),
    "agents": StepCosts(base_s=0.002, prefill_token_s=1.2e-3, decode_request_s=1e-4, decode_context_s=1e-7),
    "agents-fcfs": StepCosts(base_s=0.0, prefill_token_s=1.2e-3),
    "demo": StepCosts(base_s=0.004, prefill_token_s=2.5e-4, decode_request_s=3e-4, decode_context_s=2e-8),
    "vllm-cpu-small": StepCosts(
        base_s=4.76e-3,
        prefill_token_s=1.015e-4,
        prefill_pair_s=1.04e-7,
        decode_request_s=1.52e-4,
        decode_context_s=4.8e-7,
        request_s=3.03e-3,
        request_token_s=1.6e-6,
    ),
    "h100-8b": StepCosts(
        base_s=0.002,
        weights_s=0.0055,
        prefill_token_s=3e-5,
        prefill_pair_s=1e-9,
        decode_request_s=3e-5,
        decode_context_s=4.9e-8,
    ),
    "agents-8b": StepCosts(
        base_s=0.008,
        weights_s=0.022,
        prefill_token_s=4.8e-4,
        prefill_pair_s=2.56e-7,
        decode_request_s=1.2e-4,
        decode_context_s=3.1e-6,
    ),
}


def load_costs(name: str) -> StepCosts:
    """Return the costs for ``name``: a preset, a factor by which ``demo`` is slowed, or a file of ``calibrate``.

    Raises ValueError.
    """
    if name in PRESETS:
        return PRESETS[name]
    if re.fullmatch(r"\d+(\.\d+)?", name):
        return PRESETS["demo"].scaled(float(name))
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name!r} is neither a file nor one of {', '.join(PRESETS)}")
    found = json.loads(path.read_text())
    known = {field.name for field in fields(StepCosts)}
    values = found.get("costs", found) if isinstance(found, dict) else {}
    if not isinstance(values, dict) or not values or set(values) - known:
        raise ValueError(f"{name}: expected an object with {', '.join(sorted(known))}")
    return StepCosts(**{key: float(value) for key, value in values.items()})
