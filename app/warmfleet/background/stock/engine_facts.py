"""Reads the cache and the process of an engine without the plugin from its /metrics."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import orjson

BLOCK_TOKENS = 16  # tokens of a block by vLLM's default, which is taken for every engine that reports no size
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
    """An engine's facts, 0 if not reported. cache_tokens: size of the cache. started: Unix time of the process's start.

    asks_info: the size of the cache is on ``/info`` instead (``from_info``). identity: tells processes apart
    (``identity_of``).
    """

    block_tokens: int = BLOCK_TOKENS
    cache_tokens: int = 0
    started: int = 0
    asks_info: bool = False
    identity: str = ""


def from_metrics(page: bytes) -> EngineFacts:
    """Read the facts on a /metrics page of vLLM, SGLang or TensorRT-LLM. Ranks behind one URL have a cache each: sizes
    of vLLM's ranks are added; of other engines the largest counts: their pages do not tell which lines are ranks."""
    block_tokens, cache_tokens = BLOCK_TOKENS, 0
    for config in _VLLM.findall(page):
        size, blocks = _VLLM_BLOCK_TOKENS.search(config), _VLLM_BLOCKS.search(config)
        block_tokens = int(size[1]) if size and int(size[1]) else block_tokens
        cache_tokens += block_tokens * int(blocks[1]) if blocks else 0
    if sglang := _largest(_SGLANG_TOKENS, page):
        cache_tokens = sglang  # SGLang's cache pages may hold one token each, so blocks keep the size BLOCK_TOKENS
    if (blocks_of := _largest(_TENSORRT_BLOCKS, page)) and (size_of := _largest(_TENSORRT_BLOCK_TOKENS, page)):
        block_tokens, cache_tokens = size_of, size_of * blocks_of
    started, asks_info = _largest(_STARTED, page), bool(_TGI.search(page))
    return EngineFacts(block_tokens, cache_tokens, started, asks_info, identity_of(page))


def identity_of(page: bytes) -> str:
    """Return the figures on a page of /metrics that identify its process; empty if there are none.

    The client library for Python writes when the process started, in hundredths of a second, and when it made each
    counter, in microseconds. Engines that a script starts together may share the start time, but not both times.
    """
    started, created = _values(_STARTED, page), _values(_CREATED, page)
    if len(started) != 1:
        return ""  # several processes answer as one, or the page has no start time
    if not created and round(started[0], 2) == round(started[0], 6):
        return ""
    return f"{started[0]!r}/{min(created, default=0.0)!r}"


def from_info(facts: EngineFacts, page: bytes) -> EngineFacts:
    """Return the facts with the cache size by a TGI server's ``/info``. A page that cannot be read changes nothing."""
    try:
        tokens = int(orjson.loads(page)["max_batch_total_tokens"])
    except (ValueError, KeyError, TypeError):
        return facts
    return facts._replace(cache_tokens=max(tokens, 0))


def _largest(pattern: re.Pattern[bytes], page: bytes) -> int:
    """Return the largest value of a metric as a whole number, 0 if it has none."""
    return int(max(_values(pattern, page), default=0))


def _values(pattern: re.Pattern[bytes], page: bytes) -> list[float]:
    """Return the finite values that a pattern finds."""
    values = []
    for text in pattern.findall(page):
        try:
            values.append(float(text))
        except ValueError:
            continue
    return [value for value in values if math.isfinite(value)]
