"""Colours, units and axes shared by the pictures of a report.

The palette is that of Okabe and Ito, which stays distinguishable in the common forms of colour
blindness; beyond eight curves the line style changes too.
"""

from __future__ import annotations

import math
from typing import Any

WIDTH, DPI = 16.0, 100  # inches and dots per inch: pictures are 1600 pixels wide
MAX_REPLICAS = 8  # bands and heat maps of more would cover each other
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BROWN, BLACK = "#CC79A7", "#56B4E9", "#7A5230", "#000000"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BROWN, BLACK)
DASHES = ("-", "--", ":", "-.")
RC: Any = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 12,
}


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    return DASHES[index // len(PALETTE) % len(DASHES)]


def scaled(value: float, unit: str) -> str:
    """A number with a decimal prefix: scaled(1.2e9, "B") is "1.2 GB"."""
    if not math.isfinite(value):
        return f"{value} {unit}"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def time_unit(largest_seconds: float) -> tuple[float, str]:
    """Factor and unit in which the largest value reads between about 1 and 1000."""
    if largest_seconds >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if largest_seconds >= 1e-3 else (1e6, "µs")


def prefix_ticks(axis: Any, unit: str = "") -> None:
    """Ticks such as 200k and 1M in place of offsets and powers."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit=unit, sep=""))


def integer_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend_above(ax: Any, columns: int, **kwargs: Any) -> None:
    """A legend between title and axes, where it cannot cover a curve."""
    handles, labels = ax.get_legend_handles_labels()
    handles, labels = kwargs.pop("handles", handles), kwargs.pop("labels", labels)
    rows = max(1, math.ceil(len(labels) / columns))
    ax.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        borderaxespad=0.1,
        handlelength=1.2,
        columnspacing=1.0,
        **kwargs,
    )
    ax.set_title(ax.get_title(loc="left"), pad=8 + 20 * rows)


def nothing_to_show(ax: Any, sentence: str) -> None:
    ax.text(0.5, 0.5, sentence, ha="center", va="center", transform=ax.transAxes, color="#666666")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
