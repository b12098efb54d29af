"""Write a small random Qwen2 model with a real tokenizer, so that real vLLM can run on a CPU with no download.

    python -m warmfleet_loadtest.tiny_model OUT [--kind llama3] [--window 64]

It needs torch, transformers and tokenizers (vLLM's own environment has them). The weights come from a fixed seed, and
the byte-level BPE is trained on the Python standard library, so the same interpreter always makes the same model. Its
answers are nonsense; its tokens, blocks, hashes and cache are real.
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmfleet_loadtest.tokens import tiny_kinds

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Shape:
    """The size of the network. The default has 0.6 M parameters; 8 layers of 256 have 6.6 M, with slower prefill.

    window: the number of earlier tokens that a token attends to in every second layer; 0: all tokens in all layers.
    """

    layers: int = 2
    hidden: int = 64
    vocabulary: int = 8_192
    positions: int = 32_768
    window: int = 0


def train_tokenizer(vocabulary: int) -> Any:
    """Train a byte-level BPE on the modules of the standard library. Takes about 4 s."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    corpus = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train(corpus, trainer)
    return tokenizer


def save_tokenizer(folder: Path, shape: Shape) -> None:
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer = fast(
        tokenizer_object=train_tokenizer(shape.vocabulary),
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        model_max_length=shape.positions,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def save_network(folder: Path, shape: Shape, kind: str) -> int:
    """Write a network with random weights. Returns the number of its parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    family = "Gemma3" if shape.window else "Llama" if kind.startswith("llama") else "Qwen2"
    config: Any = getattr(transformers, f"{family}TextConfig" if shape.window else f"{family}Config")
    more: dict[str, Any] = {}
    if shape.window:
        layers = ["sliding_attention" if number % 2 == 0 else "full_attention" for number in range(shape.layers)]
        more = {"sliding_window": shape.window, "layer_types": layers, "head_dim": 32, "query_pre_attn_scalar": 32}
    network = getattr(transformers, f"{family}ForCausalLM")(
        config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=2 * shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=max(2, shape.hidden // 32),
            num_key_value_heads=2,
            max_position_embeddings=shape.positions,
            tie_word_embeddings=True,
            bos_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
            **more,
        )
    ).to(torch.float32)
    network.save_pretrained(folder)
    return sum(parameter.numel() for parameter in network.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write into; made if missing")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="8 for small (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=Shape.hidden, help="256 for small (default %(default)s)")
    parser.add_argument(
        "--kind",
        choices=["chatml", *tiny_kinds.KINDS],
        default="chatml",
        help="kind of tokenizer (default %(default)s)",
    )
    parser.add_argument("--window", type=int, default=0, help="sliding window of every second layer, in tokens")
    args = parser.parse_args()
    shape = Shape(layers=args.layers, hidden=args.hidden, window=args.window)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.kind == "chatml":
        save_tokenizer(args.out, shape)
    else:
        tiny_kinds.save_tokenizer(args.out, args.kind, shape.vocabulary)
    print(f"{args.out}: {save_network(args.out, shape, args.kind):,} parameters, {shape.vocabulary} tokens")


if __name__ == "__main__":
    main()
