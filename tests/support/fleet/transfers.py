"""Facts ``transfer`` of engines that pair: a prefill engine and a decode engine with NIXL."""

from __future__ import annotations

from dataclasses import replace

from warmfleet_worker.protocol.transfer import Transfer

SAME = (("NIXL connector", "14"), ("NIXL's hash", "ab"), ("model path", "/m"), ("vLLM", "0.32.0"))
PREFILL = Transfer(
    *("prefill", "NixlConnector", "", "pull", "379cd67b-8c00-4f94-8fd8-808530607a7c", "10.0.0.1", 5_600, 30),
    same=SAME,
)
DECODE = replace(PREFILL, role="decode", recomputes=True, engine_id="479cd67b-8c00-4f94-8fd8-808530607a7c_dp0")
