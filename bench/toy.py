"""The toy problem of DES-LOC's paper (arXiv 2505.22549, Fig. 1): 256 workers, each with Adam and
noisy gradients, on f(x) = (1 - x1)^2 + 100 (x2 - x1^2)^2, which is least at (1, 1).

DES-LOC averages weights and first moments every 192 steps and second moments every 692; Local Adam
all three every 192; of federated averaging, which averages weights alone, the states persist, or
are zeroed after each average ("step too": Adam's counter of steps starts anew as well). The noise
is N(0, 1.5^2) on every coordinate of every gradient ("iid"), or worker m's sigma is |N(0, 3)|
("non-iid"). A round is 192 steps. The paper gives neither start, learning rate, b1, clipping, bias
correction nor the number of rounds: --search scans a grid of them for its claims (4 minutes of one
core).

  distance  of the agreed point to (1, 1), a mean over the last quarter of the rounds and all seeds
  +-        standard deviation of it over seeds
  swing     standard deviation over the rounds of the last quarter, a mean over seeds
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edit_ext.bench.command_line import positive
from edit_ext.bench.machine import header, machine
from edit_ext.bench.table import text_table
from edit_ext.bench.toy_picture import draw
from edit_ext.bench.toy_run import METHODS, WORKERS, Setting, distances, paths
from edit_ext.bench.toy_search import (
    CLAIMS,
    ROUNDS,
    SEEDS,
    VARIANTS,
    outcome,
    quarters,
    search,
    times,
    written,
)

# What `best` makes of the search; there the claims of agreement and of resets hold at every start.
DEFAULT = Setting(start=(-1.5, 2.0), lr=0.1, b1=0.9, clip=math.inf, corrected=True)
FIRST_SEED = max(SEEDS) + 1  # the default was chosen with the others


def rounded(tensor: torch.Tensor) -> Any:
    """Nested lists of numbers with five figures."""
    if tensor.dim():
        return [rounded(each) for each in tensor]
    return float(f"{float(tensor):.5g}")


def measured(seeds: int, rounds: int, workers: int) -> dict[str, Any]:
    """Distances and paths of the default setting: by variant, then method."""
    recipes = {name: method.recipe() for name, method in METHODS.items()}
    found: dict[str, Any] = {}
    for variant, alike in VARIANTS.items():
        numbers = range(FIRST_SEED, FIRST_SEED + seeds)
        with torch.inference_mode():
            points = paths(
                recipes, [DEFAULT], numbers, rounds=rounds, workers=workers, alike=alike
            )[:, 0]
        d = dict(zip(METHODS, distances(points), strict=True))
        held = outcome(d)
        found[variant] = {"claims": [claim for claim in CLAIMS if held[claim]], "methods": {}}
        for name, each, path in zip(METHODS, d.values(), points, strict=True):
            last = quarters(each)[1]
            found[variant]["methods"][name] = {
                "end": rounded(last.mean()), "end_of_seeds": rounded(last.mean(dim=-1)),
                "swing": rounded(last.std(dim=-1, correction=0).mean()),
                "distance": rounded(each.mean(dim=0)),
                "spread": rounded(each.std(dim=0, correction=0)),
                "path": rounded(path.mean(dim=0)),
            }  # fmt: skip
    return found


def table(runs: dict[str, Any]) -> str:
    """A line for each variant and method; the columns are those of the module's docstring."""
    lines = [
        {
            "noise": variant,
            "method": name,
            "distance": f"{each['end']:.4f}",
            "+-": f"{torch.tensor(each['end_of_seeds']).std(correction=0):.4f}",
            "swing": f"{each['swing']:.4f}",
        }
        for variant, run in runs.items()
        for name, each in run["methods"].items()
    ]
    return text_table(lines, list(lines[0]))


def claims(result: dict[str, Any]) -> str:
    """Each claim, whether it holds, and where it does in the grid if that was searched."""
    lines = []
    for claim, words in CLAIMS.items():
        for variant, run in result["runs"].items():
            text = f"{'holds' if claim in run['claims'] else 'does not hold'} ({variant})"
            if "search" in result:
                shares = result["search"]["shares"][variant][claim]
                text += f", in {shares['all']:.1%} of the grid"
                if claim != "agree":
                    text += f" and in {shares['where agree']:.1%} of its part with `agree`"
            lines.append(f"  {text}")
        lines.insert(-len(result["runs"]), f"{claim}: {words}")
    for variant, rows in result.get("search", {}).get("rows", {}).items():
        least, median, most = times(rows)
        lines.append(
            f"persistent states, by DES-LOC in the part with `agree` ({variant}): "
            f"{least:.2f} to {most:.2f} times as far, median {median:.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m edit_ext.bench.toy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value, words in (
        ("seeds", 3, f"of the noise, from {FIRST_SEED} on"),
        ("rounds", ROUNDS, "of 192 steps"),
        ("workers", WORKERS, ""),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=value, metavar="N", help=f"{words} ({value})"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw distances and paths")
    parser.add_argument("--search", action="store_true", help="also scan the grid of settings")
    options = parser.parse_args(arguments)
    began, info = time.perf_counter(), machine()
    size = {name: getattr(options, name) for name in ("seeds", "rounds", "workers")}
    result: dict[str, Any] = {
        "machine": info, **size, "first_seed": FIRST_SEED, "setting": written(DEFAULT),
        "runs": measured(**size),
    }  # fmt: skip
    result["seconds"] = round(time.perf_counter() - began)
    if options.search:
        result["search"] = search(options.rounds, options.workers)
    print(f"{header(info)}\n{DEFAULT}\n\n{table(result['runs'])}\n\n{claims(result)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(compact(result) + "\n")
    if options.picture:
        print(draw(result, options.picture))
    return 0


def compact(result: dict[str, Any]) -> str:
    """JSON with what holds nothing deeper, lists and rows of the search, in a line each."""
    text = json.dumps(result, indent=1, allow_nan=False)
    flat = re.compile(r"\[\s[^\[\]{}]*\]")
    text = flat.sub(lambda found: re.sub(r"\s+", " ", found.group()), text)
    rows = re.compile(r"\{\s+\"start\"[^{}]*\}")
    return rows.sub(lambda found: re.sub(r"\s*\n\s*", " ", found.group()), text)


if __name__ == "__main__":
    sys.exit(main())
