"""The picture of the toy problem: distances to the optimum, and paths over the contours of f."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from edit_ext import report_style as style

# Wide lines under narrow ones: the first three methods may lie on one another.
LOOKS: dict[str, dict[str, Any]] = {
    "DES-LOC": {"color": style.BLUE, "linewidth": 5.0, "alpha": 0.45},
    "Local Adam": {"color": style.VERMILION, "linewidth": 2.0},
    "persistent": {"color": style.BLACK, "linewidth": 1.4, "linestyle": ":"},
    "reset": {"color": style.GREEN, "linewidth": 2.0},
    "reset, step too": {"color": style.ORANGE, "linewidth": 2.0, "linestyle": "--"},
}
POINTS = 200  # of the contours, each way


def draw(result: dict[str, Any], picture: Path) -> str:
    """Left: distance by round, with the spread over seeds; right: mean paths. Says where it is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: it needs the package matplotlib"
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = result["runs"]
    picture.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style.RC):
        fig = Figure(figsize=(style.WIDTH, 6.2), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(fig)
        panels = fig.subplots(1, 3)
        first, second = panels[:2]
        second.sharey(first)
        for ax, (variant, run) in zip(panels, runs.items(), strict=False):
            _distances(ax, variant, run["methods"])
        first.set_ylabel("distance of the agreed point to (1, 1)")
        _paths(panels[2], runs["iid"]["methods"])
        handles, labels = first.get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        fig.savefig(picture)
    return f"picture: {picture}"


def _distances(ax: Any, variant: str, methods: dict[str, Any]) -> None:
    for name, looks in LOOKS.items():
        mean, spread = methods[name]["distance"], methods[name]["spread"]
        rounds = range(len(mean))
        ax.plot(rounds, mean, label=name, **looks)
        low = [max(m - s, m / 10) for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        ax.fill_between(rounds, low, high, color=looks["color"], alpha=0.12, linewidth=0)
    ax.set_yscale("log")
    ax.set_xlabel("round of 192 steps")
    noise = "workers equally noisy" if variant == "iid" else "workers differ in noise"
    ax.set_title(f"Distance, {noise} ({variant})")


def _paths(ax: Any, methods: dict[str, Any]) -> None:
    import torch

    paths = {name: list(zip(*methods[name]["path"], strict=True)) for name in LOOKS}
    spans = []
    for axis in (0, 1):
        values = [value for path in paths.values() for value in path[axis]] + [1.0]
        margin = 0.15 * (max(values) - min(values)) + 0.05
        spans.append((min(values) - margin, max(values) + margin))
    x1, x2 = (torch.linspace(low, high, POINTS, dtype=torch.float64) for low, high in spans)
    f = (1 - x1) ** 2 + 100 * (x2[:, None] - x1**2) ** 2
    levels = [10.0 ** (power / 2) for power in range(-4, 9)]
    ax.contour(x1, x2, f, levels, colors="#bbbbbb", linewidths=0.8)
    ax.grid(False)
    for name, looks in LOOKS.items():
        ax.plot(*paths[name], marker="o", markersize=7, markevery=[-1], **looks)
    ax.plot(1, 1, "*", markersize=24, color=style.BLACK, fillstyle="none", zorder=5)
    ax.annotate("(1, 1)", (1, 1), (-14, 8), textcoords="offset points", ha="right")
    ax.set_xlim(*spans[0])
    ax.set_ylim(*spans[1])
    ax.set_xlabel("x1")
    ax.set_ylabel("x2")
    ax.set_title("Mean path (iid; dot: its end), contours of f")
