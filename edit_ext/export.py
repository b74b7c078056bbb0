"""`edit-ext export`: the agreed model of a checkpoint as a plain state dict, on one process."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from .checkpoint import Saved, saved_in


def export(checkpoint: str | Path, run: str | None = None) -> dict[str, Any]:
    """The weights that the replicas last agreed on, in the model's dtypes, with frozen parameters,
    and replica 0's buffers; by name, on the CPU.

    run: the key of the run in the tree given to `dcp.save`, where there are several.
    Raises ValueError when the checkpoint holds no run, or several and none named `run`.
    """
    saved = saved_in(checkpoint, run=run)
    texts = _read(checkpoint, saved, ["meta", "replica0.meta"])
    meta, counts = (json.loads(texts[key]) for key in ("meta", "replica0.meta"))
    places = ["anchors."] if counts["anchored"] else []
    found: dict[str, Any] = {}
    for place in ("replica0.model.", "frozen.", *places):
        keys = [place + name for name in saved.below(place)]
        found |= {k[len(place) :]: v for k, v in _read(checkpoint, saved, keys).items()}
    return {
        name: value.to(getattr(torch, meta["dtypes"][name])) if name in meta["dtypes"] else value
        for name, value in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `edit-ext export`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="edit-ext export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder that dcp.save has written")
    parser.add_argument("-o", "--out", type=Path, required=True, help="file for torch.save")
    parser.add_argument("--run", help="key of the run in the checkpoint, where it holds several")
    args = parser.parse_args(argv)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out: {args.out.absolute().parent} is no folder")
    try:
        state = export(args.checkpoint, args.run)
    except ValueError as error:
        parser.error(str(error))
    torch.save(state, args.out)
    count = sum(value.numel() for value in state.values())
    print(f"{args.out}: {len(state)} tensors, {count:,} values; read it with torch.load")
    return 0


def _read(checkpoint: str | Path, saved: Saved, keys: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in keys:
        what = saved.keys[saved.prefix + key]
        size = getattr(what, "size", None)
        tree[saved.prefix + key] = (
            "" if size is None else torch.zeros(size, dtype=what.properties.dtype)
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # one process is meant
        dcp.load(tree, checkpoint_id=checkpoint, no_dist=True)
    return {key: tree[saved.prefix + key] for key in keys}
