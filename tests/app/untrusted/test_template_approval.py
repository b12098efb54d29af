"""Workers bring templates that are not approved: the harm that these can do, and the effect of an approval."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import jinja2
import pytest
from tests.support.engines.plugin_worker import TOKENIZER, worker
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT
from tests.support.replicas.replica import Replica, replica

from warmfleet.background.upkeep import follow_approvals
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.untrusted import template_approval
from warmfleet.untrusted.template_approval import Templates
from warmfleet_worker.tracker import Tracker

pytestmark = pytest.mark.usefixtures("patience")

LISTED = ("127.0.0.0/8",)  # the operator lists the engines, because these report no probe in their streams
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HOURS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
BOMB = "{% if messages[-1].content == 'boom' %}" + HOURS + "{% endif %}" + PLAIN
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def sha256(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


async def chat(router: Replica, content: str, model: str = "served") -> tuple[int, int]:
    """Status of the answer, and the prompt tokens that the router counted."""
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    status, headers, _ = await router.post(body, "/v1/chat/completions")
    return status, int(headers["x-warmfleet-prompt-tokens"])


async def state(router: Replica) -> str:
    return str(json.loads((await router.get("/workers"))[1])["models"][0]["template"])


# ------------------------------------------------ a whole replica


async def test_a_template_that_loops_for_ever_harms_one_request(valkey_url: str) -> None:
    model = "served"
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, blocks_timeout_s=1.0, approved_templates=(), worker_addresses=LISTED) as router,
        worker(valkey_url, model, upstream.url, Tracker(), template=BOMB, tokenizer=TOKENIZER),
    ):
        await router.exact()
        await router.routable(1)
        assert await state(router) == "sandbox"
        _, tokens = await chat(router, "hello")
        bad = asyncio.ensure_future(chat(router, "boom"))
        await asyncio.sleep(0.05)
        others = [asyncio.ensure_future(chat(router, "hello")) for _ in range(5)]
        rounds = 0
        while not bad.done():
            assert (await router.get("/livez"))[0] == 200
            ids = {"model": model, "prompt": list(range(100))}
            assert (await router.post(ids))[1]["x-warmfleet-prompt-tokens"] == "100"
            rounds += 1
        assert rounds > 3, "neither the event loop nor other requests wait for it"
        assert (await bad)[0] == 200
        for answer in await asyncio.gather(*others):
            assert answer == (200, tokens), "identified exactly, by the next process"
        assert await router.metric('warmfleet_load_only_requests_total{reason="template_limit"}') == 1
        assert await router.metric('warmfleet_template_limits_total{limit="time"}') == 1
        for _ in range(2):
            assert (await chat(router, "boom"))[0] == 200
        assert await state(router) == "held back"
        processes = await router.metric("warmfleet_template_processes_total")
        assert (await chat(router, "hello"))[0] == 200
        assert await router.metric("warmfleet_template_processes_total") == processes > 0, "none is started for it"
        assert (await router.post({"model": model, "prompt": "text"}))[0] == 200
        await router.unloaded()


async def test_approving_takes_a_template_in_and_revoking_puts_it_out(valkey_url: str, model: str) -> None:
    async with (
        engine("served") as upstream,
        replica(valkey_url, model, blocks_timeout_s=0.3, approved_templates=(), worker_addresses=LISTED) as router,
        worker(valkey_url, model, upstream.url, Tracker(), template=PLAIN, tokenizer=TOKENIZER),
    ):
        await router.exact()
        await router.routable(1)
        for change, wanted in ((router.fleet.operator.approve, "approved"), (router.fleet.operator.revoke, "sandbox")):
            await change([sha256(PLAIN)])

            async def seen(wanted: str = wanted) -> bool:
                return await state(router) == wanted

            await poll(seen, 20, wanted)
            assert (await chat(router, "hello", model))[1] > 1
        assert await router.metric("warmfleet_template_processes_total") == 2
        assert await router.metric("warmfleet_load_only_requests_total") == 0


async def test_a_setting_approves(valkey_url: str, model: str) -> None:
    async with (
        engine("served") as upstream,
        replica(valkey_url, model, approved_templates=(sha256(PLAIN),)) as router,
        worker(valkey_url, model, upstream.url, Tracker(), template=PLAIN, tokenizer=TOKENIZER),
    ):
        await router.exact()
        assert await state(router) == "approved"
        assert await router.metric("warmfleet_template_processes_total") == 0


# ------------------------------------------------ the parts


def pools_of(*fleets: Fleet) -> Pools:
    return Pools([Pool(fleet.keys.tag, fleet, DegradedMode(1.0)) for fleet in fleets])


async def test_approvals_outlive_redis_but_not_their_revocation(fleet: Fleet) -> None:
    pools = pools_of(fleet)
    templates = Templates(Metrics(), approved=["0" * 64])
    template = await templates.take(PLAIN.encode(), "auto")
    await fleet.operator.approve([sha256(PLAIN)])
    assert template.local is None
    await follow_approvals(pools, templates)
    assert template.local is not None
    assert template.sandbox._child is None
    await fleet.redis.set(fleet.keys.operator_approved, "not a set")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await follow_approvals(pools, templates)
    assert templates.is_approved(sha256(PLAIN))
    await fleet.redis.delete(fleet.keys.operator_approved)
    await follow_approvals(pools, templates)
    assert template.local is None
    assert templates.is_approved("0" * 64)
    assert await template.render(MESSAGES, {}, {}) == "<user>hello"
    await templates.close()


async def test_a_revocation_waits_for_no_other_models_template(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Getting ready to run elsewhere may take seconds: until then, a revoked template must not run here either."""
    other = Fleet(fleet.redis, f"{fleet.keys.tag.replace('~', '/')}#other", timeouts=PATIENT)
    pools = pools_of(other, fleet)
    templates, approved_meanwhile = Templates(Metrics()), []
    await fleet.operator.approve([sha256(PLAIN)])
    await follow_approvals(pools, templates)
    await templates.take(PLAIN.encode(), "auto")

    async def settle(_self: Templates, _template: object) -> None:
        approved_meanwhile.append(templates.is_approved(sha256(PLAIN)))

    monkeypatch.setattr(Templates, "_settle", settle)
    await other.operator.approve(["1" * 64])
    await fleet.operator.revoke([sha256(PLAIN)])
    await follow_approvals(pools, templates)
    assert approved_meanwhile == [False]
    await templates.close()


