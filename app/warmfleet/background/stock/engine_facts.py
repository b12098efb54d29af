"""What an engine without the plugin tells of its cache, by its /metrics."""

from __future__ import annotations

import re
from typing import NamedTuple

import orjson

BLOCK_TOKENS = 16  # vLLM's default, and the blocks by which an engine's prompts are counted that tells nothing
_VALUE = rb"(?:\{[^}\n]*\})? ([0-9.eE+-]+)"
_VLLM = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_VLLM_BLOCK_TOKENS = re.compile(rb'\bblock_size="(\d+)"')
_VLLM_BLOCKS = re.compile(rb'\bnum_gpu_blocks="(\d+)"')
_SGLANG_TOKENS = re.compile(rb"^sglang:max_total_num_tokens" + _VALUE, re.MULTILINE)
_TENSORRT_BLOCKS = re.compile(rb"^trtllm_kv_cache_max_blocks" + _VALUE, re.MULTILINE)
_TENSORRT_BLOCK_TOKENS = re.compile(rb"^trtllm_kv_cache_tokens_per_block" + _VALUE, re.MULTILINE)
_STARTED = re.compile(rb"^process_start_time_seconds" + _VALUE, re.MULTILINE)
_TGI = re.compile(rb"^tgi_", re.MULTILINE)
TGI_FACTS = "/info"


class EngineFacts(NamedTuple):
    """cache_tokens: that its cache holds, 0 if it does not tell. started: Unix time of its process, 0: not told.

    asks_info: its ``/info`` tells more (``from_info``).
    """

    block_tokens: int = BLOCK_TOKENS
    cache_tokens: int = 0
    started: int = 0
    asks_info: bool = False


def from_metrics(page: bytes) -> EngineFacts:
    """What a page of /metrics tells, of vLLM, SGLang or TensorRT-LLM. Several ranks behind one URL have one cache each:
    their sizes count together for vLLM, and as one for the others, which do not say which are ranks."""
    block_tokens, cache_tokens = BLOCK_TOKENS, 0
    for config in _VLLM.findall(page):
        size, blocks = _VLLM_BLOCK_TOKENS.search(config), _VLLM_BLOCKS.search(config)
        block_tokens = int(size[1]) if size and int(size[1]) else block_tokens
        cache_tokens += block_tokens * int(blocks[1]) if blocks else 0
    if sglang := _largest(_SGLANG_TOKENS, page):
        cache_tokens = sglang  # its pages may be of one token: prompts are counted by larger blocks all the same
    if (blocks_of := _largest(_TENSORRT_BLOCKS, page)) and (size_of := _largest(_TENSORRT_BLOCK_TOKENS, page)):
        block_tokens, cache_tokens = size_of, size_of * blocks_of
    return EngineFacts(block_tokens, cache_tokens, _largest(_STARTED, page), bool(_TGI.search(page)))


def from_info(facts: EngineFacts, page: bytes) -> EngineFacts:
    """The facts with what the ``/info`` of a TGI server tells. A page that cannot be read changes nothing."""
    try:
        tokens = int(orjson.loads(page)["max_batch_total_tokens"])
    except (ValueError, KeyError, TypeError):
        return facts
    return facts._replace(cache_tokens=max(tokens, 0))


def _largest(pattern: re.Pattern[bytes], page: bytes) -> int:
    """The largest value of a metric as a whole number, 0 if it has none."""
    values = []
    for text in pattern.findall(page):
        try:
            values.append(int(float(text)))
        except (ValueError, OverflowError):
            continue
    return max(values, default=0)
