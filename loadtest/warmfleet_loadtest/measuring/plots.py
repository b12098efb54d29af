"""The plots of a bench: distribution of TTFT per fleet, hit ratio over time, load of every engine over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from warmfleet_loadtest.measuring.sampling import Sample

WINDOW = 10  # number of samples (one per second) over which a hit ratio is computed
COLUMNS = 3  # number of panels side by side


def save_plots(
    folder: Path, ttft: Mapping[str, Sequence[float]], samples: Mapping[str, Sequence[Sample]], speed: float
) -> None:
    """Write three SVG files. ttft: sorted, in trace seconds. speed: trace seconds per second. Raises OSError."""
    made = [
        line_figure(
            "TTFT from when a request was due",
            "trace seconds",
            "share of requests",
            {
                name: (values, [(rank + 1) / len(values) for rank in range(len(values))])
                for name, values in ttft.items()
                if values
            },
            xscale="log",
        ),
        line_figure(
            f"Hit ratio over {WINDOW} samples",
            "trace seconds",
            "of prompt tokens",
            {name: _hit_ratio(taken, speed) for name, taken in samples.items()},
        ),
        _loads(samples, speed),
    ]
    for name, figure in zip(("ttft_cdf.svg", "hit_ratio.svg", "load.svg"), made, strict=True):
        save_figure(figure, folder / name)


def save_figure(figure: Any, path: Path) -> None:
    """Write an .svg or .png file; equal figures give equal .svg files. Makes the folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _hit_ratio(samples: Sequence[Sample], speed: float) -> tuple[list[float], list[float]]:
    """Return (times, ratios). A ratio is the cached share of the prompt tokens scheduled in the last WINDOW samples."""
    times, ratios = [], []
    for before, now in zip(samples, samples[WINDOW:], strict=False):
        prompt = sum(now.prompt) - sum(before.prompt)
        if prompt:
            times.append(speed * now.at_s)
            ratios.append((sum(now.cached) - sum(before.cached)) / prompt)
    return times, ratios


def line_figure(
    title: str,
    x: str,
    y: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    marks: Sequence[tuple[float, str]] = (),
    **scales: str,
) -> Any:
    """Return a figure with lines. lines: (x values, y values) by name. scales: ``xscale`` and ``yscale`` if not linear.

    marks: (x value, text) of events, which get a vertical line each.
    """
    from matplotlib.figure import Figure  # the import takes 0.3 s

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, (across, up) in lines.items():
        axes.plot(across, up, label=name)
    axes.set(title=title, xlabel=x, ylabel=y, **scales)
    for axis in ("x", "y"):
        if f"{axis}scale" in scales:  # 0.1 and 10 instead of powers of ten
            getattr(axes, f"{axis}axis").set_major_formatter("{x:g}")
    if "yscale" not in scales:
        axes.set_ylim(0, (1.3 if marks else 1) * axes.get_ylim()[1])  # room for the marks' texts above the lines
    for at, text in marks:
        axes.axvline(at, color="0.4", linestyle=":", linewidth=1)
        beside = axes.get_xaxis_transform()  # x in the data's units, y as a share of the height
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
        style: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "fontsize": "x-small", "color": "0.2"}
        axes.text(at, 0.98, text, transform=beside, bbox=behind, **style)
    axes.grid(alpha=0.3)
    if lines:
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")  # outside, where the legend hides no line
    return figure


def _loads(samples: Mapping[str, Sequence[Sample]], speed: float) -> Any:
    """Return a figure with a panel per fleet, all to the same scale, and a line per engine."""
    from matplotlib.figure import Figure  # the import takes 0.3 s

    rows = -(-len(samples) // COLUMNS)
    figure = Figure(figsize=(4 * min(COLUMNS, len(samples)), 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, min(COLUMNS, len(samples)), sharex=True, sharey=True, squeeze=False)
    for panel, (name, taken) in zip(panels.flat, samples.items(), strict=False):
        for engine in range(len(taken[0].requests)):
            across, up = [speed * sample.at_s for sample in taken], [sample.requests[engine] for sample in taken]
            panel.plot(across, up, linewidth=0.7, label=f"engine {engine + 1}")
        panel.set_title(name, fontsize="small")
        panel.grid(alpha=0.3)
    figure.supxlabel("trace seconds")
    figure.supylabel("requests running or waiting, per engine")
    names, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(names, labels, loc="outside upper center", ncols=8, fontsize="x-small")
    return figure
