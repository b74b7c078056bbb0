"""The peers in eager and foreach torch: the same sync written the straightforward way.

`sync_rank` as public code does it: pseudo-gradient of the whole layer, its norm, multiplied by the
replica's weight, all-reduce (left out for everybody), norm of the merged step, clipped, one
`torch.optim.SGD` (Nesterov) step of the whole anchor on every rank, anchor copied into the
parameters. Memory passes, in bytes a parameter (fp32):

    pass                      eager  foreach  compile
    copy into a flat tensor    8      -        -
    anchor - param            12     12       12 (with its norm)
    norm                       4      4        -
    times weight               8      8        8
    norm of the merged step    4      4        4
    times clip factor          8      8        -
    SGD, Nesterov             44     44       24 (with clip and copy)
    copy into the parameters   8      8        -
    total                     96     88       48

Eager has the form of the reference code of EDiT: anchor and momentum of a layer are one flat tensor
each (there FSDP's flat parameter), temporaries as large. Foreach and compile work on the lists of
tensors. Tensors that fit the last-level cache help foreach: one operation finds there what the one
before has left.

`sync_stacked`: differences of all R replicas, their norms, the weighted sum in place of the first,
then the same. Eager and foreach 36R + 52; compiled (`peers_compiled`), where no difference is ever
stored, 12R + 32.

Every norm is taken per tensor and then over tensors, as `torch.nn.utils.clip_grad_norm_` does. In
fp32 on the CPU it is off by 1e-4 for tensors of 8M elements (one norm over a bucket of 32M: 2e-3),
which is why the momentum, the clipped step at first hand, is checked to 1e-3 only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edit_ext.reference import CLIP_EPS

from .problem import CLIP_NORM, POLICY, Problem
from .providers import Link


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """Norm of the whole from the norms of its tensors."""
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def clip_factor(norm: Tensor) -> Tensor:
    """Eq. 4, without asking the host."""
    return (CLIP_NORM / (norm + CLIP_EPS)).clamp(max=1.0)


class Peer:
    """Working tensors in the model's shapes: parameters, anchor and its SGD with momentum."""

    foreach = False
    momentum_tolerance = 1e-3
    rank_bytes, stacked_bytes = 96.0, (36.0, 52.0)

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        self.problem, self.params = problem, params
        self.anchor = [a.clone() for a in problem.anchor]
        self.momentum = [m.clone() for m in problem.momentum]
        self.norms = torch.tensor(problem.norms, dtype=torch.float32)
        self.optimizer = self.outer_optimizer(self.anchor, self.momentum)
        if len(params) == 1:
            narrow = 4 - problem.dtype.itemsize  # parameters are read once and written once
            self.bytes_per_param = self.rank_bytes - 2.0 * narrow
        else:
            each, rest = self.stacked_bytes
            self.bytes_per_param = each * problem.count + rest

    def outer_optimizer(self, anchor: list[Tensor], momentum: list[Tensor]) -> torch.optim.SGD:
        optimizer = torch.optim.SGD(
            anchor,
            lr=POLICY.outer_lr,
            momentum=POLICY.outer_momentum,
            nesterov=POLICY.nesterov,
            foreach=self.foreach,
        )
        for a, m in zip(anchor, momentum, strict=True):
            optimizer.state[a]["momentum_buffer"] = m
        return optimizer

    def reset(self) -> None:
        for own, first in zip(self.params, self.problem.replicas, strict=False):
            torch._foreach_copy_(own, first)
        torch._foreach_copy_(self.anchor, self.problem.anchor)
        torch._foreach_copy_(self.momentum, self.problem.momentum)

    def state(self) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        return self.anchor, self.params, self.momentum

    def weight(self, norm: Tensor) -> Tensor:
        """Weight of replica 0 (Eq. 2), whose norm is `norm`; the others' norms were gathered."""
        self.norms[0] = norm
        return torch.softmax(-self.norms, dim=0)[0]

    def sgd(self, grads: Sequence[Tensor]) -> None:
        for a, g in zip(self.anchor, grads, strict=True):
            a.grad = g
        self.optimizer.step()


class EagerRank(Peer):
    """One flat anchor, gradient and momentum for the whole layer."""

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        super().__init__(problem, params)
        self.flat_anchor, self.flat_momentum = torch.empty(problem.n), torch.empty(problem.n)
        self.anchor, self.momentum = self.views(self.flat_anchor), self.views(self.flat_momentum)
        self.optimizer = self.outer_optimizer([self.flat_anchor], [self.flat_momentum])
        self.local = torch.empty(problem.n)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([a.numel() for a in self.problem.anchor])
        return [part.view_as(a) for part, a in zip(parts, self.problem.anchor, strict=True)]

    def run(self, link: Link) -> None:
        torch.cat([p.view(-1) for p in self.params[0]], out=self.local)
        grad = self.flat_anchor - self.local
        grads = self.views(grad)
        grad.mul_(self.weight(total_norm([torch.linalg.vector_norm(g) for g in grads])))
        link.all_reduce(grads)
        grad.mul_(clip_factor(total_norm([torch.linalg.vector_norm(g) for g in grads])))
        self.flat_anchor.grad = grad
        self.optimizer.step()
        for p, a in zip(self.params[0], self.anchor, strict=True):
            p.copy_(a)


class EagerStacked(Peer):
    def run(self, link: Link) -> None:
        every = [[a - p for a, p in zip(self.anchor, own, strict=True)] for own in self.params]
        norms = [total_norm([torch.linalg.vector_norm(g) for g in grads]) for grads in every]
        weights = torch.softmax(-torch.stack(norms), dim=0).tolist()
        merged = every[0]
        for g in merged:
            g.mul_(weights[0])
        for weight, grads in zip(weights[1:], every[1:], strict=True):
            for g, other in zip(merged, grads, strict=True):
                g.add_(other, alpha=weight)
        clip = clip_factor(total_norm([torch.linalg.vector_norm(g) for g in merged]))
        for g in merged:
            g.mul_(clip)
        self.sgd(merged)
        for own in self.params:
            for p, a in zip(own, self.anchor, strict=True):
                p.copy_(a)


class ForeachRank(Peer):
    foreach = True
    rank_bytes = 88.0

    def run(self, link: Link) -> None:
        grads = torch._foreach_sub(self.anchor, self.params[0])
        torch._foreach_mul_(grads, self.weight(total_norm(torch._foreach_norm(grads))))
        link.all_reduce(grads)
        torch._foreach_mul_(grads, clip_factor(total_norm(torch._foreach_norm(grads))))
        self.sgd(grads)
        torch._foreach_copy_(self.params[0], self.anchor)


class ForeachStacked(Peer):
    foreach = True

    def run(self, link: Link) -> None:
        every = [torch._foreach_sub(self.anchor, own) for own in self.params]
        norms = torch.stack([total_norm(torch._foreach_norm(grads)) for grads in every])
        weights = torch.softmax(-norms, dim=0).tolist()
        merged = every[0]
        torch._foreach_mul_(merged, weights[0])
        for weight, grads in zip(weights[1:], every[1:], strict=True):
            torch._foreach_add_(merged, grads, alpha=weight)
        torch._foreach_mul_(merged, clip_factor(total_norm(torch._foreach_norm(merged))))
        self.sgd(merged)
        for own in self.params:
            torch._foreach_copy_(own, self.anchor)
