"""The upper part of a report: loss against tokens and bytes sent, all runs together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .report_read import Record, Run, number
from .report_style import colour, dash, nothing_to_show, prefix_ticks, scaled

SMOOTHED_FROM = 12  # points of a training curve; with fewer each counts


def draw_overview(fig: Any, runs: list[Run]) -> None:
    """Fill a matplotlib (sub)figure: loss curves, their last half enlarged, bytes and speed."""
    grid = fig.add_gridspec(2, 3, width_ratios=[1.25, 1, 1.05], hspace=0.12)
    whole = fig.add_subplot(grid[:, 0])
    draw_loss(whole, runs)
    draw_last_half(fig.add_subplot(grid[:, 1]), runs)
    draw_bars(
        fig.add_subplot(grid[0, 2]),
        runs,
        [bytes_sent(run) for run in runs],
        "Bytes sent per rank",
        lambda v: scaled(v, "B"),
        better="less",
    )
    draw_bars(
        fig.add_subplot(grid[1, 2]),
        runs,
        [speed(run) for run in runs],
        "Training speed",
        lambda v: f"{v:,.0f} tokens/s",
        better="faster",
    )
    handles, labels = whole.get_legend_handles_labels()
    if handles:
        fig.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=min(len(labels), 4 if len(labels) < 9 else 5),
        )


def points(records: list[Record], key: str) -> tuple[list[float], list[float]]:
    """(tokens, value) of the records that have both."""
    pairs = [(number(r["tokens"]), number(r[key])) for r in records if "tokens" in r and key in r]
    return [x for x, _ in pairs], [y for _, y in pairs]


def smooth(values: list[float], share: float = 0.05) -> list[float]:
    """Centred mean over `share` of the curve, 3 values or more; only finite ones count."""
    half = max(1, round(len(values) * share / 2))
    result = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


def draw_curves(ax: Any, runs: list[Run]) -> list[tuple[float, float]]:
    """Both losses of all runs; returns the points drawn, training losses as drawn."""
    drawn: list[tuple[float, float]] = []
    for i, run in enumerate(runs):
        tokens, loss = points(run.train, "loss")
        if tokens:
            curve = smooth(loss) if len(loss) >= SMOOTHED_FROM else loss
            ax.plot(
                tokens,
                curve,
                color=colour(i),
                lw=1.1,
                alpha=0.65,
                ls=dash(i),
                marker="." if len(tokens) < 2 else None,
                label=None if run.val else run.name,
            )
            drawn += zip(tokens, curve, strict=True)
        tokens, loss = points(run.val, "val_loss")
        if tokens:
            ending = "" if math.isnan(loss[-1]) else f", validation ends at {loss[-1]:.3f}"
            ax.plot(
                tokens,
                loss,
                color=colour(i),
                lw=2.0,
                ls=dash(i),
                marker="o",
                ms=4.5,
                label=run.name + ending + ("" if run.summary else " (unfinished)"),
            )
            drawn += zip(tokens, loss, strict=True)
    ax.set(xlabel="tokens, all replicas", ylabel="loss (nats per token)")
    return drawn


def draw_loss(ax: Any, runs: list[Run]) -> None:
    """Validation loss as dots, training loss as a thin line, against tokens."""
    smoothed = any(len(points(run.train, "loss")[1]) >= SMOOTHED_FROM for run in runs)
    thin = "thin: training, smoothed" if smoothed else "thin: training"
    ax.set_title(f"Loss (dots: validation; {thin})")
    drawn = draw_curves(ax, runs)
    finite = [y for _, y in drawn if math.isfinite(y)]
    if not finite:
        return nothing_to_show(ax, "no finite loss yet")
    # A diverging run would flatten all others: the axis ends a little above the highest start.
    starts = [
        next(
            (
                y
                for y in points(run.train or run.val, "loss" if run.train else "val_loss")[1]
                if math.isfinite(y)
            ),
            min(finite),
        )
        for run in runs
    ]
    top = 1.08 * max(starts)
    hidden = sum(1 for _, y in drawn if not y <= top)
    if hidden:
        ax.set_ylim(min(finite) - 0.05 * (top - min(finite)), top)
        ax.set_title(
            f"Loss (dots: validation; {thin})\n{hidden} points above the axis or not finite"
        )
    prefix_ticks(ax.xaxis)


def draw_last_half(ax: Any, runs: list[Run]) -> None:
    """The second half of the tokens, where runs differ by little, with an axis fitted to it."""
    ax.set_title("Last half, enlarged")
    drawn = [(x, y) for x, y in draw_curves(ax, runs) if math.isfinite(y)]
    if not drawn:
        return nothing_to_show(ax, "no finite loss yet")
    end = max(x for x, _ in drawn)
    late = [y for x, y in drawn if x >= end / 2]
    # One spoilt run must not flatten the rest: the axis ends at 1.5 times the best loss.
    low = min(late)
    high = max(y for y in late if y <= 1.5 * low)
    pad = 0.08 * (high - low) or 0.1
    ax.set(xlim=(end / 2, end * 1.02), ylim=(low - pad, high + pad))
    if max(late) > high:
        ax.set_title("Last half, enlarged (more on the left)")
    prefix_ticks(ax.xaxis)


def bytes_sent(run: Run) -> float:
    """Bytes per rank: the run's own total, else the sum of its sync records, else NaN."""
    if run.summary and run.summary.get("bytes_sent_per_rank") is not None:
        return number(run.summary["bytes_sent_per_rank"])
    return sum(number(r.get("bytes_sent")) for r in run.sync) if run.sync else math.nan


def speed(run: Run) -> float:
    """Tokens per second: of the summary, else the median over the training lines."""
    if run.summary and run.summary.get("tokens_per_s") is not None:
        return number(run.summary["tokens_per_s"])
    values = sorted(
        number(r["tokens_per_s"]) for r in run.train if r.get("tokens_per_s") is not None
    )
    return values[len(values) // 2] if values else math.nan


def draw_bars(
    ax: Any,
    runs: list[Run],
    values: list[float],
    title: str,
    text: Callable[[float], str],
    better: str,
) -> None:
    """One bar a run with its number beside it, and its ratio to the worst run.

    Runs of one method differ in speed by the machine's noise, so their ratio is left out.
    """
    known = [v for v in values if math.isfinite(v)]
    ax.set_title(title)
    ax.set_yticks(range(len(runs)), [run.name for run in runs])
    ax.set_ylim(len(runs) - 0.5, -0.5)
    compared = better == "less" or len({run.method for run in runs}) == len(runs)
    worst = (max if better == "less" else min)(known) if known else math.nan
    for i, value in enumerate(values):
        if not math.isfinite(value):
            ax.text(0, i, " not recorded", va="center", color="#666666")
            continue
        ax.barh(i, value, height=0.6, color=colour(i))
        ratio = worst / value if better == "less" and value > 0 else value / worst if worst else 1.0
        telling = compared and ratio >= 1.05 and math.isfinite(ratio)
        note = f"  {ratio:.1f}x {better}" if telling else ""
        open_end = "" if runs[i].summary else " so far" if better == "less" else ""
        ax.text(value, i, f" {text(value)}{open_end}{note}", va="center")
    ax.set_xlim(0, 1.75 * max(known) if known and max(known) > 0 else 1.0)
    ax.xaxis.set_visible(False)  # every bar carries its number and unit
    ax.spines["bottom"].set_visible(False)
    ax.grid(False)
