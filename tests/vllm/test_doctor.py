"""``warmfleet doctor`` on real vLLM: all well, and four things that an operator gets wrong."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import PATIENT_SECONDS, running_replicas

from warmfleet.cli.doctor.command import Plan, examine, secrets_of
from warmfleet.cli.doctor.finding import Report, State
from warmfleet.fleet import Fleet, connect
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.long(
        minutes=4,
        shows=(
            "`warmfleet doctor` finds nothing wrong with a real engine, and names fault and remedy of engines with "
            "a key, another seed, another template, without cached_tokens, prefix caching or plugin"
        ),
    ),
]

KEY = "sk-only-the-fleet-knows"
ALL_WELL = ("version", "plugin", "tokenizer", "template", "token ids", "index", "prefix caching", "token hand-off")


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with server(valkey_binary()) as url:
        yield url


async def doctor(redis_url: str, engine: VllmEngine, key: str = "") -> tuple[Report, str]:
    """Templates and tokenizers are not trusted: they run in processes of their own, as by default."""
    settings = Settings(redis_url=redis_url, models=(SERVED_NAME,), worker_api_key=key, decide_timeout_s=2.0)
    plan, out = Plan(settings, redis_url, engines=(engine.url,)), io.StringIO()
    report = Report(out=out, secrets=secrets_of(plan))
    await examine(plan, report)
    print(out.getvalue())
    assert KEY not in out.getvalue()
    return report, out.getvalue()


async def joined(redis_url: str, worker_id: str) -> bool:
    fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
    try:
        return any(worker.worker_id == worker_id and worker.server is not None for worker in await fleet.workers.read())
    finally:
        await fleet.close()


def named(report: Report, check: str, state: State, detail: str, remedy: str) -> bool:
    return any(
        (finding.check, finding.state) == (check, state) and detail in finding.detail and remedy in finding.remedy
        for _, finding in report.found
    )


async def test_real_engines(store: str) -> None:
    wrong = ("--api-key", KEY, "--no-enable-prompt-tokens-details", "--chat-template", "{{ messages[0].content }}")
    options = (
        EngineOptions(redis_url=store),
        EngineOptions(redis_url=store, worker_id="vllm-b", arguments=wrong, environment={"PYTHONHASHSEED": "7"}),
    )
    addresses = {"WARMFLEET_WORKER_API_KEY": KEY, "WARMFLEET_WORKER_ADDRESSES": "127.0.0.0/8"}
    more = {"WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS, **addresses}
    with running(options[0]) as [good], running_replicas(store, 1, 1, **more):
        report, printed = await doctor(store, good)
        assert report.status == 0, printed
        assert set(ALL_WELL) <= {finding.check for _, finding in report.found if finding.state is State.OK}, printed
        assert any(
            finding.detail.endswith("as predicted") for _, finding in report.found if finding.check == "prefix caching"
        ), printed
        with running(options[1]) as [bad]:
            await poll(lambda: joined(store, bad.worker_id), 60, "both halves have joined")
            report, printed = await doctor(store, bad)
            assert named(report, "key", State.FAULT, "wants an API key (401)", "WARMFLEET_WORKER_API_KEY"), printed
            assert named(report, "schemes", State.FAULT, "PYTHONHASHSEED=7: vllm-b.0", "the same"), printed
            assert named(report, "identity", State.FAULT, "chat_template.jinja", "--chat-template"), printed
            report, printed = await doctor(store, bad, KEY)
            off, remedy = "prompt_tokens_details is off", "--enable-prompt-tokens-details"
            assert named(report, "prompt_tokens_details", State.NOTE, off, remedy), printed
            assert named(report, "prefix caching", State.OK, "by the engine's metrics", ""), printed
            assert named(report, "index", State.OK, "under the hashes computed here", ""), printed
            assert named(report, "template", State.OK, "the same", ""), "it is the template that it announced"
    with running(EngineOptions(arguments=("--no-enable-prefix-caching",))) as [stock]:
        report, printed = await doctor(store, stock)
        remedy = "without --no-enable-prefix-caching"
        assert named(report, "prefix caching", State.FAULT, "the engine says so in its metrics", remedy), printed
        assert named(report, "plugin", State.FAULT, "runs without the plugin", "pip install ./worker_plugin"), printed
