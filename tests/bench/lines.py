"""Line plots of benches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def save_lines(path: Path, title: str, x: str, y: str, lines: Mapping[str, Sequence[float]]) -> None:
    """Draw all ``lines`` but the first over the first, on a logarithmic scale, into an .svg or .png."""
    from matplotlib.figure import Figure  # 0.3 s: only where somebody wants a picture

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    (_, across), *drawn = lines.items()
    for name, values in drawn:
        axes.plot(across, values, label=name)
    axes.set(title=title, xlabel=x, ylabel=y, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
