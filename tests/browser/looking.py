"""A status page in Debian's chromium, and its faults for a person, a keyboard or a screen reader."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from playwright.async_api import async_playwright
from tests.support.run.required_tools import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, ConsoleMessage, Page, Request

#: A browser in a test has no sandbox of its own where tests run as root, and asks nobody for anything.
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-color-profile=srgb"),
)
DESK, PHONE = (1280, 900), (360, 740)
#: Lets every timer of the page's scripts, which asks for figures every two seconds, take a twentieth of that at most.
HASTE = "const after = setTimeout; window.setTimeout = (call, ms, ...more) => after(call, Math.min(ms, 100), ...more);"

#: Finds the problems of the whole page, in words. A control's name is the text that a screen reader reads out.
PROBLEMS = r"""() => {
  const found = [], text = (e) => (e.textContent || "").trim();
  const name = (e) => e.getAttribute("aria-label") || [...(e.labels || [])].map(text).join(" ") || text(e);
  for (const e of document.querySelectorAll("button, input, select, summary, a[href], [tabindex='0'][role=region]")) {
    const named = e.getAttribute("aria-labelledby");
    if (!(named ? text(document.getElementById(named)) : name(e))) found.push(`no name: ${e.outerHTML.slice(0, 80)}`);
  }
  for (const e of document.querySelectorAll("svg")) {
    if (e.getAttribute("aria-hidden") !== "true" && !e.getAttribute("aria-label")) found.push("a silent picture");
  }
  for (const e of document.querySelectorAll("*")) {
    for (const one of e.attributes) {
      if (/^on/.test(one.name) || one.name === "style") found.push(`inline: ${e.tagName} ${one.name}`);
    }
  }
  for (const e of document.querySelectorAll("table")) {
    if (!e.caption || !text(e.caption)) found.push("a table without caption");
    if (![...e.querySelectorAll("thead th")].every((th) => th.scope === "col")) found.push("a head without scope");
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size !== ids.length) found.push("an id twice");
  for (const one of ["header", "main", "footer"]) {
    if (document.querySelectorAll(`body > ${one}`).length !== 1) found.push(`not one ${one}`);
  }
  if (!document.documentElement.lang || !document.title) found.push("no language or title");
  if (!document.querySelector("[aria-live=polite]")) found.push("changes are not announced");
  const steps = [...document.querySelectorAll("h1, h2, h3")].map((e) => Number(e.tagName[1]));
  if (steps[0] !== 1 || steps.some((level, at) => at && level > steps[at - 1] + 1)) found.push("headings skip a level");
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`wider than the window: ${wide}`);
  return found;
}"""


@dataclass
class Look:
    """An open page. ``faults``: errors of the console, of scripts, and requests to any other place than the replica."""

    page: Page
    host: str
    faults: list[str] = field(default_factory=list)

    def console(self, message: ConsoleMessage) -> None:
        refused = "401" in message.text and "status.json" in str(message.location)  # the page asks for the key first
        if message.type in ("error", "warning") and not refused:
            self.faults.append(f"{message.type}: {message.text}")

    def request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != self.host:
            self.faults.append(f"a request to {request.url}")

    async def refresh(self) -> None:
        """Let the page ask for figures at once, as it does when its tab is looked at again."""
        await self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    async def problems(self) -> list[str]:
        """Everything that is wrong with the page as it is now."""
        found: list[str] = await self.page.evaluate(PROBLEMS)
        return self.faults + found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The browser of the operating system, without a window."""
    path = require("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*QUIET])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def looking(
    browser: Browser, url: str, *, size: tuple[int, int] = DESK, path: str = "/status", **options: Any
) -> AsyncIterator[Look]:
    """A new page at this replica. options: of the browser's context, such as ``color_scheme``."""
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce", **options
    )
    await context.add_init_script(HASTE)
    page = await context.new_page()
    look = Look(page, urlsplit(url).netloc)
    page.on("console", look.console)
    page.on("pageerror", lambda error: look.faults.append(f"script: {error}"))
    page.on("request", look.request)
    try:
        await page.goto(url + path)
        yield look
    finally:
        await context.close()
