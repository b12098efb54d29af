"""Pictures of the bench ``tlru``: what each policy changes against LRU, over the capacity of the cache."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.bench.tail_runs import AUTO, LRU

from warmfleet_loadtest.measuring.plots import save_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Rows = Mapping[str, Any]

FIGURES = {"mean": "mean TTFT", "p90": "P90", "p95": "P95", "p99": "P99"}
CONVERSATIONS = ("T-LRU 100 ms", "T-LRU 200 ms", "T-LRU 300 ms", AUTO, "knows ended", "tail-optimised Belady")
MOST_PCT = 60.0  # a larger change is drawn at the edge


def draw(folder: Path, rows: Rows) -> None:
    """Write a picture for each kind of run that has several capacities. Raises OSError."""
    kinds: dict[str, dict[str, dict[int, Any]]] = {}
    for name, row in rows.items():
        found = re.fullmatch(r"(.*?), (one engine|each engine|gap [^,]*)?,? ?(\d+) (tokens|blocks)", name)
        if found and found[2] != "each engine":
            kind = "conversations" if found[4] == "tokens" else "traces"
            panel = f"turn {found[2]}" if kind == "conversations" else found[1]
            kinds.setdefault(kind, {}).setdefault(panel, {})[int(found[3])] = row
    for kind, every in kinds.items():
        panels = {panel: sizes for panel, sizes in every.items() if len(sizes) > 1}
        if not panels:
            continue
        policies = CONVERSATIONS if kind == "conversations" else _policies(panels)
        unit = "tokens" if kind == "conversations" else "blocks of 16 tokens"
        save_figure(_figure(panels, policies, unit), folder / f"tlru_{kind}.svg")


def _policies(panels: Mapping[str, Mapping[int, Any]]) -> Sequence[str]:
    first = next(iter(next(iter(panels.values())).values()))
    return [name for name in first["change_pct"] if name != LRU]


def _figure(panels: Mapping[str, Mapping[int, Any]], policies: Sequence[str], unit: str) -> Any:
    """A row of panels for each workload, a column for each figure, a line for each policy."""
    from matplotlib.figure import Figure  # the import takes 0.3 s

    picture = Figure(figsize=(3.4 * len(FIGURES), 3.2 * len(panels) + 0.6), layout="constrained")
    grid = picture.subplots(len(panels), len(FIGURES), sharey=True, squeeze=False)
    for line, (panel, sizes) in zip(grid, panels.items(), strict=True):
        across = sorted(sizes)
        for axes, (figure, title) in zip(line, FIGURES.items(), strict=True):
            axes.set_xscale("log")
            for policy in policies:
                changes = [sizes[size]["change_pct"][policy][figure] for size in across]
                up = [max(-MOST_PCT, min(MOST_PCT, change)) for change in changes]
                bold = policy == AUTO
                axes.plot(across, up, marker="o", ms=3, label=policy, lw=2.5 if bold else 1.2, zorder=3 if bold else 2)
            axes.axhline(0.0, color="black", linewidth=0.8)
            axes.axhspan(5.0, MOST_PCT, color="red", alpha=0.06)
            axes.set(title=f"{title}, {panel}", xlabel=f"cache, {unit}", ylim=(-MOST_PCT - 2, MOST_PCT + 2))
            axes.set_xticks(across[:: 1 if len(across) < 8 else 2], across[:: 1 if len(across) < 8 else 2], rotation=60)
            axes.minorticks_off()
            axes.tick_params(labelsize=7)
            axes.title.set_fontsize(9)
            axes.grid(alpha=0.3)
        line[0].set_ylabel("change against LRU, %\n(red: worse by over 5)", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    return picture
