"""Lines over time as an .svg file, and as a row of characters, without a library for plots."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, MARGIN = 720, 360, 56
FONT = 'font-family="sans-serif" font-size="12"'
TICKS = 5
COLOURS = ("#c0392b", "#1f6fb2", "#2e8b57", "#8a6d3b")
BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], top: float) -> str:
    """Return a character for each value, whose height is its share of ``top``."""
    return "".join(
        BARS[min(len(BARS) - 1, round((len(BARS) - 1) * value / top))] if top else BARS[0] for value in values
    )


def svg(
    title: str,
    units: tuple[str, str],
    end: float,
    lines: Mapping[str, Sequence[float]],
    mark: tuple[float, str],
) -> str:
    """Draw lines whose values are spread evenly from 0 to ``end``. units: of x and y. mark: (x, text)."""
    top = max((value for values in lines.values() for value in values), default=0.0) * 1.1 or 1.0

    def point(x: float, y: float) -> str:
        across = MARGIN + (WIDTH - 2 * MARGIN) * x / end
        return f"{across:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y / top:.1f}"

    def text(at: str, words: str, style: str = "") -> str:
        x, y = at.split(",")
        return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'

    def line(first: str, last: str, style: str) -> str:
        (left, upper), (right, lower) = first.split(","), last.split(",")
        return f'<line x1="{left}" y1="{upper}" x2="{right}" y2="{lower}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="15">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(units[0])}</text>',
        f'<text x="14" y="{MARGIN - 12}">{escape(units[1])}</text>',
    ]
    for tick in range(TICKS + 1):
        x, y = end * tick / TICKS, top * tick / TICKS
        parts.append(line(point(0, y), point(end, y), 'stroke="#ddd"'))
        parts.append(text(point(x, -0.055 * top), f"{x:.0f}", 'text-anchor="middle"'))
        parts.append(text(point(-0.01 * end, y), f"{y:.3g}", 'text-anchor="end"'))
    parts.append(line(point(mark[0], 0), point(mark[0], top), 'stroke="#555" stroke-dasharray="3 3"'))
    parts.append(text(point(mark[0] + 0.01 * end, 0.95 * top), mark[1]))
    for (name, values), colour, row in zip(lines.items(), COLOURS, range(len(COLOURS)), strict=False):
        path = " ".join(point(end * (at + 0.5) / len(values), value) for at, value in enumerate(values))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(point(0.6 * end, (0.95 - 0.08 * row) * top), name, f'fill="{colour}" font-weight="bold"'))
    return "\n".join([*parts, "</svg>", ""])
