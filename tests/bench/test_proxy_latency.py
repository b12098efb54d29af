"""The bench ``proxy --latency`` in small: it reports every figure, of requests that are all there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.bench.bench_proxy import measure, parser
from tests.bench.proxy_latency import PARTS, Load

if TYPE_CHECKING:
    from collections.abc import Sequence


def sizes(requests: Sequence[bytes]) -> Counter[str]:
    return Counter("200b" if len(raw) < 1_000 else "500t" if len(raw) < 10_000 else "10kt" for raw in requests)


def test_the_mix_has_each_size_in_its_share_and_every_round_has_other_requests() -> None:
    load = Load(100.0, 0.5, 4, 2)
    first, second = load.requests("mix", 0), load.requests("mix", 1)
    assert sizes(first) == {"200b": 20, "500t": 20, "10kt": 10}
    assert len(set(first) | set(second)) == 100


@pytest.mark.long(minutes=1, shows="the bench of added latency reports every figure")
def test_a_small_run_reports_every_figure() -> None:
    told = measure(parser().parse_args(["--latency", "--quick"]))
    assert {"added_p50_ms", "added_p99_ms", "decision_ms", "cpu_ms", *PARTS} <= told.keys()
    assert all(told[part]["cpu_ms"] > 0 and told[part]["decision_ms"] > 0 for part in PARTS)
    assert 0 < told["added_p50_ms"] < told["added_p99_ms"]
