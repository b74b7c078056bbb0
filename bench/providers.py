"""What is timed: edit_ext here, its peers in `peers`; one interface for all.

`sync_rank`, one rank of R: everything a sync computes on it and nothing it sends. `sync_stacked`: R
replicas on one device. A provider counts its own bytes (`bytes_per_param`): what its memory passes
read and write if each touches each operand once, without the reads of a cache before it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from edit_ext import ops, reference

from .problem import POLICY, TOLERANCE, Problem


class Link:
    """The other replicas, as a timed run sees them: nothing is sent, nothing arrives."""

    def all_reduce(self, grads: Sequence[Tensor]) -> None:
        """Sum the weighted pseudo-gradients over replicas."""

    def mesh_all_reduce(self, norm2: Tensor) -> None:
        """Sum the squared norm of the merged pieces over replicas."""

    def all_gather(self, anchor: Tensor) -> None:
        """Fetch the others' pieces of the new anchor."""


class Provider(Protocol):
    """A way of doing `op`; its working tensors are `Problem`'s first values after `reset`."""

    bytes_per_param: float
    momentum_tolerance: float  # of its largest value; the clip factor is only as good as the norm

    def reset(self) -> None: ...
    def run(self, link: Link) -> None: ...
    def state(self) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """New anchor, parameters of each replica at hand, and momentum, in the model's tensors."""
        ...


class Flat:
    """The flat layout of edit_ext: pack the model's tensors, and see them again."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.shapes = [t.shape for t in tensors]
        self.offsets, self.size = ops.flat_offsets(tensors)

    def pack(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        out = torch.zeros(self.size) if out is None else out
        for view, tensor in zip(self.views(out), tensors, strict=True):
            view.copy_(tensor)
        return out

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]


class Peers(Link):
    """The other replicas, as the check of replica 0 sees them: what they would send, exactly."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.flat = Flat(problem.anchor)
        self.piece = reference.piece_sizes(self.flat.size, problem.count)[0]

    def all_reduce(self, grads: Sequence[Tensor]) -> None:
        p = self.problem
        for grad, anchor, own, merged in zip(grads, p.anchor, p.replicas[0], p.merged, strict=True):
            grad += merged.double().sub_(anchor.double() - own.double(), alpha=p.weights[0]).float()

    def mesh_all_reduce(self, norm2: Tensor) -> None:
        piece = self.flat.pack(self.problem.merged)[: self.piece].double()
        norm2 += self.problem.merged_norm**2 - (piece * piece).sum()

    def all_gather(self, anchor: Tensor) -> None:
        anchor[self.piece :] = self.flat.pack(self.problem.new_anchor)[self.piece :]


class EditExtRank:
    """Steps 1, 5, 7 and 9 on replica 0, which owns piece 0; the others' pieces have arrived."""

    momentum_tolerance = TOLERANCE

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        self.problem, self.params = problem, params[0]
        self.flat = Flat(problem.anchor)
        self.anchor, self.momentum = (
            self.flat.pack(problem.anchor),
            self.flat.pack(problem.momentum),
        )
        self.start = self.anchor.clone()
        count = reference.piece_sizes(self.flat.size, problem.count)[0]
        self.send = torch.zeros(self.flat.size)
        self.own_anchor, self.own_momentum = self.anchor[:count], self.momentum[:count].clone()
        self.own_start = self.own_momentum.clone()
        received = [
            self.flat.pack([a - p for a, p in zip(problem.anchor, params_r, strict=True)])[
                :count
            ].clone()
            for params_r in problem.replicas[1:]
        ]
        self.pieces = [self.send[:count], *received]
        self.merged = torch.empty(count)
        self.norms = torch.tensor(problem.norms, dtype=torch.float64)
        self.steps = torch.ones(problem.count, dtype=torch.int64)
        self.detector = torch.zeros(problem.count, 5, dtype=torch.float64)
        size = problem.dtype.itemsize
        self.bytes_per_param = reference.memory_bytes(problem.count, param=size)["total"]

    def reset(self) -> None:
        for param, first in zip(self.params, self.problem.replicas[0], strict=True):
            param.copy_(first)
        self.anchor.copy_(self.start)
        self.own_momentum.copy_(self.own_start)
        self.detector.zero_()

    def run(self, link: Link) -> None:
        p = POLICY
        norm2 = ops.pseudo_grad(self.anchor, self.params, self.send)
        self.norms[0] = norm2.sqrt()[0]
        weights, _, _ = ops.decide(
            self.norms,
            self.steps,
            self.detector,
            weighting=p.weighting,
            temperature=p.temperature,
            z_threshold=p.z_threshold,
            ema_alpha=p.ema_alpha,
            ema_warmup=p.ema_warmup,
            max_flags_in_a_row=p.max_flags_in_a_row,
        )
        merged2 = ops.merge(self.pieces, weights, self.merged)
        link.mesh_all_reduce(merged2)
        ops.outer_step(
            self.merged,
            self.own_anchor,
            self.own_momentum,
            merged2,
            p.outer_lr,
            p.outer_momentum,
            p.nesterov,
            p.clip_norm,
        )
        link.all_gather(self.anchor)
        ops.write_back(self.anchor, self.params)

    def state(self) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        momentum = self.flat.pack(self.problem.new_momentum)  # of which only piece 0 is ours
        momentum[: len(self.own_momentum)] = self.own_momentum
        return self.flat.views(self.anchor), [self.params], self.flat.views(momentum)


class EditExtStacked:
    """`edit_ext.ops.stacked_outer_step`: two passes over memory."""

    momentum_tolerance = TOLERANCE

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        self.problem, self.params = problem, params
        self.flat = Flat(problem.anchor)
        self.anchor, self.momentum = (
            self.flat.pack(problem.anchor),
            self.flat.pack(problem.momentum),
        )
        self.detector = torch.zeros(problem.count, 5, dtype=torch.float64)
        self.bytes_per_param = float(reference.stacked_bytes(problem.count))

    def reset(self) -> None:
        for own, first in zip(self.params, self.problem.replicas, strict=True):
            for param, value in zip(own, first, strict=True):
                param.copy_(value)
        self.flat.pack(self.problem.anchor, self.anchor)
        self.flat.pack(self.problem.momentum, self.momentum)
        self.detector.zero_()

    def run(self, link: Link) -> None:
        p = POLICY
        ops.stacked_outer_step(
            self.params,
            self.anchor,
            self.momentum,
            self.detector,
            outer_lr=p.outer_lr,
            outer_momentum=p.outer_momentum,
            nesterov=p.nesterov,
            clip_norm=p.clip_norm,
        )

    def state(self) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        return self.flat.views(self.anchor), self.params, self.flat.views(self.momentum)
