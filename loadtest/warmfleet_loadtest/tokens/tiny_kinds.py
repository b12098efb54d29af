"""Small tokenizers of three kinds, trained here. They differ in the same ways as the tokenizers of real models.

qwen3: byte-level BPE with NFC, many added tokens and no begin token. llama3: byte-level BPE that looks for whole words
first (``ignore_merges``), takes three digits at a time and adds a begin token by its post-processor. llama2: BPE over
"▁" words as in SentencePiece, with bytes as the last resort and a begin token. Each has a chat template of its family
(``data/kind_*.jinja``).
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

CORPUS_FILES = 60  # number of modules of the standard library to train on, which takes 2 s
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Kind:
    """A tokenizer's form. special: added tokens that decoding may skip. plain: others. bos, eos: two of ``special``."""

    tokenizer_class: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    digits: int = 1


KINDS = {
    "qwen3": Kind(
        "Qwen2Tokenizer",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box_start|>", "<|box_end|>", "<|vision_pad|>"),
        eos="<|im_end|>",
        plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    "llama3": Kind(
        "PreTrainedTokenizerFast",
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            *("<|eom_id|>", "<|python_tag|>", *[f"<|reserved_special_token_{n}|>" for n in range(32)]),
        ),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        digits=3,
    ),
    "llama2": Kind("LlamaTokenizer", ("<unk>", "<s>", "</s>"), eos="</s>", bos="<s>"),
}


def save_tokenizer(folder: Path, name: str, vocabulary: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja of one kind. Takes about 3 s."""
    kind = KINDS[name]
    tokenizer = _sentencepiece(kind, vocabulary) if name == "llama2" else _byte_level(kind, vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config: dict[str, Any] = {"tokenizer_class": kind.tokenizer_class, "bos_token": kind.bos, "eos_token": kind.eos}
    if name == "llama2":
        config |= {"add_bos_token": True, "add_eos_token": False, "legacy": True, "unk_token": "<unk>"}
    config |= {"clean_up_tokenization_spaces": name == "llama3", "model_max_length": 2**40}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = resources.files("warmfleet_loadtest").joinpath("data", f"kind_{name}.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)


def corpus() -> list[str]:
    return sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:CORPUS_FILES]


def _byte_level(kind: Kind, vocabulary: int) -> dict[str, Any]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    numbers = r"\p{N}" if kind.digits == 1 else rf"\p{{N}}{{1,{kind.digits}}}"
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind.bos is not None))
    if kind.bos is None:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORDS + numbers + _REST), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train(
        corpus(),
        BpeTrainer(
            vocab_size=vocabulary - len(kind.special) - len(kind.plain),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kind.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in kind.plain])
    if kind.bos is not None:
        begin = (kind.bos, tokenizer.token_to_id(kind.bos))
        tokenizer.post_processor = processors.TemplateProcessing(f"{kind.bos} $A", None, [begin])
    return dict(json.loads(tokenizer.to_str()))


def _sentencepiece(kind: Kind, vocabulary: int) -> dict[str, Any]:
    """Train a BPE on "▁" words. As in SentencePiece, the special tokens and the 256 bytes have the first ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    head = [*kind.special, *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = BpeTrainer(vocab_size=vocabulary, special_tokens=head, limit_alphabet=400, show_progress=False)
    raw.train(corpus(), trainer)
    made: dict[str, Any] = json.loads(raw.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in kind.special]
    marks = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    made["normalizer"], made["pre_tokenizer"] = {"type": "Sequence", "normalizers": marks}, None
    begin = [{"SpecialToken": {"id": kind.bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {kind.bos: {"id": kind.bos, "ids": [1], "tokens": [kind.bos]}},
    }
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    made["decoder"] = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    return made
