"""The pictures of the evidence."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

from edit_ext import report_style as style
from edit_ext.bench.evidence_read import Table
from edit_ext.bench.evidence_rows import COUNTS, NOISE, RATES

EVERY = (4, 8, 16, 32, 64)


def draw(tables: dict[str, Table], folder: Path) -> list[str]:
    """A picture for each of the rows that have one; their names in `folder`."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures: dict[str, tuple[Any, int, list[str]]] = {
        "methods": (_methods, 1, ["methods"]),
        "noise": (_noise, 2, ["noise", "ablation"]),
        "windows": (_windows, 2, ["windows", "periods"]),
        "rates": (_rates, 2, ["rates"]),
    }
    drawn = []
    for name, (paint, panels, rows) in pictures.items():
        if not all(row in tables for row in rows):
            continue
        with mpl.rc_context(style.RC):
            fig = Figure(figsize=(style.WIDTH, 6.2), dpi=style.DPI, layout="constrained")
            FigureCanvasAgg(fig)
            axes = fig.subplots(1, panels, squeeze=False)[0]
            paint(axes, *(tables[row] for row in rows))
            fig.savefig(folder / f"evidence_{name}.png")
        drawn.append(f"evidence_{name}.png")
    return drawn


def _methods(axes: Any, table: Table) -> None:
    """Final loss of each method, a dot a seed."""
    (ax,) = axes
    labels = sorted(table.results, key=lambda label: -table.value(label).mean)
    for place, label in enumerate(labels):
        value = table.value(label)
        losses = [result["loss"] for result in table.results[label]]
        sent = table.results[label][0]["bytes_per_step"]
        colour = style.VERMILION if "Synchronous" in label else style.BLUE
        ax.plot(losses, [place] * len(losses), "o", color=colour, alpha=0.45, markersize=8)
        ax.errorbar(value.mean, place, xerr=value.deviation, fmt="|", color=colour, capsize=5,
                    markersize=14)  # fmt: skip
        right = max(*losses, value.mean + (value.deviation if len(losses) > 1 else 0.0))
        ax.annotate(
            f"{style.scaled(sent, 'B')} a step", (right, place), (10, -4),
            textcoords="offset points", fontsize=10, color="#555555",
        )  # fmt: skip
    ax.set_yticks(range(len(labels)), labels)
    ax.margins(x=0.14)
    ax.set_xlabel("final validation loss, nats a byte (dots: seeds; bars: mean ± deviation)")
    ax.set_title("Every method after the same tokens, and what a replica sends")


def _noise(axes: Any, noise: Table, ablation: Table) -> None:
    """How far runs with a noisy replica are above their clean twins."""
    left = {"EDiT": style.BLUE, "DiLoCo": style.VERMILION, "DiLoCo, momentum 0.8": style.ORANGE}
    right = {"EDiT": style.BLUE, "no z-test": style.VERMILION, "uniform weights": style.GREEN,
             "none": style.BLACK}  # fmt: skip
    for ax, table, looks, title in (
        (axes[0], noise, left, "EDiT and DiLoCo"),
        (axes[1], ablation, right, "Without parts of EDiT's penalty"),
    ):
        ax.axvspan(*NOISE, color="#eeeeee")
        ax.axhline(0, color="#888888", linewidth=1)
        for label, colour in looks.items():
            twins = zip(table.results[f"{label}, noise"], table.results[label], strict=True)
            excess = [
                [a - b for (_, a), (_, b) in zip(noisy["curve"], clean["curve"], strict=True)]
                for noisy, clean in twins
            ]
            steps = [step for step, _ in table.results[label][0]["curve"]]
            ax.plot(steps, [statistics.fmean(at) for at in zip(*excess, strict=True)],
                    color=colour, label=label, linewidth=2)  # fmt: skip
            low, high = ([f(at) for at in zip(*excess, strict=True)] for f in (min, max))
            ax.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        ax.set_xlim(NOISE[0] - 40, None)
        ax.set_xlabel("step (grey: one of four replicas reads random bytes)")
        ax.set_ylabel("validation loss above the clean run, nats a byte")
        ax.set_title(title)
        ax.legend()


def _windows(axes: Any, windows: Table, periods: Table) -> None:
    for name, colour in (("EDiT", style.BLUE), ("DiLoCo", style.VERMILION)):
        _line(axes[0], EVERY, [windows.value(f"{name}, {n}") for n in EVERY], colour, name)
    axes[0].set_xlabel("steps of a window")
    axes[0].set_title("Length of the window")
    sweeps: dict[str, tuple[str, tuple[int, ...], str]] = {
        "K_x, weights": ("{}, 48, 96", (4, 16, 48, 128), style.BLUE),
        "K_u, exp_avg": ("16, {}, 96", (4, 48, 192), style.VERMILION),
        "K_v, exp_avg_sq": ("16, 48, {}", (4, 96, 192), style.GREEN),
    }
    for label, (form, values, colour) in sweeps.items():
        found = [periods.value(form.format(n)) for n in values]
        _line(axes[1], values, found, colour, label)
    every = sorted({n for _, values, _ in sweeps.values() for n in values})
    axes[1].set_xticks(every, [f"{n}" for n in every])
    axes[1].set_xlabel("steps between two averages, the others at 16, 48 and 96")
    axes[1].set_title("DES-LOC's periods, one at a time")
    for ax in axes:
        ax.set_ylabel("final validation loss, nats a byte")
        ax.legend()


def _rates(axes: Any, table: Table) -> None:
    axes[1].sharey(axes[0])
    for ax, name in zip(axes, ("EDiT", "Synchronous"), strict=True):
        for number, count in enumerate(COUNTS):
            found = [table.value(f"{name}, {count}, {lr:g}") for lr in RATES]
            label = f"{count} replica{'s' if count > 1 else ''}"
            _line(ax, RATES, found, style.colour(number), label)
        ax.set_xlabel("learning rate")
        ax.set_ylabel("final validation loss, nats a byte")
        ax.set_title("Gradients averaged at every step" if name == "Synchronous" else name)
        ax.legend()


def _line(ax: Any, at: Any, values: Any, colour: str, label: str) -> None:
    means, spreads = [v.mean for v in values], [v.deviation for v in values]
    ax.errorbar(at, means, yerr=spreads, color=colour, label=label, marker="o", capsize=4,
                linewidth=2)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(at, [f"{n:g}" for n in at], minor=False)
