"""The peer in CuPy: the same sync in fused kernels, on views of the torch tensors and their stream.

Written as a CuPy user would, all-reduce form: `ElementwiseKernel` and `ReductionKernel`, a call a
tensor. Memory passes, in bytes a parameter (fp32):

    pass                                          sync_rank  sync_stacked
    anchor - param                                12         12R
    norm                                           4          4R
    times weight                                   8          -
    weighted sum                                   -          4R + 4
    norm of the merged step                        4          4
    clip, SGD (Nesterov), copy into parameters    24          4R + 20
    total                                         52         24R + 28

A norm reads a stored difference: CuPy spreads a reduction over the whole device (CUB, its default)
only if it has one contiguous input, and runs one of anchor and parameter on a single block.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .peers import Peer, clip_factor
from .problem import POLICY, Problem
from .providers import Link

KINDS = {torch.float32: "float32", torch.float16: "float16"}
Array = Any  # cupy.ndarray


def obstacle(device: str, dtype: str) -> str:
    """Why CuPy cannot be timed here, in a sentence without its subject; empty if it can.

    device: "cpu" or "cuda". dtype: of the parameters, "fp32", "bf16" or "fp16".
    """
    if device != "cuda":
        return "it needs --device cuda"
    if dtype == "bf16":
        return "its kernels take fp32 and fp16 parameters, not bf16"
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"it cannot be imported ({error}); the extras cupy12 and cupy13 install it"
    except Exception as error:  # cupy's own error class is known only where cupy is
        return f"it finds no GPU ({error})"
    return "" if count else "it finds no GPU"


def version() -> str:
    """CuPy's own, where it is installed."""
    return str(importlib.import_module("cupy").__version__)


class Passes:
    """The kernels, which CuPy compiles at their first call.

    xp: the module `cupy`. kind: CuPy's name of the parameters' dtype. replicas: R lists of
    parameters at hand, that is 1 for sync_rank. Operations are C++ that Python can read as well:
    the tests run them on NumPy. Factors decided on the device come as `raw` vectors, for which
    the host is not asked.
    """

    def __init__(self, xp: Any, kind: str, replicas: int) -> None:
        held = range(replicas)
        self.difference = xp.ElementwiseKernel(
            f"float32 anchor, {kind} param",
            "float32 grad",
            "grad = anchor - float(param)",
            "difference",
        )
        self.square_sum = xp.ReductionKernel(
            "float32 x", "float32 total", "x * x", "a + b", "total = a", "0", "square_sum"
        )
        self.scale = xp.ElementwiseKernel(
            "float32 grad, raw float32 weights",
            "float32 scaled",
            "scaled = grad * weights[0]",
            "scale",
        )
        self.merge = xp.ElementwiseKernel(
            "".join(f"float32 grad{r}, " for r in held) + "raw float32 weights",
            "float32 merged",
            "merged = " + " + ".join(f"weights[{r}] * grad{r}" for r in held),
            "merge",
        )
        self.step = xp.ElementwiseKernel(
            "float32 grad, float32 momentum, float32 anchor, raw float32 clip, "
            "float32 outer_momentum, float32 outer_lr",
            "float32 buffer, float32 next" + "".join(f", {kind} param{r}" for r in held),
            "buffer = outer_momentum * momentum + clip[0] * grad; "
            "next = anchor - outer_lr * (clip[0] * grad + outer_momentum * buffer)"
            + "".join(f"; param{r} = next" for r in held),
            "outer_step",
        )


class CupyPeer(Peer):
    """Tensors of torch, and CuPy's views of them, which share their memory."""

    rank_bytes, stacked_bytes = 52.0, (24.0, 28.0)

    def __init__(self, problem: Problem, params: list[list[Tensor]]) -> None:
        super().__init__(problem, params)
        self.xp = importlib.import_module("cupy")
        self.passes = Passes(self.xp, KINDS[problem.dtype], len(params))
        self.grads = [[torch.empty_like(a) for a in self.anchor] for _ in params]
        self.sums = torch.empty(len(self.anchor))  # of squares, a tensor each
        self.factors = torch.empty(len(params))  # weights
        self.clip = torch.empty(1)
        with self.on_stream():
            self.cp_params = [self.views(own) for own in self.params]
            self.cp_grads = [self.views(own) for own in self.grads]
            self.cp_anchor, self.cp_momentum = self.views(self.anchor), self.views(self.momentum)
            self.cp_sums = self.views(self.sums.unbind())
            self.cp_factors, self.cp_clip = self.views([self.factors, self.clip])

    def on_stream(self) -> AbstractContextManager[Any]:
        """CuPy's kernels in line with torch's: on its current stream."""
        return self.xp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def views(self, tensors: Sequence[Tensor]) -> list[Array]:
        return [self.xp.from_dlpack(t) for t in tensors]

    def norm(self, grads: Sequence[Array]) -> Tensor:
        for grad, total in zip(grads, self.cp_sums, strict=True):
            self.passes.square_sum(grad, out=total)
        return self.sums.sum().sqrt()

    def differences(self) -> list[Tensor]:
        """Stored pseudo-gradients of all replicas at hand; their norms."""
        norms = []
        for params, grads in zip(self.cp_params, self.cp_grads, strict=True):
            for anchor, param, grad in zip(self.cp_anchor, params, grads, strict=True):
                self.passes.difference(anchor, param, grad)
            norms.append(self.norm(grads))
        return norms

    def step(self, grads: Sequence[Array]) -> None:
        """Clip, outer step and copy of the merged pseudo-gradient."""
        self.clip.copy_(clip_factor(self.norm(grads)))
        for i, (grad, a, m) in enumerate(zip(grads, self.cp_anchor, self.cp_momentum, strict=True)):
            copies = [own[i] for own in self.cp_params]
            self.passes.step(
                grad, m, a, self.cp_clip, POLICY.outer_momentum, POLICY.outer_lr, m, a, *copies
            )


class CupyRank(CupyPeer):
    def run(self, link: Link) -> None:
        with self.on_stream():
            (norm,) = self.differences()
            self.factors.copy_(self.weight(norm))
            for grad in self.cp_grads[0]:
                self.passes.scale(grad, self.cp_factors, grad)
            link.all_reduce(self.grads[0])
            self.step(self.cp_grads[0])


class CupyStacked(CupyPeer):
    def run(self, link: Link) -> None:
        with self.on_stream():
            self.factors.copy_(torch.softmax(-torch.stack(self.differences()), dim=0))
            for grads in zip(*self.cp_grads, strict=True):
                self.passes.merge(*grads, self.cp_factors, grads[0])
            self.step(self.cp_grads[0])
