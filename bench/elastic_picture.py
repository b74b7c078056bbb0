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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, runs = result["steps_per_phase"], result["runs"]
    names = [name for name in runs["sync"] if name != STEADY]
    import matplotlib as mpl

    with mpl.rc_context(style.RC):
        fig = Figure(figsize=(style.WIDTH, 6.5), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(fig)
        panels = fig.subplots(1, len(names), sharey=True)
        for ax, name in zip(panels, names, strict=True):
            _panel(ax, name, runs, steps)
        panels[0].set_ylabel("validation loss (nats a byte)")
        fig.savefig(picture)
    return f"picture: {picture}"


def _panel(ax: Any, name: str, runs: dict[str, Any], steps: int) -> None:
    for method, colour in COLOURS.items():
        for which, line, label in (
            (name, {"linewidth": 2.2, "marker": "o", "markersize": 4}, f"{method}, {name}"),
            (STEADY, {"linewidth": 1.4, "linestyle": "--"}, f"{method}, always 4"),
        ):
            curve = runs[method][which]["curve"]
            x, y = zip(*curve, strict=True)
            ax.plot(x, y, color=colour, label=label, clip_on=False, **line)
    for number, phase in enumerate(runs["sync"][name]["phases"]):
        if number:
            ax.axvline(number * steps, color="#999999", linewidth=1, linestyle=":")
        count = phase["replicas"]
        ax.text(
            (number + 0.5) * steps, 0.97, f"{count} replica{'s' if count > 1 else ''}",
            ha="center", va="top", transform=ax.get_xaxis_transform(), color="#444444",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
        )  # fmt: skip
    ax.set_xlim(0, steps * 4)
    ax.set_xticks([number * steps for number in range(5)])
    ax.set_xlabel("optimizer steps of each replica")
    grows = runs["sync"][name]["phases"][0]["replicas"] == 1
    ax.set_title("Replicas join" if grows else "Replicas leave")
    style.legend_above(ax, 4)
