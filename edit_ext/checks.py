"""What attach refuses by name, and what must not change behind its back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from . import _C
from .layer import clean
from .sharding import is_sharded, local

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_model(model: nn.Module, *, warmup: bool) -> None:
    """Raise TypeError or ValueError, naming the module or parameter, for what cannot be attached.

    warmup: gradients are going to be averaged.
    """
    for name, module in model.named_modules():
        _check_module(clean(name) or type(module).__name__, module, warmup)
    places: dict[tuple[int, object], str] = {}
    for name, param in model.named_parameters():
        name = clean(name)
        _check_parameter(name, param)
        if param.numel() and param.requires_grad:
            own = local(param)
            place = (own.untyped_storage().data_ptr(), own.storage_offset())
            if own.numel() and place in places:
                raise ValueError(
                    f"parameters {places[place]!r} and {name!r} are two objects on one memory; tie "
                    "them by using one nn.Parameter in both places"
                )
            places[place] = name
    homes: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            homes.setdefault(local(param).device, clean(name))
    if len(homes) > 1:
        said = ", ".join(f"{name!r} on {device}" for device, name in homes.items())
        raise ValueError(
            f"the trainable parameters are on several devices: {said}; attach needs one"
        )
    if not places and not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter")


def _check_module(name: str, module: nn.Module, warmup: bool) -> None:
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"{name} is wrapped in DistributedDataParallel, which averages gradients at every step "
            "and leaves nothing local; attach to the module inside it instead"
        )
    if parametrize.is_parametrized(module):
        raise ValueError(
            f"module {name!r} is parametrized (torch.nn.utils.parametrize): what is trained is not "
            "what the forward uses; remove the parametrization first"
        )
    sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    if sparse and warmup:
        raise ValueError(
            f"module {name!r} has sparse gradients, which cannot be averaged during the warm-up; "
            "set warmup_steps=0, or sparse=False in the module"
        )


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.UninitializedParameter):
        raise ValueError(f"parameter {name!r} has no shape yet; run one forward before attach")
    if hasattr(param, "_in_backward_optimizers"):
        raise ValueError(
            f"parameter {name!r} is stepped by an optimizer inside the backward; attach needs an "
            "optimizer whose step() is called"
        )
    if param.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device; give it values before attach")
    if not param.requires_grad:
        return
    inner = local(param)
    plain = type(param) is nn.Parameter or is_sharded(param)
    if not plain or type(inner) is not Tensor:
        kind = type(inner) if plain else type(param)
        raise TypeError(
            f"parameter {name!r} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass "
            "whose values are not its memory; attach handles plain parameters"
        )
    if inner.layout is not torch.strided:
        raise TypeError(f"parameter {name!r} has layout {inner.layout}; attach needs torch.strided")
    if param.dtype not in DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}; attach handles float32, bfloat16 and float16"
        )
    if inner.device.type != "cpu" and not _C.on_cuda(inner):
        raise ValueError(
            f"parameter {name!r} is on {inner.device}; this build handles the CPU only: its CUDA "
            f"part is {_C.build_info()['cuda_reason']}"
        )
    if any(s == 0 and n > 1 for s, n in zip(inner.stride(), inner.shape, strict=True)):
        raise ValueError(
            f"parameter {name!r} has strides {inner.stride()}: several elements share one place in "
            "memory; make it contiguous before attach"
        )


def check_offload(model: nn.Module) -> None:
    """Raise ValueError naming a parameter that is on the host already; after `check_model`."""
    for name, param in model.named_parameters():
        own = local(param)
        if param.requires_grad and not _C.on_cuda(own):
            raise ValueError(
                f"offload=True has no effect: parameter {clean(name)!r} is on {own.device} (as all "
                "are after fully_shard with CPUOffloadPolicy), and anchors and outer momentum are "
                "there anyway; offload is for parameters on a GPU"
            )


def check_average_buffers(model: nn.Module) -> None:
    """Raise TypeError naming a floating buffer whose dtype cannot be averaged."""
    for name, buffer in persistent_buffers(model).items():
        if buffer.is_floating_point() and buffer.dtype not in DTYPES:
            raise TypeError(
                f"buffer {name!r} is {buffer.dtype}; float32, bfloat16 and float16 buffers can be "
                "averaged: convert it, register it with persistent=False, or set "
                "average_buffers=False"
            )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict holds, by name, each once."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            if not any(buffer is other for other in found.values()):
                found[clean(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


def check_optimizers(
    model: nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The optimizers as a list; TypeError or ValueError if they do not belong to the model."""
    given: list[torch.optim.Optimizer]
    if isinstance(optimizers, torch.optim.Optimizer):
        given = [optimizers]
    elif not isinstance(optimizers, Iterable):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list, not {optimizers!r}")
    else:
        given = list(optimizers)
    if not given:
        raise ValueError("optimizer is an empty list; attach counts its steps")
    known = {id(p) for p in model.parameters()}
    for number, optimizer in enumerate(given):
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list, not {kind}")
        if any(optimizer is other for other in given[:number]):
            raise ValueError(f"optimizer {number} is listed twice")
        for group_number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if id(param) not in known:
                    raise ValueError(
                        f"optimizer {number} ({type(optimizer).__name__}) steps a parameter of "
                        f"shape {tuple(param.shape)} (param_groups[{group_number}]['params']"
                        f"[{place}]) that the model lacks; build the optimizer from this model's "
                        "parameters"
                    )
    return given


@dataclass
class _Seen:
    param: nn.Parameter
    trainable: bool
    shape: torch.Size
    dtype: torch.dtype


class IdentityWatch:
    """Finds parameters that were added, replaced, unfrozen or converted since attach."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = {
            name: _Seen(p, p.requires_grad, p.shape, p.dtype) for name, p in _named(model).items()
        }

    def check(self, model: nn.Module) -> None:
        """Raise RuntimeError naming the first parameter that is not what it was."""
        now = _named(model)
        again = "detach() the handle and attach again"
        for name, param in now.items():
            seen = self._seen.get(name)
            if seen is None:
                raise RuntimeError(f"parameter {name!r} was added after attach; {again}")
            if param is not seen.param:
                raise RuntimeError(
                    f"parameter {name!r} was replaced by another object after attach (as "
                    f"fully_shard, load_state_dict(assign=True) or a resize does); {again}"
                )
            if param.requires_grad and not seen.trainable:
                raise RuntimeError(
                    f"parameter {name!r} was frozen at attach and is not now; {again}"
                )
            if seen.trainable and (param.shape, param.dtype) != (seen.shape, seen.dtype):
                raise RuntimeError(
                    f"parameter {name!r} was {seen.dtype} {tuple(seen.shape)} at attach and is "
                    f"{param.dtype} {tuple(param.shape)} now; {again}"
                )
        for name in self._seen:
            if name not in now:
                raise RuntimeError(f"parameter {name!r} has gone since attach; {again}")


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, ties too, by a name that a wrapper put around a module does not change."""
    return {clean(n): p for n, p in model.named_parameters(remove_duplicate=False)}
