"""What an engine without the plugin tells of its cache and of its process, by its /metrics."""

from __future__ import annotations

import math
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
_CREATED = re.compile(rb"^[\w:]+_created" + _VALUE + rb"$", re.MULTILINE)
_TGI = re.compile(rb"^tgi_", re.MULTILINE)
TGI_FACTS = "/info"


class EngineFacts(NamedTuple):
    """cache_tokens: that its cache holds, 0 if it does not tell. started: Unix time of its process, 0: not told.

    asks_info: its ``/info`` tells more (``from_info``). identity: as ``identity_of`` its page.
    """

    block_tokens: int = BLOCK_TOKENS
    cache_tokens: int = 0
    started: int = 0
    asks_info: bool = False
    identity: str = ""


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
    started, asks_info = _largest(_STARTED, page), bool(_TGI.search(page))
    return EngineFacts(block_tokens, cache_tokens, started, asks_info, identity_of(page))


def identity_of(page: bytes) -> str:
    """Figures on a page of /metrics that no other process has, and this one has on every page; empty without any.

    The client library for Python writes when the process started, in hundredths of a second, and when it made each
    counter, in microseconds. Engines that a script starts together may have the first in common, not both.
    """
    started, created = _values(_STARTED, page), _values(_CREATED, page)
    if len(started) != 1:
        return ""  # several processes answer as one, or nobody tells
    if not created and round(started[0], 2) == round(started[0], 6):
        return ""
    return f"{started[0]!r}/{min(created, default=0.0)!r}"


def from_info(facts: EngineFacts, page: bytes) -> EngineFacts:
    """The facts with what the ``/info`` of a TGI server tells. A page that cannot be read changes nothing."""
    try:
        tokens = int(orjson.loads(page)["max_batch_total_tokens"])
    except (ValueError, KeyError, TypeError):
        return facts
    return facts._replace(cache_tokens=max(tokens, 0))


def _largest(pattern: re.Pattern[bytes], page: bytes) -> int:
    """The largest value of a metric as a whole number, 0 if it has none."""
    return int(max(_values(pattern, page), default=0))


def _values(pattern: re.Pattern[bytes], page: bytes) -> list[float]:
    """The finite values that a pattern finds."""
    values = []
    for text in pattern.findall(page):
        try:
            values.append(float(text))
        except ValueError:
            continue
    return [value for value in values if math.isfinite(value)]
