"""The steps of a sync as torch operators, `torch.ops.edit_ext.*`, with their fake kernels.

Flat layout: the tensors of a layer lie one behind the other in fp32 buffers (anchor, momentum) and
wire buffers (send), each at a multiple of 128 elements; `flat_offsets` tells where. All operators
work in place, on the CPU or on one CUDA device, on tensors and on arrays that offer DLPack or
`__cuda_array_interface__` (CuPy, NumPy; nothing is copied). They raise TypeError or ValueError
naming the argument, its value and what was expected.

    pseudo_grad(anchor, params, send!) -> sumsq
        send = round(anchor) - param, rounded to send's dtype (float32 or bfloat16); sumsq is
        float64 [1], the sum of squares before that rounding. Algorithm 2 of arXiv 2412.07210.
    decide(norms, steps, detector!, ...) -> (weights, flags, skip)
        norms float64 [R], steps int64 [R], detector float64 [R, 5]; Eq. 1 and 2.
    merge(pieces, weights, merged!) -> sumsq
        merged = sum of weights[r] * pieces[r] in replica order; a weight of 0 is not read. Eq. 3.
    outer_step(merged, anchor!, momentum!, norm2, ...)
        clip by norm2 (float64 [1], the squared norm of the merged layer; Eq. 4), then SGD.
    write_back(anchor, params!)
        param = anchor rounded to the parameter's dtype.
    stream(kind, a, b, out!) -> sumsq
        the benchmarks' yardstick: 0 out = a, 1 out = a + 2 b, 2 the sum of squares of a.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from edit_ext import _C  # noqa: F401  (importing it registers the operators)

from .arrays import as_tensor, taking_arrays

GROUP = 128  # elements; kGroup of csrc/core/base.h

_ops = torch.ops.edit_ext
pseudo_grad = taking_arrays(_ops.pseudo_grad)
decide = taking_arrays(_ops.decide)
merge = taking_arrays(_ops.merge)
outer_step = taking_arrays(_ops.outer_step)
write_back = taking_arrays(_ops.write_back)
stream = taking_arrays(_ops.stream)


class Stacked(NamedTuple):
    """What a stacked sync decided."""

    norms: Tensor  # float64 [R], of each replica's pseudo-gradient
    weights: Tensor  # float32 [R], Eq. 2; exactly 0 where flagged
    flags: Tensor  # bool [R], Eq. 1
    scalars: Tensor  # float64 [3]: norm of the merged step, clip factor (Eq. 4), skipped (0 or 1)


def flat_offsets(params: list[Tensor]) -> tuple[list[int], int]:
    """First element of each tensor in the flat layout, and the size of the flat buffers.

    >>> flat_offsets([torch.empty(3), torch.empty(128), torch.empty(2, 100)])
    ([0, 128, 256], 512)
    """
    offsets, size = [], 0
    for p in params:
        offsets.append(size)
        size += -(-p.numel() // GROUP) * GROUP
    return offsets, size


def stacked_outer_step(
    replicas: list[list[Tensor]],
    anchor: Tensor,
    momentum: Tensor,
    detector: Tensor,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.8,
    nesterov: bool = True,
    clip_norm: float | None = 10.0,
    weighting: str = "softmax",
    temperature: float = 1.0,
    z_threshold: float | None = 3.0,
    ema_alpha: float = 0.02,
    ema_warmup: int = 10,
    max_flags_in_a_row: int = 10,
) -> Stacked:
    """One whole EDiT sync (Algorithm 2) of R replicas of a layer that lie on one device.

    Two passes over memory, 12R + 20 bytes an element: inner products of all pseudo-gradients give
    norms, weights and the norm of the merged step (w'Gw; one exact pass more where the replicas
    nearly cancel), then merge, clip, outer step and write-back go together. On a GPU whose shared
    memory holds the whole layer one pass is enough, 8R + 16 bytes, with the same bits.

    replicas: R lists of equally shaped dense float32 tensors, updated in place; R <= 8.
    anchor, momentum: float32 vectors in the flat layout, updated in place.
    detector: float64 [R, 5], updated in place.
    """
    for r, replica in enumerate(replicas):
        if len(replica) != len(replicas[0]):
            raise ValueError(
                f"replicas[{r}] has {len(replica)} tensors; expected {len(replicas[0])}, as "
                "replicas[0]"
            )
    params = [as_tensor(p) for replica in replicas for p in replica]
    return Stacked(
        *_ops.stacked_outer_step(
            params,
            len(replicas),
            as_tensor(anchor),
            as_tensor(momentum),
            as_tensor(detector),
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            clip_norm=clip_norm,
            weighting=weighting,
            temperature=temperature,
            z_threshold=z_threshold,
            ema_alpha=ema_alpha,
            ema_warmup=ema_warmup,
            max_flags_in_a_row=max_flags_in_a_row,
        )
    )


# Fake kernels: shapes and dtypes for torch.compile, and the only code that sees `meta` tensors.
def _scalar(like: Tensor) -> Tensor:
    return like.new_empty(1, dtype=torch.float64)


def _one_device(**arguments: Tensor | list[Tensor]) -> None:
    """Refuse a mixture: one `meta` tensor among real ones sends the call here, not to a kernel."""
    devices = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            devices[name] = value.device
        else:
            devices |= {f"{name}[{i}]": tensor.device for i, tensor in enumerate(value)}
    real = [device for device in devices.values() if device.type != "meta"]
    for name, device in devices.items():
        if real and device != real[0]:
            raise ValueError(f"{name} is on {device}; expected {real[0]}")


@torch.library.register_fake("edit_ext::pseudo_grad")
def _(anchor: Tensor, params: list[Tensor], send: Tensor) -> Tensor:
    _one_device(anchor=anchor, params=params, send=send)
    return _scalar(anchor)


@torch.library.register_fake("edit_ext::decide")
def _(
    norms: Tensor, steps: Tensor, detector: Tensor, **policy: object
) -> tuple[Tensor, Tensor, Tensor]:
    _one_device(norms=norms, steps=steps, detector=detector)
    replicas = norms.shape[0]
    return (
        norms.new_empty(replicas, dtype=torch.float32),
        norms.new_empty(replicas, dtype=torch.bool),
        norms.new_empty(1, dtype=torch.bool),
    )


@torch.library.register_fake("edit_ext::merge")
def _(pieces: list[Tensor], weights: Tensor, merged: Tensor) -> Tensor:
    _one_device(pieces=pieces, weights=weights, merged=merged)
    return _scalar(merged)


@torch.library.register_fake("edit_ext::outer_step")
def _(merged: Tensor, anchor: Tensor, momentum: Tensor, norm2: Tensor, *policy: object) -> None:
    _one_device(merged=merged, anchor=anchor, momentum=momentum, norm2=norm2)


@torch.library.register_fake("edit_ext::write_back")
def _(anchor: Tensor, params: list[Tensor]) -> None:
    _one_device(anchor=anchor, params=params)


@torch.library.register_fake("edit_ext::stacked_outer_step")
def _(
    params: list[Tensor],
    replicas: int,
    anchor: Tensor,
    momentum: Tensor,
    detector: Tensor,
    **policy: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _one_device(params=params, anchor=anchor, momentum=momentum, detector=detector)
    return (
        anchor.new_empty(replicas, dtype=torch.float64),
        anchor.new_empty(replicas, dtype=torch.float32),
        anchor.new_empty(replicas, dtype=torch.bool),
        anchor.new_empty(3, dtype=torch.float64),
    )


@torch.library.register_fake("edit_ext::stream")
def _(kind: int, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    _one_device(a=a, b=b, out=out)
    return _scalar(a)
