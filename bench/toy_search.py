"""What the toy problem's outcome is in numbers, and under which settings of a grid it holds.

Over the last quarter of the rounds each method has a distance, the mean of the agreed points'
distances to (1, 1), and a swing, their standard deviation. What is over TIMES times as far must be
so in every seed, so that a lucky one does not count; the rest are means of seeds. The claims are
those of CLAIMS.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from edit_ext.bench.toy_run import METHODS, WORKERS, Setting, distances, paths

NEAR, WITHIN, TIMES, FALL = 0.1, 0.2, 2.0, 0.1
CLAIMS = {
    "agree": f"DES-LOC and Local Adam end nearer than {NEAR:g}, within {WITHIN:.0%} of one another",
    "persistent farther": f"persistent states end over {TIMES:g} times as far as DES-LOC",
    "persistent swings": f"their swing is over {TIMES:g} times that of DES-LOC",
    "persistent nearer": f"the reverse: DES-LOC ends over {TIMES:g} times as far as they do",
    "reset stalls": f"with states reset it ends over {TIMES:g} times as far as DES-LOC, and "
    f"falls by less than {FALL:.0%} from the third quarter to the last",
    "reset with step stalls": "the same if the step counter starts anew too",
}
PAPERS = tuple(claim for claim in CLAIMS if claim != "persistent nearer")
GRID: dict[str, tuple[Any, ...]] = {
    "start": ((-1.5, 2.0), (0.0, 0.0), (2.0, 2.0)),
    "lr": (0.003, 0.01, 0.03, 0.1, 0.3),
    "b1": (0.9, 0.99, 0.999),
    "clip": (1.0, 10.0, math.inf),
    "corrected": (True, False),
}
ROUNDS = 40
SEEDS = (0, 1, 2)  # the benchmark's own runs have others
AT_ONCE = 12  # settings; of 2, 4 and 12 the fastest on one core
VARIANTS = {"iid": True, "non-iid": False}


def quarters(d: Tensor) -> tuple[Tensor, Tensor]:
    """Distances [..., rounds + 1] of the third and of the last quarter of the rounds."""
    quarter = max(1, (d.shape[-1] - 1) // 4)
    return d[..., -2 * quarter : -quarter], d[..., -quarter:]


def outcome(d: Mapping[str, Tensor]) -> dict[str, bool]:
    """Which claims hold. d: distances of each method, [seeds, rounds + 1]."""
    last = {name: quarters(each)[1] for name, each in d.items()}
    ends = {name: each.mean(dim=-1) for name, each in last.items()}  # of each seed
    swings = {name: each.std(dim=-1, correction=0) for name, each in last.items()}
    near, far = sorted(float(ends[name].mean()) for name in ("DES-LOC", "Local Adam"))

    def farther(name: str, than: str, values: Mapping[str, Tensor] = ends) -> bool:
        return bool((values[name] > TIMES * values[than]).all())

    def stalls(name: str) -> bool:
        before, after = (each.mean() for each in quarters(d[name]))
        return farther(name, "DES-LOC") and bool(after > (1 - FALL) * before)

    return {
        "agree": far < min(NEAR, (1 + WITHIN) * near),
        "persistent farther": farther("persistent", "DES-LOC"),
        "persistent swings": farther("persistent", "DES-LOC", swings),
        "persistent nearer": farther("DES-LOC", "persistent"),
        "reset stalls": stalls("reset"),
        "reset with step stalls": stalls("reset, step too"),
    }


def grid() -> list[Setting]:
    """Every combination of GRID."""
    return [
        Setting(**dict(zip(GRID, each, strict=True))) for each in itertools.product(*GRID.values())
    ]


def written(setting: Setting) -> dict[str, Any]:
    """For JSON, which knows no infinity: a clip of None is none."""
    values = {field.name: getattr(setting, field.name) for field in fields(setting)}
    return {**values, "clip": None if math.isinf(setting.clip) else setting.clip}


def row(setting: Setting, d: Mapping[str, Tensor]) -> dict[str, Any]:
    """A line of the search table: setting, distance and swing of each method, claims that hold."""
    last = {name: quarters(each)[1] for name, each in d.items()}
    return {
        **written(setting),
        "distance": [float(f"{each.mean():.3g}") for each in last.values()],
        "swing": [float(f"{each.std(-1, correction=0).mean():.2g}") for each in last.values()],
        "claims": [name for name, holds in outcome(d).items() if holds],
    }


def searched(alike: bool, rounds: int = ROUNDS, workers: int = WORKERS) -> list[dict[str, Any]]:
    """The table of the whole grid."""
    recipes = {name: method.recipe() for name, method in METHODS.items()}
    rows, settings = [], grid()
    for first in range(0, len(settings), AT_ONCE):
        some = settings[first : first + AT_ONCE]
        d = distances(
            paths(recipes, some, SEEDS, rounds=rounds, workers=workers, alike=alike)
        ).unbind(0)
        for number, setting in enumerate(some):
            each = {name: d[method][number] for method, name in enumerate(METHODS)}
            rows.append(row(setting, each))
    return rows


def shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How wide the region of each claim is: its share of the grid, and of each part of the grid in
    which one of the settings has one value."""

    def share(claim: str, some: Sequence[Mapping[str, Any]]) -> float:
        return round(sum(claim in each["claims"] for each in some) / max(1, len(some)), 4)

    found: dict[str, Any] = {}
    for claim in CLAIMS:
        found[claim] = {"all": share(claim, rows)}
        found[claim]["where agree"] = share(claim, [r for r in rows if "agree" in r["claims"]])
        for name in GRID:
            values = list(
                dict.fromkeys(tuple(r[name]) if name == "start" else r[name] for r in rows)
            )
            found[claim][name] = {
                "none" if value is None else str(value): share(
                    claim,
                    [r for r in rows if (tuple(r[name]) if name == "start" else r[name]) == value],
                )
                for value in values
            }
    return found


