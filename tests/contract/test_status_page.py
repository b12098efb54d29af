"""The status page as files: colours that can be read, nothing from elsewhere, and a sentence for every word."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from tests.browser import fleets

from warmfleet.api.status_page.routes import FILES, FOLDER
from warmfleet.api.status_page.snapshot import RUNGS
from warmfleet.pools.reasons import REASONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "app/docs"
CSS = (FOLDER / "page.css").read_text()
LARGEST_BYTES = 60_000  # all files together: a page for a phone at the end of a tunnel
#: Text (with a contrast of 4.5 or more) and lines with a meaning (3 or more), each with its background.
TEXTS, LINES = ("ink", "quiet", "accent", "good", "warn", "bad"), ("line-1", "line-2", "line-3", "edge")


def palette(theme: int) -> dict[str, tuple[float, float, float]]:
    """Name -> red, green, blue, 0 to 1. theme: 0 is light, 1 is dark."""
    found = re.findall(r"--([\w-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\)", CSS)
    return {name: (*(int(pair[theme][at : at + 2], 16) / 255 for at in (0, 2, 4)),) for name, *pair in found}  # type: ignore[misc]


def luminance(colour: tuple[float, float, float]) -> float:
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_everything_can_be_read_in_both_themes(theme: int) -> None:
    colours = palette(theme)
    tinted = tuple(0.07 * bad + 0.93 * card for bad, card in zip(colours["bad"], colours["card"], strict=True))
    grounds = {"page": colours["page"], "card": colours["card"], "a worker that is out": tinted}
    wanted = [*((name, 4.5) for name in TEXTS), *((name, 3.0) for name in LINES)]
    weak = [
        f"{name} on {ground}"
        for (name, least), (ground, colour) in product(wanted, grounds.items())
        if contrast(colours[name], colour) < least  # type: ignore[arg-type]
    ]
    assert weak == []
    used = set(re.findall(r"var\(--([\w-]+)\)", CSS))
    assert used == set(colours)


def test_every_file_is_served_and_small() -> None:
    assert sorted(name for name, _ in FILES.values()) == sorted(path.name for path in FOLDER.iterdir())
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < LARGEST_BYTES


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere_or_is_read_as_html(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|@import", text)
    assert not re.search(r"\son\w+=|\sstyle=|<style", text)


def test_every_word_of_a_decision_has_its_sentence() -> None:
    table = (DOCS / "operate.md").read_text().partition("| why | rule |")[2].partition("\n\n")[0]
    words = {word for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", cell)}
    assert len(words) > 10
    assert words - REASONS.keys() == set()


def test_every_rung_is_drawn() -> None:
    script = (FOLDER / "page.js").read_text()
    assert [rung for rung in RUNGS if not re.search(rf"^  {rung}: \[", script, re.MULTILINE)] == []
    assert fleets.RUNGS == RUNGS
