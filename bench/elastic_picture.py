"""The picture of the elastic experiment: validation loss against steps, phases marked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from edit_ext import report_style as style

COLOURS = {"sync": style.BLUE, "edit": style.VERMILION}
STEADY = "4-4-4-4"


def draw(result: dict[str, Any], picture: Path) -> str:
    """One panel for growing and one for shrinking, on the same axes; says where the picture is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: it needs the package matplotlib"
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, runs = result["steps_per_phase"], result["runs"]
    names = [name for name in runs["sync"] if name != STEADY]
    with mpl.rc_context(style.RC):
        fig = Figure(figsize=(style.WIDTH, 6.5), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(fig)
        panels = fig.subplots(1, len(names), sharey=True)
        for ax, name in zip(panels, names, strict=True):
            _panel(ax, name, runs, steps)
        panels[0].set_ylim(*_range(runs, steps))
        panels[0].set_ylabel("validation loss (nats a byte)")
        fig.savefig(picture)
    return f"picture: {picture}"


def _range(runs: dict[str, Any], steps: int) -> tuple[float, float]:
    """Leaves out the first half of a phase, whose fall would flatten everything after it."""
    curves = [run["curve"] for method in runs.values() for run in method.values()]
    losses = [loss for curve in curves for step, loss in curve if 2 * step >= steps]
    low, high = min(losses), max(losses)
    return low - 0.05 * (high - low), high + 0.1 * (high - low)


def _panel(ax: Any, name: str, runs: dict[str, Any], steps: int) -> None:
    for method, colour in COLOURS.items():
        for which, line, label in (
            (name, {"linewidth": 2.2, "marker": "o", "markersize": 4}, f"{method}, {name}"),
            (STEADY, {"linewidth": 1.4, "linestyle": "--"}, f"{method}, always 4"),
        ):
            curve = runs[method][which]["curve"]
            x, y = zip(*curve, strict=True)
            ax.plot(x, y, color=colour, label=label, **line)
    for number, phase in enumerate(runs["sync"][name]["phases"]):
        if number:
            ax.axvline(number * steps, color="#999999", linewidth=1, linestyle=":")
        count = phase["replicas"]
        ax.text(
            (number + 0.5) * steps, 0.97, f"{count} replica{'s' if count > 1 else ''}",
            ha="center", va="top", transform=ax.get_xaxis_transform(), color="#444444",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
        )  # fmt: skip
    ax.set_xlim(0, steps * 4.04)  # room for the last marker
    ax.set_xticks([number * steps for number in range(5)])
    ax.set_xlabel("optimizer steps of each replica")
    grows = runs["sync"][name]["phases"][0]["replicas"] == 1
    ax.set_title("Replicas join" if grows else "Replicas leave")
    style.legend_above(ax, 4)
