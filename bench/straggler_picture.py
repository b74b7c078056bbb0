"""The picture of the straggler experiment: what each method keeps of its rate, and its loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from edit_ext import report_style as style

COLOURS = {"sync": style.BLUE, "edit": style.VERMILION, "aedit": style.GREEN}
NAMES = {"sync": "sync", "edit": "EDiT", "aedit": "A-EDiT"}
TICKS = {
    "none": "no\nstraggler", "x2": "one replica\n2 times\nas slow", "x3": "one replica\n3 times\n"
    "as slow", "random": "a random one\npauses at\neach step", "link": "exchanges\nbegin late",
}  # fmt: skip
WIDTH = 0.27  # of a bar; the cases are 1 apart


def draw(result: dict[str, Any], picture: Path) -> str:
    """A panel of rates and one of losses over the same cases; says where the picture is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: it needs the package matplotlib"
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(style.RC):
        fig = Figure(figsize=(style.WIDTH, 6.5), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(fig)
        rates, losses = fig.subplots(1, 2, width_ratios=(1.25, 1))
        _rates(rates, result)
        _losses(losses, result)
        for ax in (rates, losses):
            ax.set_xticks(range(len(result["runs"])), [TICKS[case] for case in result["runs"]])
            ax.tick_params(axis="x", length=0)
            ax.grid(False, axis="x")
        fig.savefig(picture)
    return f"picture: {picture}"


def _rates(ax: Any, result: dict[str, Any]) -> None:
    """Bars, and on them what is kept of the first; a mark where nobody would be delayed."""
    for number, (method, colour) in enumerate(COLOURS.items()):
        shift = (number - 1) * WIDTH
        for at, (case, methods) in enumerate(result["runs"].items()):
            rate = methods[method]["tokens_per_s"]
            label = NAMES[method] if at == 0 else None
            ax.bar(at + shift, rate, 0.92 * WIDTH, color=colour, label=label)
            if at:
                kept = f"{result['kept'][case][method]:.0%}"
                ax.annotate(
                    kept, (at + shift, 0), (0, 5), textcoords="offset points", ha="center",
                    va="bottom", fontsize=11, fontweight="bold", color="white",
                )  # fmt: skip
                whole = result["runs"]["none"][method]["tokens_per_s"]
                ax.plot(
                    [at + shift - 0.46 * WIDTH, at + shift + 0.46 * WIDTH],
                    [whole * result["no_waits"][case][method]] * 2, color="#444444", linewidth=1.4,
                    linestyle="--", label="if nobody were delayed" if at == number == 1 else None,
                )  # fmt: skip
    ax.set_ylabel("tokens/s of all replicas")
    style.prefix_ticks(ax.yaxis)
    ax.set_title("Rate, and percent of the rate without a straggler")
    style.legend_above(ax, 4)


def _losses(ax: Any, result: dict[str, Any]) -> None:
    for number, (method, colour) in enumerate(COLOURS.items()):
        values = [methods[method]["final_val_loss"] for methods in result["runs"].values()]
        x = [at + (number - 1) * WIDTH for at in range(len(values))]
        ax.plot(x, values, "o", markersize=9, color=colour, label=NAMES[method])
    ax.set_xlim(-0.5, len(result["runs"]) - 0.5)
    ax.set_ylabel("validation loss (nats a byte)")
    ax.set_title(f"Loss after {result['seconds_of_a_run']:g} s of training")
    style.legend_above(ax, 3)
