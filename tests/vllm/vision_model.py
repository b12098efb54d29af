"""Write small random models that see images, with real processors, so that real vLLM serves them on a CPU.

    python tests/vllm/vision_model.py FOLDER

They are FOLDER/tiny-KIND, for every kind of ``MAKERS``; those that are there stay. It runs in ``.venv-vllm`` and needs
torchvision (``seeing.vision``). Answers are nonsense; tokens, hashes and the cache are real. Pixtral ends the rows of
an image with other tokens; Idefics3 cuts an image into tiles, with a text between; Gemma3 puts line feeds around an
image, which become one token with those beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "loadtest"))

VOCABULARY = 8_192
PIXELS = 28 * 28
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<image>")
MARKS_OF = {
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "idefics3": ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>"),
}
LINE_FEEDS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")  # tokens of Gemma3
TOKEN = {"qwen2_vl": "<|image_pad|>", "llava": "<image>", "pixtral": "[IMG]", "idefics3": "<image>"}
TOKEN |= {"gemma3": "<start_of_image>", "internvl": "<IMG_CONTEXT>"}
#: What processors of these models call their tokens.
NAMES_OF = {
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
}
PLACE = TOKEN | {"qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}PLACE"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TEXT: dict[str, Any] = SIZE | {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
TEXT |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
EYE: dict[str, Any] = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
EYE |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


def tokenizer(kind: str) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    from warmfleet_loadtest.tiny_model import END_OF_TEXT, TURN_END, train_tokenizer

    marks = MARKS + MARKS_OF.get(kind, ())
    line_feeds = LINE_FEEDS if kind == "gemma3" else ()
    trained = train_tokenizer(VOCABULARY - len(marks) - len(line_feeds))
    trained.add_special_tokens(list(marks))
    trained.add_tokens([AddedToken(line_feed, normalized=False) for line_feed in line_feeds])
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=trained,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.replace("PLACE", PLACE[kind]),
        extra_special_tokens=NAMES_OF.get(kind, {"image_token": TOKEN[kind]})
        | {
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )


def llava(words: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    seen = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**seen, image_size=56, patch_size=14, projection_dim=64),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    eye = hf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    rules = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaProcessor(eye, words, **rules, chat_template=words.chat_template)
    return hf.LlavaForConditionalGeneration(config), processor


def qwen2_vl(words: Any) -> tuple[Any, Any]:
    import transformers
    from transformers.models.qwen2_vl import image_processing_qwen2_vl, video_processing_qwen2_vl

    hf: Any = transformers
    still: Any = image_processing_qwen2_vl.Qwen2VLImageProcessor
    moving: Any = video_processing_qwen2_vl.Qwen2VLVideoProcessor
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [4, 6, 6], "rope_theta": 1_000_000.0}
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    ids = {name: words.convert_tokens_to_ids(mark) for name, mark in names.items()}
    config = hf.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=EYE, tie_word_embeddings=True, **ids
    )
    limits = {"min_pixels": 4 * PIXELS, "max_pixels": 64 * PIXELS}
    processor = hf.Qwen2VLProcessor(still(**limits), words, moving(**limits), chat_template=words.chat_template)
    return hf.Qwen2VLForConditionalGeneration(config), processor


def pixtral(words: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    seen = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig(**seen, image_size=224, patch_size=16),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    eye = hf.PixtralImageProcessor(patch_size={"height": 16, "width": 16}, size={"longest_edge": 224})
    processor = hf.PixtralProcessor(eye, words, patch_size=16, chat_template=words.chat_template)
    return hf.LlavaForConditionalGeneration(config), processor


def idefics3(words: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    seen = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.Idefics3Config(
        vision_config=seen | {"image_size": 56, "patch_size": 14},
        text_config=hf.LlamaConfig(**TEXT),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    eye = hf.Idefics3ImageProcessor(size={"longest_edge": 168}, max_image_size={"longest_edge": 56})
    processor = hf.Idefics3Processor(eye, words, image_seq_len=4, chat_template=words.chat_template)
    return hf.Idefics3ForConditionalGeneration(config), processor


def gemma3(words: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    seen = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    names |= {"image_token_index": "<image_soft_token>"}
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**seen, image_size=56, patch_size=14),
        text_config=hf.Gemma3TextConfig(
            **TEXT, head_dim=32, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
        ),
        mm_tokens_per_image=4,
        **{name: words.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    eye = hf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = hf.Gemma3Processor(eye, words, words.chat_template, image_seq_length=4)
    return hf.Gemma3ForConditionalGeneration(config), processor


def internvl(words: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    seen = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(**seen, image_size=[56, 56], patch_size=[14, 14]),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    size = {"height": 56, "width": 56}
    eye = hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=6)
    moving = hf.InternVLVideoProcessor(size=size)
    processor = hf.InternVLProcessor(eye, words, moving, image_seq_length=4, chat_template=words.chat_template)
    return hf.InternVLForConditionalGeneration(config), processor


MAKERS = {"llava": llava, "qwen2_vl": qwen2_vl, "pixtral": pixtral, "idefics3": idefics3, "gemma3": gemma3}
MAKERS |= {"internvl": internvl}


def main() -> None:
    import torch

    for kind, make in MAKERS.items():
        out = Path(sys.argv[1]) / f"tiny-{kind}"
        if (out / "processor_config.json").exists():
            continue
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        network, processor = make(tokenizer(kind))
        network.to(torch.float32).save_pretrained(out)
        processor.save_pretrained(out)


if __name__ == "__main__":
    main()
