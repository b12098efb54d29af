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


class Cells(NamedTuple):
    """A panel of cells. values: by row and column; a row is a group and a name in it.

    A value of a whole group has the empty name. best, worst: the ends of the colours, from green to red.
    """

    title: str
    values: Mapping[tuple[tuple[str, str], str], float]
    best: float
    worst: float


def draw_cells(path: Path, title: str, lines: Sequence[Sequence[Cells]]) -> None:
    """Draw lines of panels with a coloured number for each value. Raises OSError, ValueError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # the import takes 0.3 s

    if not any(panel.values for line in lines for panel in line):
        raise ValueError("there is nothing to draw: no run was made")
    across = max(map(len, lines))
    picture = Figure(figsize=(4.6 * across, 4.8 * len(lines)), layout="constrained")
    grid = picture.subplots(len(lines), across, squeeze=False)
    for axes, panel in zip(grid.flat, (panel for line in lines for panel in line), strict=True):
        _draw_panel(axes, panel)
    picture.suptitle(title)
    with rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):  # half the size of outlines
        save_figure(picture, path)


def _draw_panel(axes: Axes, panel: Cells) -> None:
    columns = list(dict.fromkeys(column for _, column in panel.values))
    labels = dict.fromkeys(row for row, _ in panel.values)
    rows = [row for row in labels if row[1] or not any(group == row[0] and name for group, name in labels)]
    shown: list[list[float]] = []
    for group, members in groupby(rows, key=lambda row: row[0]):
        of_group, top = list(members), len(shown)
        shown += [[panel.values.get((row, each), nan) for each in columns] for row in of_group]
        for x, column in enumerate(columns):
            whole = panel.values.get(((group, ""), column))
            if whole is not None:
                _write(axes, x, top + len(of_group) / 2 - 0.5, whole)
                for row in shown[top:]:
                    row[x] = whole
            else:
                for y, row in enumerate(shown[top:], top):
                    _write(axes, x, y, row[x])
        axes.axhline(len(shown) - 0.5, color="white", lw=3)
    low, high, colours = min(panel.best, panel.worst), max(panel.best, panel.worst), "RdYlGn"
    axes.imshow(
        shown, vmin=low, vmax=high, cmap=colours if high == panel.best else f"{colours}_r", aspect="auto", alpha=0.7
    )
    axes.set_xticks(range(len(columns)), columns, rotation=60, fontsize=7)
    axes.set_yticks(range(len(rows)), [" ".join(row) for row in rows], fontsize=7)
    axes.set_title(panel.title, fontsize=9)


def _write(axes: Axes, x: float, y: float, value: float) -> None:
    digits = 2 if value < 1 else 1 if value < 10 else 0
    if not isnan(value):
        axes.text(x, y, f"{value:.{digits}f}".removeprefix("0"), ha="center", va="center", fontsize=7)
