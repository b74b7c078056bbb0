"""DES-LOC's two wall-clock figures (arXiv 2505.22549, App. G), drawn from the models of planner.py:
training time against the link's bandwidth, and against the period of the weights on this link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from . import report_style as style
from .planner import Job, Schedule, rows
from .planner_time import payload_bytes
from .planner_units import PlanError

PERIOD = 256  # K of the paper's figures: DES-LOC at K, 3 K, 6 K
LONGEST = 4096  # steps, of the second panel
SLOWEST, FASTEST = 1 / 2000, 50  # link, by one on which averaging gradients takes a step's time
POINTS = 120  # of a curve


class Curve(NamedTuple):
    name: str
    colour: str
    at: Callable[[float], Schedule]  # period of the weights
    plain: bool = True  # whether it is drawn with nothing hidden too


def _states(*ratios: int) -> Callable[[float], Schedule]:
    return lambda k: Schedule(method="drawn", every=k, states=tuple(r * k for r in ratios))


CURVES = (
    Curve(
        "gradients at every step", style.BLACK,
        lambda _: Schedule(method="synchronous", every=1, hidden_by="backward"),
    ),
    Curve("Local Adam (K, K, K)", style.ORANGE, _states(1, 1)),
    Curve("DES-LOC (K, 3K, 6K)", style.VERMILION, _states(3, 6)),
    Curve("weights alone (K): FedAvg, EDiT", style.BLUE, _states()),
    Curve(
        "weights a window late (K): CO2", style.PURPLE,
        lambda k: Schedule(method="co2", every=k, hidden_by="window"), plain=False,
    ),
)  # fmt: skip


def draw(job: Job, picture: Path) -> Path:
    """Two panels on log axes; the suffix chooses the format, and folders are created. Raises
    PlanError: matplotlib is not installed, or the format is unknown."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlanError(
            "--picture draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style.RC):
        fig = Figure(figsize=(style.WIDTH, 7.5), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(fig)
        left, right = fig.subplots(1, 2, sharey=True)
        _against_bandwidth(left, job)
        _against_period(right, job)
        left.set_ylabel("training time, by that of computing alone")
        fig.suptitle(_inputs(job), fontsize=12, x=0.01, ha="left")
        _legend(fig)
        try:
            fig.savefig(picture)
        except ValueError as error:
            raise PlanError(f"--picture {picture}: {error}") from error
    return picture


def slowness(job: Job, schedule: Schedule, *, overlap: bool) -> float:
    """Seconds a step by those that compute: 1 / utilisation."""
    return 1 / rows(job, [schedule], overlap=overlap)[0].utilisation


def _against_bandwidth(ax: Any, job: Job) -> None:
    equal = payload_bytes(job, 4) / job.step_time
    links = _spread(SLOWEST * equal, FASTEST * equal)
    for curve in CURVES:
        jobs = [replace(job, bandwidth=link) for link in links]
        _lines(ax, curve, [8 * link for link in links], [(j, curve.at(PERIOD)) for j in jobs])
    _mark(ax, 8 * job.bandwidth, "this link")
    _axes(ax, f"Against the link; K = {PERIOD}, 3K = {3 * PERIOD}, 6K = {6 * PERIOD}")
    ax.set_xlabel("bandwidth of each rank (bit/s)")
    ax.set_xlim(8 * links[0], 8 * links[-1])
    style.prefix_ticks(ax.xaxis)


def _against_period(ax: Any, job: Job) -> None:
    periods = sorted({round(k) for k in _spread(1, LONGEST)})
    for curve in CURVES:
        _lines(ax, curve, periods, [(job, curve.at(k)) for k in periods])
    _mark(ax, PERIOD, f"K = {PERIOD}")
    _axes(ax, f"Against the period, on {style.scaled(8 * job.bandwidth, 'bit/s')}")
    ax.set_xlabel("K (steps between two syncs of the weights)")
    ax.set_xlim(1, LONGEST)
    ax.set_xticks([4**n for n in range(7)], [str(4**n) for n in range(7)])
    ax.minorticks_off()
    ax.axhline(1 / job.target, color="#666666", linewidth=1, linestyle=":")
    ax.annotate(
        f"{job.target:.1%} computes", (1, 1), (6, -3), va="top", textcoords="offset points",
        color="#444444", fontsize=11,
    )  # fmt: skip


def _lines(
    ax: Any, curve: Curve, x: Sequence[float], points: Sequence[tuple[Job, Schedule]]
) -> None:
    for overlap, dash in ((False, "-"), (True, "--"))[not curve.plain :]:
        values = [slowness(job, schedule, overlap=overlap) for job, schedule in points]
        ax.plot(x, values, dash, color=curve.colour, linewidth=1.8)


def _axes(ax: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(bottom=0.65)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    ax.set_title(title)


def _mark(ax: Any, x: float, text: str) -> None:
    """A vertical line, its words at the top end."""
    ax.axvline(x, color="#666666", linewidth=1, linestyle=":")
    ax.annotate(
        text, (x, 1), (4, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
        va="top", color="#444444", fontsize=11,
    )  # fmt: skip


def _legend(fig: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=c.colour, label=c.name, linestyle="-" if c.plain else "--")
        for c in CURVES
    ]
    handles.append(Line2D([], [], color="#666666", linestyle="-", label="nothing hidden"))
    handles.append(Line2D([], [], color="#666666", linestyle="--", label="hidden as edit_ext does"))
    fig.legend(handles=handles, loc="outside lower center", ncols=4)


def _inputs(job: Job) -> str:
    shards = f" of {job.shards} shards" if job.shards > 1 else ""
    return (
        f"{job.params:,.0f} parameters in {job.layers} layers, "
        f"{job.replicas} replicas{shards}, {job.step_time:g} s of computing a step, "
        f"{1e3 * job.latency:g} ms of latency, wire {job.wire}"
    )


def _spread(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (n / (POINTS - 1)) for n in range(POINTS)]
