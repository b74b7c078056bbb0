"""The layer, the replicas and the right answer of a kernel benchmark.

The unit of a sync is a layer, here one block of a Llama: two norms, four square projections and a
SwiGLU of about 8/3 the width, sized so that all tensors together have exactly n elements (what is
left over is one more vector). 32M elements are a block of width 1664, between those of a 350M and a
1B model. Each tensor is an allocation of its own.

Weights are drawn with deviation 0.02, differences so that replica r ends up 5 + r/4 from the
anchor; the outer momentum is not zero; the clip norm is low enough to clip. Norms, weights, clip
factor and outer step of the answer are those of `edit_ext.reference`, in fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edit_ext import reference

CLIP_NORM = 1.0
POLICY = reference.Policy(clip_norm=CLIP_NORM)
TOLERANCE = 1e-5  # of the largest value
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class WrongResult(Exception):
    """A provider's result differs from the reference: its time would mean nothing."""


def block_shapes(n: int) -> list[tuple[int, ...]]:
    """Shapes that hold exactly n elements; one vector where n is too small for a block.

    >>> block_shapes(2**25)[4:]
    [(1664, 1664), (1664,), (4502, 1664), (4502, 1664), (1664, 4502), (1536,)]
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 element")
    multiple = 64 if n > 2**20 else 8
    d = int(math.sqrt(n / 12)) // multiple * multiple  # 4 d^2 + 3 d 8/3 d = 12 d^2
    if d == 0:
        return [(n,)]
    f, rest = divmod(n - 4 * d * d - 2 * d, 3 * d)
    block = [(d,), (d, d), (d, d), (d, d), (d, d), (d,), (f, d), (f, d), (d, f)]
    return [*block, (rest,)] if rest else block


@dataclass(frozen=True)
class Problem:
    """First values and right results; lists have one entry a tensor of the layer."""

    n: int
    dtype: torch.dtype
    anchor: list[Tensor]  # fp32
    momentum: list[Tensor]  # fp32
    replicas: list[list[Tensor]]  # R lists, dtype
    norms: list[float]
    weights: list[float]
    merged: list[Tensor]  # weighted pseudo-gradient before clipping, fp32
    merged_norm: float
    new_anchor: list[Tensor]  # fp32
    new_momentum: list[Tensor]  # fp32

    @property
    def count(self) -> int:
        return len(self.replicas)

    def to(self, device: torch.device) -> Problem:
        """The same with all tensors there."""

        def there(tensors: list[Tensor]) -> list[Tensor]:
            return [t.to(device) for t in tensors]

        lists = ("anchor", "momentum", "merged", "new_anchor", "new_momentum")
        moved = {name: there(getattr(self, name)) for name in lists}
        return replace(self, replicas=[there(own) for own in self.replicas], **moved)


def make_problem(n: int, replicas: int, dtype: torch.dtype = torch.float32) -> Problem:
    """Draw the values (always the same ones) and compute the answer tensor by tensor."""
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; expected at least 1")
    draw = torch.Generator().manual_seed(20250730)
    shapes = block_shapes(n)

    def normal(shape: tuple[int, ...], deviation: float) -> Tensor:
        return torch.randn(shape, generator=draw) * deviation

    # Anchors that the parameter's dtype can hold, as they are at the first sync.
    anchor = [normal(shape, 0.02).to(dtype).float() for shape in shapes]
    momentum = [normal(shape, 0.3 / math.sqrt(n)) for shape in shapes]
    params = [
        [(a - normal(tuple(a.shape), (5 + r / 4) / math.sqrt(n))).to(dtype) for a in anchor]
        for r in range(replicas)
    ]
    norms = [
        math.sqrt(
            sum(
                ((a.double() - p.double()) ** 2).sum().item()
                for a, p in zip(anchor, own, strict=True)
            )
        )
        for own in params
    ]
    weights = reference.weights(norms, [True] * replicas, [1] * replicas, POLICY)
    merged64 = []
    for i, a in enumerate(anchor):
        merged64.append(
            sum(
                (
                    w * (a.double() - own[i].double())
                    for w, own in zip(weights, params, strict=True)
                ),
                torch.zeros_like(a, dtype=torch.float64),
            )
        )
    merged_norm = math.sqrt(sum((m * m).sum().item() for m in merged64))
    clip = reference.clip_coefficient(merged_norm, POLICY.clip_norm)
    new_anchor, new_momentum, merged = [], [], []
    for a, m, b in zip(anchor, merged64, momentum, strict=True):
        step, buffer = reference.outer_step(clip * m, b.double(), POLICY)
        new_anchor.append((a.double() - step).float())
        new_momentum.append(buffer.float())
        merged.append(m.float())
    return Problem(
        n,
        dtype,
        anchor,
        momentum,
        params,
        norms,
        weights,
        merged,
        merged_norm,
        new_anchor,
        new_momentum,
    )


def check(
    who: str, what: str, got: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE
) -> float:
    """Largest error relative to the largest expected value; WrongResult above the tolerance."""
    scale = max(e.abs().max().item() for e in expected) or 1.0
    errors = [
        (g.double() - e.double()).abs().max().item() for g, e in zip(got, expected, strict=True)
    ]
    error = max(errors) / scale
    if not max(errors) <= tolerance * scale or any(map(math.isnan, errors)):
        raise WrongResult(
            f"{who}: {what} differ from the reference by {error:.2e} of the largest value; "
            f"expected at most {tolerance:.0e}"
        )
    return error
