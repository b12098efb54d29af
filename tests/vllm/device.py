"""The processor that the engines of these tests run on: the CPU, or with ENGINE_DEVICE=cuda a GPU.

All engines of a test share the one GPU, so each takes a small part of its memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """arguments: of ``vllm serve`` for every model. loaded: for a model that must have work to do; they make more of it
    where the device is faster. flood_rate: requests of mixed load a second, more than two such engines can do. rounds,
    slice_s: how often, and for how many seconds, each rule is tried under that load.
    """

    arguments: tuple[str, ...]
    loaded: tuple[str, ...]
    flood_rate: float
    flood_s: float
    rounds: int
    slice_s: float


#: Of models/small, the shape of Qwen2-7B, with random weights.
SEVEN_BILLION = {
    "num_hidden_layers": 28,
    "layer_types": ["full_attention"] * 28,
    "hidden_size": 3_584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
DEVICES = {
    "cpu": Device(("--dtype", "float32"), (), flood_rate=16, flood_s=15, rounds=4, slice_s=60),
    "cuda": Device(
        ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2 << 30)),
        ("--load-format", "dummy", "--hf-overrides", json.dumps(SEVEN_BILLION), "--gpu-memory-utilization", "0.35"),
        flood_rate=120,
        flood_s=8,
        rounds=2,
        slice_s=20,
    ),
}
DEVICE = DEVICES[os.environ.get("ENGINE_DEVICE", "cpu")]
