"""Pictures of the benches ``order`` and ``pools`` (.svg or .png)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from warmfleet_loadtest.measuring.plots import save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


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
