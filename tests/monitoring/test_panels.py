"""Every panel has data: a real Prometheus reads a fleet that serves, is overloaded, and loses an engine and Redis."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import redis
from tests.monitoring import dashboards
from tests.support.polling import until
from tests.support.redis.topology import free_ports
from tests.support.run.os_tools import find

from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.stack import Plan, Stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.long(
    minutes=2,
    shows="a real Prometheus reads a running fleet: every line of every dashboard has data, before or while the fleet "
    "is overloaded, an engine dies and Redis is away (skipped where Debian's prometheus is missing)",
)

MISSING = (
    "prometheus is missing: cd $(mktemp -d) && apt-get download prometheus && dpkg-deb -x *.deb . && "
    "install -m 755 usr/bin/prometheus /usr/local/bin"
)
SCRAPE_S = 1
RATE_S = 5 * SCRAPE_S
WORDS = "The quick brown fox jumps over the lazy dog. "


@dataclass
class Prometheus:
    """A running Prometheus that reads these replicas every second."""

    url: str
    since: float = field(default_factory=time.time)

    def up(self) -> int:
        """The number of replicas that Prometheus could read at its last try."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": "sum(up)"}, timeout=10).json()
        return int(float(next((row["value"][1] for row in answer["data"]["result"]), "0")))

    def values(self, expr: str) -> list[float]:
        """All values of a query since the start, those of all its lines."""
        asked = expr.replace("[$__rate_interval]", f"[{RATE_S}s]").replace("$model", ".*").replace("$instance", ".*")
        span: dict[str, str | float] = {"query": asked, "start": self.since, "end": time.time(), "step": SCRAPE_S}
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=span, timeout=30).json()
        assert answer["status"] == "success", answer
        return [float(value) for line in answer["data"]["result"] for _, value in line["values"]]

    def empty_lines(self) -> dict[str, str]:
        """Title of each panel that has a line without any number -> its text for this case."""
        panels = [panel for text in dashboards.pages().values() for panel in json.loads(text)["panels"]]
        return {
            panel["title"]: panel["fieldConfig"]["defaults"].get("noValue", "")
            for panel in panels
            if any(all(map(math.isnan, self.values(line["expr"]))) for line in panel["targets"])
        }


@contextmanager
def prometheus(targets: Sequence[str], folder: Path) -> Iterator[Prometheus]:
    """Start a Prometheus. targets: host and port of each replica."""
    binary = find("prometheus") or pytest.skip(MISSING)
    job = {"job_name": "warmfleet", "static_configs": [{"targets": list(targets)}]}
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [job]}
    (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
    [port] = free_ports(1)
    argv = [binary, f"--config.file={folder}/prometheus.json", f"--storage.tsdb.path={folder}/data"]
    argv += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(argv, cwd=folder) as process:
        try:
            made = Prometheus(f"http://127.0.0.1:{port}")
            until(lambda: _reads(made, len(targets)), "Prometheus reads all replicas", 60)
            yield made
        finally:
            process.kill()


def _reads(made: Prometheus, replicas: int) -> bool:
    try:
        return made.up() == replicas
    except (httpx.HTTPError, ValueError, KeyError):  # Prometheus is not up yet
        return False


async def send(url: str, prompts: Sequence[str], **fields: Any) -> list[int]:
    """Send all at once; returns the status of each answer, 0 without one."""

    async def one(client: httpx.AsyncClient, prompt: str) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, **fields}
        try:
            return (await client.post(f"{url}/v1/completions", json=body)).status_code
        except httpx.HTTPError:
            return 0

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


async def for_a_while(url: str, seconds: float, **fields: Any) -> set[int]:
    """Send growing conversations for ``seconds``; returns the statuses of their answers."""
    ends, turns, seen = time.monotonic() + seconds, 1, set[int]()
    while time.monotonic() < ends:
        prompts = [f"{name} {WORDS * 4 * turns}" for name in "ABCD"]
        seen |= set(await send(url, prompts, stream=bool(turns % 2), **fields))
        turns = turns % 20 + 1
    return seen


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """Two replicas, three engines that are easily overloaded, and a short queue."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("WARMFLEET_QUEUE_MAX", "4")
    with Stack(Plan(engines=EngineOptions(count=3, step_time="trace", blocks=2_048))) as running:
        yield running


async def test_every_panel_has_data(fleet: Stack, tmp_path: Path) -> None:
    targets = [replica.operators.removeprefix("http://") for replica in fleet.replicas]
    with prometheus(targets, tmp_path) as reader:
        assert await for_a_while(fleet.address, 15) == {200}
        empty = reader.empty_lines()
        print("\nempty while all is well:", empty)
        assert [title for title, told in empty.items() if not told] == []

        assert await for_a_while(fleet.address, 5, truncate_prompt_tokens=64) == {200}
        refused = await send(fleet.address, [f"{number} {WORDS * 300}" for number in range(60)])
        assert {200, 429} <= set(refused)
        assert fleet.engines[0].child is not None
        fleet.engines[0].child.process.kill()
        await for_a_while(fleet.address, 8)
        with redis.Redis.from_url(fleet.redis_url) as store:
            store.shutdown(nosave=True)
        assert 200 in await for_a_while(fleet.address, 12)
        assert reader.empty_lines() == {}
