"""The peers in compiled torch: the same sync, cut where a decision or an all-reduce comes between.

Each part is one `torch.compile` of all tensors together (static shapes), so that Inductor may fuse
what it likes; how many bytes the parts move if it does is said in `peers`. Sums of squares go row
by row first: one running fp32 sum over millions of elements would fail the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .peers import Peer, clip_factor
from .problem import POLICY, Problem
from .providers import Link


def square_sum(x: Tensor) -> Tensor:
    return (x * x).sum(-1).sum()


def difference(anchor: list[Tensor], params: list[Tensor], grads: list[Tensor]) -> Tensor:
    total = torch.zeros(())
    for a, p, g in zip(anchor, params, grads, strict=True):
        d = a - p
        g.copy_(d)
        total = total + square_sum(d)
    return total.sqrt()


def scale(bucket: Tensor, weight: Tensor) -> None:
    bucket.mul_(weight)


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([square_sum(g) for g in grads]).sum().sqrt()


def step(
    anchor: list[Tensor],
    momentum: list[Tensor],
    replicas: list[list[Tensor]],
    grads: list[Tensor],
    norm: Tensor,
) -> None:
    """Clip, SGD (Nesterov) and the copy into every replica's parameters, in one pass."""
    clip = clip_factor(norm)
    for i, (a, m, g) in enumerate(zip(anchor, momentum, grads, strict=True)):
        clipped = g * clip
        buffer = POLICY.outer_momentum * m + clipped
        new = a - POLICY.outer_lr * (clipped + POLICY.outer_momentum * buffer)
        m.copy_(buffer)
        a.copy_(new)
        for params in replicas:
            params[i].copy_(new)


def norms_of(anchor: list[Tensor], replicas: list[list[Tensor]]) -> Tensor:
    squares = [
        torch.stack([square_sum(a - p) for a, p in zip(anchor, params, strict=True)]).sum()
        for params in replicas
    ]
    return torch.stack(squares).sqrt()


def merge(
    anchor: list[Tensor], replicas: list[list[Tensor]], grads: list[Tensor], weights: Tensor
) -> Tensor:
    total = torch.zeros(())
    for i, (a, g) in enumerate(zip(anchor, grads, strict=True)):
        merged = weights[0] * (a - replicas[0][i])
        for r in range(1, len(replicas)):
            merged = merged + weights[r] * (a - replicas[r][i])
        g.copy_(merged)
        total = total + square_sum(merged)
    return total.sqrt()


class CompileRank(Peer):
    rank_bytes = 48.0

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        super().__init__(problem, params)
        self.bucket = torch.empty(problem.n)
        sizes = [a.numel() for a in self.anchor]
        pairs = zip(self.bucket.split(sizes), self.anchor, strict=True)
        self.grads = [part.view_as(a) for part, a in pairs]
        self.difference, self.scale, self.total_norm, self.step = compiled(
            difference, scale, total_norm, step
        )

    def run(self, link: Link) -> None:
        norm = self.difference(self.anchor, self.params[0], self.grads)
        self.scale(self.bucket, self.weight(norm))
        link.all_reduce(self.grads)
        norm = self.total_norm(self.grads)
        self.step(self.anchor, self.momentum, self.params, self.grads, norm)


class CompileStacked(Peer):
    stacked_bytes = (12.0, 32.0)

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        super().__init__(problem, params)
        self.grads = [torch.empty_like(a) for a in self.anchor]
        self.norms_of, self.merge, self.step = compiled(norms_of, merge, step)

    def run(self, link: Link) -> None:
        weights = torch.softmax(-self.norms_of(self.anchor, self.params), dim=0)
        norm = self.merge(self.anchor, self.params, self.grads, weights)
        self.step(self.anchor, self.momentum, self.params, self.grads, norm)


def compiled(*functions: Any) -> list[Any]:
    """Compiled on first call. Earlier problems' code is dropped: shapes are static and many."""
    torch._dynamo.reset()
    return [torch.compile(function, dynamic=False, fullgraph=True) for function in functions]
