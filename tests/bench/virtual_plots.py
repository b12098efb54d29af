"""Pictures of sweeps and scenarios (.svg or .png)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.measuring.plots import save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

PANELS = ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "hit_ratio", "work_max_over_mean", "evicted_max_over_mean")


def drawn(draw: Callable[[], None]) -> int:
    """Return the exit code after this picture. Figures are printed before it, because drawing may fail."""
    try:
        draw()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def draw_rows(path: Path, title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a panel per figure, with a line per policy or setting over the load. Names end with the speed."""
    from matplotlib.figure import Figure  # this import takes 0.3 s

    picture = Figure(figsize=(12, 7), layout="constrained")
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in rows.items():
        lines.setdefault(name.rpartition(" ")[0], []).append(row)
    for axes, panel in zip(picture.subplots(2, 3).flat, PANELS, strict=True):
        for name, found in lines.items():
            axes.plot([row["busy"] for row in found], [row[panel] for row in found], marker="o", ms=3, label=name)
        axes.set(title=panel, xlabel="busy", yscale="log" if panel.startswith("ttft") else "linear")
        axes.grid(alpha=0.3)
    picture.axes[0].legend(fontsize=8)
    picture.suptitle(title)
    save_figure(picture, path)


def draw_lines(path: Path, title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a panel per line of a scenario over virtual seconds, with a colour per setting."""
    from matplotlib.figure import Figure

    names = [name for name in next(iter(rows.values())) if name.startswith("line ")]
    if not names:
        raise ValueError(f"{title} draws nothing: its figures say it all")
    picture = Figure(figsize=(9, 2.8 * len(names)), layout="constrained")
    for axes, name in zip(picture.subplots(len(names), 1, squeeze=False).flat, names, strict=True):
        for setting, row in rows.items():
            axes.plot(*zip(*row[name], strict=True), label=setting, drawstyle="steps-post")
        axes.set(ylabel=name.removeprefix("line "), xlabel="virtual seconds")
        axes.grid(alpha=0.3)
    picture.axes[0].legend(fontsize=8)
    picture.suptitle(title)
    save_figure(picture, path)


def draw_panels(path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> None:
    """Draw a panel for each name, with a line per fleet through its points (load, ratio). Raises ValueError."""
    from matplotlib.figure import Figure

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
