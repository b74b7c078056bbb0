"""One run of the evidence: a byte-level Llama, replicas stacked in one process, one method."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import edit_ext
from edit_ext.bench.stacked import Replicas
from edit_ext.config import Method
from edit_ext.examples.data import Batches, Corpus, load_corpus, validation_batches
from edit_ext.examples.model import Llama, LlamaConfig

MODEL = LlamaConfig(dim=64, layers=2, heads=2, hidden=176)
SEQ_LEN, BATCH = 64, 6  # bytes of a window, windows of a replica's step
STEPS, RISE = 400, 20  # optimizer steps; those over which the learning rate rises
WARMUP = 16  # steps with averaged gradients
GRAD_CLIP = 1.0
EVAL_EVERY, EVAL_WINDOWS = 16, 512
NOISY = 1  # the replica that reads random bytes
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    "adopt": lambda p, lr: edit_ext.optim.ADOPT(p, lr=lr, betas=(0.95, 0.999)),
    "sgdm": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run trains, but for its seed."""

    method: Method
    lr: float = 4e-3
    optimizer: str = "adamw"
    replicas: int = 4
    steps: int = STEPS
    noise: tuple[int, int] | None = None
    """First step and end of those in which replica NOISY reads random bytes."""
    slow: int = 1
    """The last replica makes a step only every so many steps of the others."""
    sync_ticks: int = 0
    """Steps of the fastest replica between two syncs by the clock on the wall; 0: there is none."""
    joins: str | None = None
    """In the middle the replicas double: new ones take the weights, and "all" states of the
    optimizer too or "none"."""

    def described(self) -> dict[str, Any]:
        """Plain values: two runs with the same ones learn the same."""
        rest = {key: value for key, value in vars(self).items() if key != "method"}
        return {"method": self.method.name, "fields": str(self.method.as_dict()), **rest}


@functools.cache
def corpus() -> Corpus:
    """The text of all runs: the source code of Python's standard library."""
    return load_corpus([], window=SEQ_LEN + 1)
