"""Pictures of the benches on the virtual clock (.svg or .png)."""

from __future__ import annotations

import sys
from itertools import groupby
from math import isnan, nan
from typing import TYPE_CHECKING, NamedTuple

from warmfleet_loadtest.measuring.plots import save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes


def drawn(draw: Callable[[], None]) -> int:
    """Return the exit code after this picture. Figures are printed before it, because drawing may fail."""
    try:
        draw()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def draw_panels(path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> None:
    """Draw a panel for each name, with a line per fleet through its points (load, ratio). Raises ValueError."""
    from matplotlib.figure import Figure  # the import takes 0.3 s

    if not panels:
        raise ValueError("there is nothing to draw: the oracle was not played")
    columns = (len(panels) + 1) // 2
    picture = Figure(figsize=(3.6 * columns, 6.4), layout="constrained")
    for axes, (name, lines) in zip(picture.subplots(2, columns, squeeze=False).flat, panels.items(), strict=False):
        for fleet, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=fleet)
        axes.set(title=name, xlabel="busy, oracle", ylim=(0.5, 2.0))
        axes.grid(alpha=0.3)
    picture.axes[0].legend(fontsize=8)
    picture.suptitle(title)
    save_figure(picture, path)


class Shares(NamedTuple):
    """A panel of cells. shares: row and column -> a share; a row is the label of its group and its own.

    A share of a whole group is under the own label "".
    """

    title: str
    shares: Mapping[tuple[tuple[str, str], str], float]


def draw_shares(path: Path, title: str, lines: Sequence[Sequence[Shares]]) -> None:
    """Draw lines of panels with a coloured number for each share. Raises ValueError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # the import takes 0.3 s

    if not any(panel.shares for line in lines for panel in line):
        raise ValueError("there is nothing to draw: no run was made")
    across = max(map(len, lines))
    picture = Figure(figsize=(4.6 * across, 4.8 * len(lines)), layout="constrained")
    grid = picture.subplots(len(lines), across, squeeze=False)
    for axes, panel in zip(grid.flat, (panel for line in lines for panel in line), strict=True):
        _draw_cells(axes, panel)
    picture.suptitle(title)
    with rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):  # half the size of outlines
        save_figure(picture, path)


def _draw_cells(axes: Axes, panel: Shares) -> None:
    columns = list(dict.fromkeys(column for _, column in panel.shares))
    labels = dict.fromkeys(row for row, _ in panel.shares)
    rows = [row for row in labels if row[1] or not any(group == row[0] and own for group, own in labels)]
    values = [
        [panel.shares.get((row, name), panel.shares.get(((row[0], ""), name), nan)) for name in columns] for row in rows
    ]
    axes.imshow(values, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    top = 0
    for group, members in groupby(rows, key=lambda row: row[0]):
        size = len(list(members))
        for x, name in enumerate(columns):
            whole = panel.shares.get(((group, ""), name))
            shown = (
                [(top + size / 2 - 0.5, whole)]
                if whole is not None
                else [(y, values[y][x]) for y in range(top, top + size) if not isnan(values[y][x])]
            )
            for y, value in shown:
                axes.text(x, y, f"{value:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7)
        top += size
        axes.axhline(top - 0.5, color="white", lw=3)
    axes.set_xticks(range(len(columns)), columns, rotation=60, fontsize=7)
    axes.set_yticks(range(len(rows)), [" ".join(row) for row in rows], fontsize=7)
    axes.set_title(panel.title, fontsize=9)
