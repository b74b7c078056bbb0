"""Checkpoints of a run: a folder a step, and a pointer to the last complete one.

A folder is written by all ranks through torch.distributed.checkpoint (DCP) and holds what
`Handle.checkpoint` gives, for any number of replicas to go on from, with run.json, in which rank 0
says what run it is. The pointer moves only after all ranks have written: a run that is killed at
any moment goes on from the step before. All ranks must see the same folder.

DCP's description of a checkpoint is a pickle, which can run code: resume what you trust.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import edit_ext

LATEST, FACTS = "latest", "run.json"
Json = dict[str, Any]


class ResumeError(ValueError):
    """There is no checkpoint, it is damaged, or of another run. The message is one line."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its folder, and what the run had come to."""

    path: Path
    step: int
    replicas: int
    records: Json


def save_checkpoint(
    out: Path,
    step: int,
    sync: edit_ext.Handle,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    settings: Json,
    records: Json,
) -> None:
    """Write the checkpoint of `step` and remove older ones; all ranks must call.

    settings: what a resumed run must have in common with this one; records: what rank 0 goes on
    with. Both are plain values for JSON; those of rank 0 are kept.
    """
    root, name = out / "checkpoints", f"step_{step}"
    path = root / name
    with _no_process_group_is_fine():
        dcp.save({"run": sync.checkpoint(model, optimizer)}, checkpoint_id=path)
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank:
        return
    facts = {"step": step, "replicas": replicas, "settings": settings, "records": records}
    _write(path / FACTS, json.dumps(facts))
    _write(root / LATEST, name)
    clear_checkpoints(out, keep=path)


def clear_checkpoints(out: Path, keep: Path | None = None) -> None:
    """Remove all checkpoints in `out` but `keep`, those that a kill has left unfinished too."""
    root = out / "checkpoints"
    if keep is None:
        (root / LATEST).unlink(missing_ok=True)  # first: a pointer to nothing reads as damage
    for old in root.glob("step_*"):
        if old != keep:
            shutil.rmtree(old)


def find_checkpoint(out: Path, settings: Json, *, begin: bool) -> Saved | None:
    """The last complete checkpoint of a run; all its files are there, in full length.

    begin: None if there is none. Raises ResumeError when there is none otherwise, when it is
    damaged, or when its settings differ from `settings`.
    """
    pointer = out / "checkpoints" / LATEST
    if not pointer.exists():
        if begin:
            return None
        raise ResumeError(f"--resume: {out} holds no checkpoint")
    path = pointer.parent / pointer.read_text().strip()
    facts = _facts(path / FACTS)
    for file, size in _sizes(path).items():
        if not file.exists():
            raise ResumeError(f"--resume: {file} is missing")
        if file.stat().st_size < size:
            raise _damaged(file)
    _compare(facts["settings"], json.loads(json.dumps(settings)))  # JSON has no tuples
    return Saved(path, facts["step"], facts["replicas"], facts["records"])


def load_checkpoint(
    path: Path, sync: edit_ext.Handle, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Take over weights, optimizer and window; all ranks must call. Raises ResumeError."""
    try:
        with _no_process_group_is_fine():
            dcp.load({"run": sync.checkpoint(model, optimizer, path)}, checkpoint_id=path)
    except CheckpointException as error:
        raise _damaged(path) from error
    except ValueError as error:
        raise ResumeError(f"--resume: {path}: {error}") from error


def _facts(path: Path) -> Json:
    try:
        facts: Json = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ResumeError(f"--resume: {path} is missing") from error
    except (OSError, ValueError) as error:
        raise _damaged(path) from error
    return facts


def _sizes(path: Path) -> dict[Path, int]:
    """The files of a checkpoint, and the bytes that each must have at least."""
    reader = dcp.FileSystemReader(path)
    try:
        stored = reader.read_metadata().storage_data
    except FileNotFoundError as error:
        raise ResumeError(f"--resume: {path / '.metadata'} is missing") from error
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise _damaged(path / ".metadata") from error
    sizes: dict[Path, int] = {}
    for part in stored.values():
        file = path / part.relative_path
        sizes[file] = max(sizes.get(file, 0), part.offset + part.length)
    return sizes


def _compare(then: Json, now: Json) -> None:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            flag = "--" + name.replace("_", "-")
            raise ResumeError(
                f"--resume: the checkpoint was made with {flag} {then.get(name)}, "
                f"this run has {now.get(name)}"
            )


def _damaged(path: Path) -> ResumeError:
    return ResumeError(f"--resume: {path} is damaged or cut short, and cannot be read")


def _write(path: Path, text: str) -> None:
    """Either the old content or the new, whenever the process or the machine stops."""
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


@contextmanager
def _no_process_group_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
