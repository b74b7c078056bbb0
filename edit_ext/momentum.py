"""The outer momentum of whole layers, wherever the replicas hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C
from .comm import RankGroup


def gather(layer: _C.Layer, group: RankGroup, what: str) -> Tensor:
    """A layer's outer momentum from the pieces of all replicas, [replicas * piece] fp32 on the
    host; empty if there is none. Collective over the replica group, unless every replica holds all
    of it."""
    if layer.momentum is None:
        return torch.zeros(0)
    mine = layer.momentum.cpu()
    if layer.whole_momentum:
        return mine
    return torch.cat(group.gather_tensor(mine, f"{what}, outer momentum of {layer.name!r}"))


def put(layer: _C.Layer, whole: Tensor, replica: int) -> None:
    """Keep of a whole momentum, `size` elements or more, what this replica has to hold."""
    if layer.momentum is None:
        return
    here = layer.momentum
    first = 0 if layer.whole_momentum else replica * here.numel()
    part = whole[first : first + here.numel()]
    here.zero_()  # the last pieces may be short, or padding alone
    here[: part.numel()].copy_(part)
