"""Requests that only workers with certain labels may serve, and a replica that prefers workers by a label."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.errors import BadArgument
from warmfleet.fleet import connect
from warmfleet.fleet.replays import Replays
from warmfleet.fleet.worker.records import Records
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.replicas.replica import Replica

LABELS = "X-Warmfleet-Labels"


async def places(router: Replica, model: str, count: int = 6, **headers: str) -> set[str]:
    """The workers that serve ``count`` new prompts."""
    found = set()
    for number in range(count):
        body = {"model": model, "prompt": f"{number} of {sorted(headers.items())}", "max_tokens": 1}
        status, told, answer = await router.post(body, **headers)
        assert status == 200, answer
        found.add(told["x-warmfleet-worker"])
    return found


async def test_two_zones_are_filtered_and_preferred(valkey_url: str, model: str, tmp_path: Path) -> None:
    log = tmp_path / "decisions"
    preferred: dict[str, Any] = {"prefer": ("zone=eu-1a:0.5",), "decision_log": str(log)}
    async with (
        engine(model) as near,
        engine(model) as far,
        replica(valkey_url, model, f"{near.url}#zone=eu-1a&tier=gold", f"{far.url}#zone=eu-1b", **preferred) as router,
    ):
        workers = json.loads((await router.get("/workers"))[1])["models"][0]["workers"]
        named = {worker["labels"]["zone"]: worker["worker_id"] for worker in workers}
        a, b = named["eu-1a"], named["eu-1b"]
        assert await places(router, model) == {a}, "the preferred zone"
        assert await places(router, model, 3, **{LABELS: "zone=eu-1b"}) == {b}
        assert await places(router, model, 3, **{LABELS: "tier=gold,zone=eu-1a"}) == {a}

        body = {"model": model, "prompt": "a new one", "max_tokens": 1}
        status, _, answer = await router.post(body, **{LABELS: "zone=eu-1b,tier=gold"})
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (503, "no_worker")
        assert "has the labels tier=gold,zone=eu-1b" in error["message"]
        for wrong in ("zone", "zone=a b", "zone=a,zone=b", "zone=\u00e4"):
            status, _, answer = await router.post(body, **{LABELS: wrong})
            assert (status, json.loads(answer)["error"]["param"]) == (400, LABELS)

        status, _, answer = await router.post(body, "/explain")
        rows = {row["worker_id"]: row for row in json.loads(answer)["candidates"]}
        assert {name: row["terms"]["label_s"] for name, row in rows.items()} == {a: 0.0, b: 0.5}
        told = json.loads((await router.post(body, "/explain", **{LABELS: "zone=eu-1b"}))[2])
        assert [row["worker_id"] for row in told["candidates"]] == [b]
        status, _, answer = await router.post(body, "/explain", **{LABELS: "zone=eu-1c"})
        assert (status, "zone=eu-1c" in json.loads(answer)["error"]["message"]) == (503, True)
        asked = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        placed = json.loads((await router.post(asked, "/route", **{LABELS: "zone=eu-1b"}))[2])
        assert placed["worker"] == b

        await poll(lambda: log.read_bytes().count(b"\n") >= 12, 30, "the decisions are logged")
        records: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
        replays = Replays(connect(valkey_url, timeout_s=5))
        again = await replays.choices(records)
        await replays.close()
        assert [(candidate.worker_id, candidate.cost_s) for candidate in again] == [
            (candidate["worker_id"], candidate["cost_s"]) for candidate in records
        ]


@pytest.mark.parametrize("labels", [None, ["zone"], {"zone": 1}, {"zo ne": "a"}, {str(n): "a" for n in range(9)}])
def test_malformed_labels_of_a_record_cost_the_labels_and_not_the_worker(labels: object) -> None:
    text = json.dumps({"nonce": "n1", "labels": labels}).encode()
    assert Records("m").read([(b"w.0", text)], []) == ({"w.0": {"nonce": "n1"}}, {})
    good = json.dumps({"labels": {"zone": "a"}}).encode()
    assert Records("m").read([(b"w.0", good)], [])[0]["w.0"]["labels"] == {"zone": "a"}


@pytest.mark.parametrize(
    "text",
    ["zone=a", "zone=a:", "zone=a:x", "zone:1", ":1", "zone=a:0", "zone=a:1e3", "zone=a:-1", "a=b&c=d:1", "a=b:9999"],
)
def test_a_preference_is_a_label_and_its_seconds(text: str) -> None:
    with pytest.raises(BadArgument, match="WARMFLEET_PREFER"):
        Settings.from_environment({"WARMFLEET_PREFER": text})
    settings = Settings.from_environment({"WARMFLEET_PREFER": "zone=a:0.05, tier=gold:1"})
    assert settings.prefer == ("zone=a:0.05", "tier=gold:1")
