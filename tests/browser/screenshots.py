"""Screenshots of the status page: python -m tests.browser.screenshots URL FOLDER

URL is a replica's port for operators; the page is that replica's, the fleets are made up.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from playwright.async_api import expect
from tests.browser.fleets import FLEETS, answer
from tests.browser.looking import DESK, PHONE, chromium, looking

LONG, LONG_PHONE = (DESK[0], 1_700), (PHONE[0], 2_600)
#: Name of the picture -> fleet, size of the window, theme.
SHOTS = {
    "light": ("four workers", LONG, "light"),
    "dark": ("four workers", LONG, "dark"),
    "phone-light": ("four workers", LONG_PHONE, "light"),
    "phone-dark": ("degraded", LONG_PHONE, "dark"),
    "empty": ("empty", DESK, "light"),
    "degraded": ("degraded", LONG, "dark"),
    "two-models": ("two models", LONG, "light"),
    "64-workers": ("64 workers", LONG, "light"),
    "64-workers-phone": ("64 workers", LONG_PHONE, "light"),
}


async def shoot(url: str, folder: Path) -> list[Path]:
    """Write every picture into this folder; returns their paths."""
    made = []
    async with chromium() as browser:
        for name, (fleet, size, theme) in SHOTS.items():
            async with looking(browser, url, size=size, path="/livez", color_scheme=theme) as look:
                await answer(look.page, FLEETS[fleet]())
                await look.page.goto(f"{url}/status")
                await expect(look.page.locator("#shown")).to_be_visible()
                if await look.page.locator("summary").count():
                    await look.page.locator("summary").first.click()
                path = folder / f"{name}.png"
                await look.page.screenshot(path=path)
                made.append(path)
    return made


if __name__ == "__main__":
    print(*asyncio.run(shoot(sys.argv[1].rstrip("/"), Path(sys.argv[2]))), sep="\n")