async def test_a_revocation_counts_at_once_even_if_another_model_cannot_be_read(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hard case: another template does not compile, another model's key in Redis is damaged, and the revoked template
    has left the cache, so that only an identity holds it.
    """
    monkeypatch.setattr(template_approval, "MAX_TEMPLATES", 2)
    damaged = Fleet(fleet.redis, f"{fleet.keys.tag.replace('~', '/')}#damaged", timeouts=PATIENT)
    await fleet.redis.set(damaged.keys.operator_approved, "not a set")
    pools = pools_of(damaged, fleet)
    templates, bad = Templates(Metrics()), "{{ x | bogus }}"
    held = await templates.take(PLAIN.encode(), "auto")
    await fleet.operator.approve([sha256(bad), sha256(PLAIN)])
    for _ in range(2):
        with pytest.raises(FleetUnavailable, match="WRONGTYPE"):
            await follow_approvals(pools, templates)
    with pytest.raises(jinja2.TemplateError):
        await templates.take(bad.encode(), "auto")
    await templates.take(b"1", "auto")
    assert held.local is not None
    templates._known.move_to_end((sha256(bad), "auto"), last=False)
    await fleet.operator.revoke([sha256(PLAIN)])
    with pytest.raises(FleetUnavailable, match="WRONGTYPE"):
        await follow_approvals(pools, templates)
    assert held.local is None
    assert held.state == "sandbox"
    assert await held.render(MESSAGES, {}, {}) == "<user>hello"
    await fleet.operator.approve([sha256(PLAIN)])
    with pytest.raises(FleetUnavailable, match="WRONGTYPE"):
        await follow_approvals(pools, templates)
    assert held.local is not None, "an identity uses the template, though it is not known any more"
    assert held.sandbox._child is None
    await templates.close()


async def test_what_was_approved_for_a_pool_that_has_left_counts_no_longer(fleet: Fleet) -> None:
    left = Fleet(fleet.redis, f"{fleet.keys.tag.replace('~', '/')}#left", timeouts=PATIENT)
    templates = Templates(Metrics())
    await left.operator.approve([sha256(PLAIN)])
    await follow_approvals(pools_of(left, fleet), templates)
    assert templates.is_approved(sha256(PLAIN))
    await follow_approvals(pools_of(fleet), templates)
    assert not templates.is_approved(sha256(PLAIN))
    await templates.close()


async def test_processes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_approval, "MAX_PROCESSES", 2)
    templates = Templates(Metrics())
    taken = [await templates.take(f"{number}{PLAIN}".encode(), "auto") for number in range(4)]
    await poll(
        lambda: sum(template.sandbox._child is not None for template in taken) == 2, 20, "two processes are left"
    )
    assert [await template.render(MESSAGES, {}, {}) for template in taken] == [f"{n}<user>hello" for n in range(4)]
    await templates.close()
    assert all(template.sandbox._child is None for template in taken)


async def test_templates_are_bounded_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_approval, "MAX_TEMPLATES", 2)
    templates = Templates(Metrics(), approved=[sha256("{% for %}")])
    first = await templates.take(b"1", "auto")
    assert await templates.take(b"1", "auto") is first
    for source in (b"2", b"3"):
        await templates.take(source, "auto")
    await poll(lambda: first.sandbox._child is None, 20, "the oldest is forgotten")
    assert (await Templates(Metrics(), approved="*").take(b"1", "auto")).local is not None
    with pytest.raises(ValueError, match="bytes"):
        await templates.take(b"x" * (template_approval.MAX_SOURCE_BYTES + 1), "auto")
    with pytest.raises(jinja2.TemplateError):
        await templates.take(b"{% for %}", "auto")
    await templates.close()