def times(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """How far persistent states end by how far DES-LOC does, means of the seeds, where DES-LOC and
    Local Adam agree: least, median, most. Rows without such a place: NaN."""
    ours, theirs = (list(METHODS).index(name) for name in ("DES-LOC", "persistent"))
    some = [each["distance"] for each in rows if "agree" in each["claims"]]
    found = sorted(each[theirs] / each[ours] for each in some) or [math.nan]
    return found[0], statistics.median(found), found[-1]


def search(rounds: int = ROUNDS, workers: int = WORKERS) -> dict[str, Any]:
    """Tables of the grid in both variants, the claims' shares of it, and its best setting."""
    began = time.perf_counter()
    with torch.inference_mode():
        rows = {name: searched(alike, rounds, workers) for name, alike in VARIANTS.items()}
    return {
        "seeds": list(SEEDS), "rounds": rounds, "workers": workers, "methods": list(METHODS),
        "claims": CLAIMS, "shares": {name: shares(each) for name, each in rows.items()},
        "best": best(rows), "rows": rows, "seconds": round(time.perf_counter() - began),
    }  # fmt: skip


def best(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The middle of the region: the learning rate, b1 and clip with most of the paper's claims over
    all starts, with and without bias correction, in both variants; of several, where DES-LOC ends
    nearest. Start and correction are the first of GRID."""
    held: dict[tuple[Any, ...], int] = {}
    far: dict[tuple[Any, ...], float] = {}
    for each in itertools.chain(*rows.values()):
        key = each["lr"], each["b1"], each["clip"]
        held[key] = held.get(key, 0) + sum(claim in each["claims"] for claim in PAPERS)
        far[key] = far.get(key, 0.0) + each["distance"][0]
    lr, b1, clip = max(held, key=lambda key: (held[key], -far[key]))
    start, corrected = list(GRID["start"][0]), GRID["corrected"][0]
    return {"start": start, "lr": lr, "b1": b1, "clip": clip, "corrected": corrected}
