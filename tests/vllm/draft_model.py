"""A draft model of the form EAGLE for a tiny model, with random weights: what an engine caches beside it is real."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

OF_THE_TARGET = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "bos_token_id", "eos_token_id"),
)


def make_draft_model(folder: Path, target: Path) -> str:
    """Write a draft model of one layer for the model in the folder ``target``; return the value of
    ``--speculative-config`` with which an engine drafts two tokens.
    """
    of_target = json.loads((target / "config.json").read_text())
    config = {name: of_target[name] for name in OF_THE_TARGET}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "dtype": "float32"}
    shapes = {"fc": (hidden, 2 * hidden)}
    shapes |= {f"layers.0.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
    shapes |= {"layers.0.mlp.gate_proj": (inner, hidden), "layers.0.mlp.up_proj": (inner, hidden)}
    shapes |= {"layers.0.mlp.down_proj": (hidden, inner)}
    rng = np.random.default_rng(1)
    weights = {f"{name}.weight": rng.normal(0, 0.02, shape).astype("float32") for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = np.ones(hidden, "float32")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return json.dumps({"method": "eagle", "model": str(folder), "num_speculative_tokens": 2})
