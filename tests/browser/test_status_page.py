"""The status page in a real browser, beside a real replica."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import expect
from tests.browser.fleets import FLEETS, HOSTILE_NAME, answer
from tests.browser.looking import DESK, PHONE, chromium, looking
from tests.browser.screenshots import shoot
from tests.support.engines.scripted import engine
from tests.support.replicas.replica import replica

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Page, Route
    from tests.browser.looking import Look
    from tests.support.replicas.replica import Replica

PATIENCE_MS = 20_000  # the page asks every two seconds, and a busy machine takes its time
KEY = "the operator's key: ключ"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


async def test_somebody_looks_at_a_fleet(valkey_url: str, model: str) -> None:
    """Workers come, change and are explained; nothing is wrong with the page; and it shows nothing without the key."""
    async with chromium() as browser:
        async with (
            engine(model) as upstream,
            replica(valkey_url, model, upstream.url, admin_port=1, snapshot_s=0.1) as router,
            looking(browser, router.operators) as look,
        ):
            await _workers_come_and_change(router, look, model)
            await _a_request_is_explained(router, look, model)
            assert await look.problems() == []
            await _an_outage_is_told_whatever_is_clicked(look)
            await _a_forgotten_key_shows_nothing(look)
        async with (
            replica(valkey_url, model, admin_port=1, admin_key=KEY) as router,
            looking(browser, router.operators) as look,
        ):
            await _the_key_is_asked_for(look)
            assert await look.problems() == []
            assert look.page.url == f"{router.operators}/status"


async def _workers_come_and_change(router: Replica, look: Look, model: str) -> None:
    rows, changes = look.page.locator("#workers tbody tr"), look.page.locator("#changes")
    await expect(rows).to_have_count(1)
    await expect(rows.first).to_contain_text("approximate")
    await router.fleet.workers.register("late-1", {"scheme_id": 1, "url": "http://127.0.0.1:9", "models": [model]}, 100)
    await expect(rows).to_have_count(2, timeout=PATIENCE_MS)
    await expect(changes).to_contain_text("late-1 joined")
    await router.fleet.workers.drain("late-1", draining=True)
    late = rows.filter(has=look.page.get_by_role("rowheader", name="late-1"))
    await expect(late).to_contain_text("nothing runs there any more", timeout=PATIENCE_MS)
    await expect(changes).to_contain_text("now draining")


async def _a_request_is_explained(router: Replica, look: Look, model: str) -> None:
    status, headers, _ = await router.post({"model": model, "prompt": PROMPT})
    assert status == 200
    decision = look.page.locator("#decisions > tbody > tr").first
    await expect(decision).to_contain_text(headers["x-request-id"], timeout=PATIENCE_MS)
    await expect(decision).to_contain_text(headers["x-warmfleet-worker"])
    await expect(decision).to_contain_text("lowest predicted")
    slow = look.page.locator("#slow > tbody > tr").first
    await expect(slow).to_contain_text(headers["x-request-id"])
    await expect(slow).to_contain_text("to the answer")
    await expect(slow).to_contain_text("status 200")
    await decision.locator("summary").press("Enter")
    await expect(decision.locator("details table")).to_be_visible()
    await expect(look.page.locator("#rungs [aria-current=step]")).to_have_count(1)


async def _an_outage_is_told_whatever_is_clicked(look: Look) -> None:
    page = look.page
    badge, notice = page.locator("#live"), page.locator("#notice")
    await answer(page, FLEETS["two models"]())
    await look.refresh()
    other = page.locator("#models").get_by_role("button").nth(1)
    await expect(other).to_be_visible()
    await page.route("**/status.json", _unwell)  # before the route of the figures, which stays
    await look.refresh()
    await expect(badge).to_have_text("no answer")
    await other.click()
    await expect(page.locator("#model-title")).to_contain_text("Llama")
    await expect(page.locator("#tiles")).to_contain_text(
        "1.3\u00a0s of work; the first goes to gpu-02.0 now, after 1.5\u00a0s"
    )
    await expect(badge).to_have_text("no answer")
    await expect(notice).to_be_visible()
    await page.get_by_role("button", name="Pause").click()
    await page.locator("#models").get_by_role("button").first.click()
    await expect(page.locator("#model-title")).to_contain_text("Qwen")
    await expect(page.locator("#tiles")).to_contain_text("; the first waits for gpu-02.0, 1.5\u00a0s so far")
    await expect(badge).to_have_text("paused")
    await expect(notice).to_be_visible()
    await page.unroute("**/status.json", _unwell)
    await page.get_by_role("button", name="Go on").click()
    await expect(badge).to_contain_text("live")
    await expect(notice).to_be_hidden()
    await page.unroute("**/status.json")


async def _unwell(route: Route) -> None:
    await route.fulfill(status=503, body="")


async def _a_forgotten_key_shows_nothing(look: Look) -> None:
    """The answer to a request with the key comes after the page has forgotten the key."""
    page, came, go_on, keyless, end = look.page, *(asyncio.Event() for _ in range(4))

    async def give(route: Route) -> None:
        if "authorization" in route.request.headers:
            came.set()
            await go_on.wait()
            await route.fulfill(status=200, content_type="application/json", body=json.dumps(FLEETS["two models"]()))
        else:
            keyless.set()
            await end.wait()
            await route.fulfill(status=401, body="")

    await page.evaluate("sessionStorage.setItem('warmfleet-operator-key', 'k')")
    await page.route("**/status.json", give)
    go_on.set()
    await page.reload()
    forget = page.get_by_role("button", name="Forget key")
    await expect(forget).to_be_visible()
    go_on.clear()
    came.clear()
    await look.refresh()
    await came.wait()
    await forget.click()
    await expect(page.locator("#shown")).to_be_hidden()
    go_on.set()
    await asyncio.wait_for(keyless.wait(), PATIENCE_MS / 1_000)
    assert await page.locator("#shown").is_hidden()
    end.set()
    await expect(page.locator("#key-form")).to_be_visible()
    await page.unroute("**/status.json")


async def _the_key_is_asked_for(look: Look) -> None:
    page, key = look.page, look.page.get_by_label("Operator's key")
    await key.fill("wrong")
    await page.get_by_role("button", name="Show the fleet").click()
    await expect(page.get_by_text("This is not the key.")).to_be_visible()
    await expect(page.locator("#shown")).to_be_hidden()
    await key.fill(KEY)
    await page.keyboard.press("Enter")
    await expect(page.locator("#workers")).to_contain_text("late-1")
    assert await page.evaluate("localStorage.length + document.cookie.length") == 0


@pytest.mark.long(minutes=1, shows="the status page in a browser: seven fleets, both themes, a phone, the keyboard")
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", FLEETS)
async def test_every_fleet_is_shown_without_a_fault(
    valkey_url: str, model: str, name: str, size: tuple[int, int]
) -> None:
    async with (
        replica(valkey_url, model, admin_port=1) as router,
        chromium() as browser,
        looking(browser, router.operators, size=size, path="/livez") as look,
    ):
        await answer(look.page, FLEETS[name]())
        await look.page.goto(f"{router.operators}/status")
        await expect(look.page.locator("#shown")).to_be_visible()
        assert await look.problems() == []
        assert await look.page.locator("img, script:not([src])").count() == 0
        if name == "64 workers":
            await _sorted_and_filtered(look.page)
        if name == "overfull":
            await expect(look.page.locator("#sessions tbody tr")).to_have_count(2)
            await expect(look.page.locator("#tiles")).to_contain_text("Sessions held")
            await expect(look.page.locator("#workers")).to_contain_text("9 sessions, 310,000 of 400,000 tokens")
        else:
            await expect(look.page.locator("#sessions-section")).to_be_hidden()
        if name == "roles":
            await expect(look.page.locator("#tiles")).to_contain_text(
                "2 prefill, 1 decode, 1 both; requests are not split"
            )
            table = look.page.locator("#workers")
            await expect(table).to_contain_text("prefill engine: pairs with 1 of 2 engines")
            await expect(table).to_contain_text("not with gpu-04.0, gpu-05.0, gpu-06.0 and 1 more: vLLM: 0.31.0 at the")
            await expect(table).to_contain_text("→ upgrade one")
            await expect(table).to_contain_text("LMCacheConnectorV1 hands no request")
        if name == "empty":
            await expect(look.page.locator("#rung-reason.bad")).to_contain_text(
                "No worker has joined, so requests get 503"
            )
            await expect(look.page.locator("#rung-reason code")).to_have_text("warmfleet doctor")


async def _sorted_and_filtered(page: Page) -> None:
    rows = page.locator("#workers tbody tr")
    await expect(rows).to_have_count(64)
    await expect(rows.filter(has_text=HOSTILE_NAME)).to_have_count(1)
    await page.get_by_role("button", name="Speed").press("Enter")
    await expect(page.get_by_role("columnheader", name="Speed")).to_have_attribute("aria-sort", "ascending")
    await page.get_by_label("Filter", exact=True).fill("gpu-07")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Filter", exact=True).fill("")
    await page.get_by_label("only those that take no requests").check()
    shown = await rows.count()
    assert 0 < shown < 64


@pytest.mark.long(minutes=1, shows="the status page in a browser: seven fleets, both themes, a phone, the keyboard")
async def test_screenshots(valkey_url: str, model: str, tmp_path: Path) -> None:
    async with replica(valkey_url, model, admin_port=1) as router:
        files = await shoot(router.operators, tmp_path)
    assert len(files) >= 7
    assert all(file.stat().st_size > 10_000 for file in files)
