"""Checkpoints of a run: a folder a step, a file a rank, and a pointer to the last complete one.

Inside a window each replica has weights of its own, so each rank saves its own file. The pointer
moves only after all ranks have written: a run killed in between resumes from the step before.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LATEST = "latest"


class ResumeError(ValueError):
    """There is no checkpoint, it is damaged, or of another run. The message is one line."""


def save_checkpoint(out: Path, rank: int, state: dict[str, Any]) -> None:
    """Write `state` (``state["step"]`` names it) from every rank; all ranks must call.

    `state` holds tensors, numbers, strings and containers of these, so that it loads with
    ``weights_only=True``. Older checkpoints are removed once this one is complete.
    """
    root, name = out / "checkpoints", f"step_{state['step']}"
    (root / name).mkdir(parents=True, exist_ok=True)
    path = root / name / f"rank_{rank}.pt"
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)
    if dist.is_initialized():
        dist.barrier()
    if rank:
        return
    pointer = root / (LATEST + ".part")
    pointer.write_text(name)
    os.replace(pointer, root / LATEST)
    for old in root.glob("step_*"):
        if old.name != name:
            shutil.rmtree(old)


def clear_checkpoints(out: Path) -> None:
    """Remove what an earlier run has left in `out`."""
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def load_checkpoint(out: Path, rank: int, settings: dict[str, object]) -> dict[str, Any]:
    """This rank's part of the last complete checkpoint.

    Raises ResumeError when there is none, when its file is damaged, or when its ``settings``
    differ from `settings`.
    """
    pointer = out / "checkpoints" / LATEST
    if not pointer.exists():
        raise ResumeError(f"--resume: {out} holds no checkpoint")
    path = pointer.parent / pointer.read_text().strip() / f"rank_{rank}.pt"
    if not path.exists():
        raise ResumeError(f"--resume: {path} is missing; was it another number of replicas?")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ResumeError(
            f"--resume: {path} is damaged or cut short, and cannot be read"
        ) from error
    then = state["settings"]
    for name in sorted(then.keys() | settings.keys()):
        if then.get(name) != settings.get(name):
            flag = "--" + name.replace("_", "-")
            raise ResumeError(
                f"--resume: the checkpoint was made with {flag} {then.get(name)}, "
                f"this run has {settings.get(name)}"
            )
    return dict(state)
