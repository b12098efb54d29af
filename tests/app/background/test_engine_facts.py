"""A replica reads the size and the blocks of an engine's cache from the engine's own pages."""

from __future__ import annotations

import pytest

from warmfleet.background.stock.engine_facts import EngineFacts, from_info, from_metrics

VLLM = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="%b"} 1.0
process_start_time_seconds 1.76386300012e+09
"""
SGLANG = b"""sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 471258.0
sglang:page_size{model_name="m"} 1.0
sglang:cache_config_info{page_size="1",num_pages="471258"} 1.0
"""
TENSORRT = b"""trtllm_kv_cache_max_blocks{model_name="m"} 1000
trtllm_kv_cache_tokens_per_block{model_name="m"} 64
"""


@pytest.mark.parametrize(
    ("page", "facts"),
    [
        (VLLM % b"1000", EngineFacts(32, 32_000, 1_763_863_000)),
        (
            VLLM % b"1000" + (VLLM % b"500").replace(b'engine="0"', b'engine="1"'),
            EngineFacts(32, 48_000, 1_763_863_000),
        ),
        (VLLM % b"None", EngineFacts(32, 0, 1_763_863_000)),
        (SGLANG, EngineFacts(16, 471_258)),
        (TENSORRT, EngineFacts(64, 64_000)),
        (b"tgi_queue_size 0\n", EngineFacts(asks_info=True)),
        (b'process_start_time_seconds{pid="7"} 1763863000.0\n', EngineFacts(started=1_763_863_000)),
        (b"sglang:max_total_num_tokens e+-\nprocess_start_time_seconds 1e999\n", EngineFacts()),
        (b"\xff\x00 <html>", EngineFacts()),
    ],
    ids=["vllm", "two ranks", "no blocks yet", "sglang", "tensorrt", "tgi", "several processes", "nonsense", "no page"],
)
def test_what_a_page_of_metrics_tells(page: bytes, facts: EngineFacts) -> None:
    assert from_metrics(page) == facts


@pytest.mark.parametrize(
    ("page", "tokens"),
    [(b'{"max_batch_total_tokens":32000}', 32_000), (b'{"max_batch_total_tokens":null}', 5), (b"[]", 5), (b"<", 5)],
)
def test_what_tgi_tells_besides(page: bytes, tokens: int) -> None:
    assert from_info(EngineFacts(cache_tokens=5), page).cache_tokens == tokens
