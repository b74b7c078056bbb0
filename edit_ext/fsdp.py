"""FSDP2: its parameter groups as layers, and weights that it gathered before we write.

What FSDP2 has gathered is a copy: a write to the sharded parameters reaches a forward only if the
gather comes after it. That can fail in seven ways, each with a test by value in test_fsdp_gather.py
or test_fsdp_loops.py: a module prefetched by another one's forward; a root, or a module with
reshard_after_forward=False, still unsharded after a forward without backward; the user's own
unshard() before a forward, finished or pending; one inside a forward, ahead of the module; an
evaluation in the middle of a sync, after a forward that raised; a second module of one parameter
group; and, on a GPU, a gather on a stream that does not wait for the stream we write on.

Private names of torch, all in this file; the tests above fail where one stops doing its work:
of FSDPModule _get_fsdp_state; of its state _fsdp_param_groups (_fsdp_param_group before there were
several), _states_to_forward_prefetch, _modules; of a group fsdp_params, mesh_info,
_all_gather_result. Tested with torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class ParamGroup:
    """What one `fully_shard` call gathers together.

    modules: whose forwards gather it; params: its sharded parameters.
    """

    modules: list[nn.Module]
    params: list[nn.Parameter]


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to `module`. Does not load FSDP where nobody has."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The FSDP2 modules of `model`, the root included."""
    return [module for module in model.modules() if is_fsdp(module)]


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """All parameter groups, outer ones first. Parameters must be sharded; see `reshard`."""
    found: dict[int, ParamGroup] = {}
    for module in fsdp_modules(model):
        state = _state(module)
        if id(state) in found:
            found[id(state)].modules.append(module)
            continue
        params = [p.sharded_param for group in _groups(state) for p in group.fsdp_params]
        found[id(state)] = ParamGroup([module], params)
    return list(found.values())


def refuse_hybrid(model: nn.Module) -> None:
    """Raise ValueError for a module that FSDP2 itself replicates."""
    for module in fsdp_modules(model):
        for group in _groups(_state(module)):
            if hasattr(group.mesh_info, "replicate_process_group"):
                raise ValueError(
                    f"fully_shard was given a mesh that also replicates ({group.mesh_info.mesh}): "
                    "FSDP2 then averages gradients over all replicas at every step and leaves "
                    "nothing local. Give fully_shard the shard dimension alone, as mesh['shard'], "
                    "and attach(..., mesh=mesh) the whole mesh"
                )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free what has been gathered, so that the next forward gathers what is written now.

    A pending unshard(async_op=True) is taken to its end first; it would be used as it is otherwise.
    """
    for module in modules:
        if any(group._all_gather_result is not None for group in _groups(_state(module))):
            module.unshard()  # type: ignore[operator]
        module.reshard()  # type: ignore[operator]


def gather(module: nn.Module) -> None:
    """Gather `module` now, on the current stream and so behind our write."""
    module.unshard()  # type: ignore[operator]


def gathers(module: nn.Module) -> list[nn.Module]:
    """The FSDP2 modules that the forward of one gathers: itself and what it prefetches."""
    ahead = _state(module)._states_to_forward_prefetch
    return [module, *(other for state in ahead for other in state._modules[:1])]


def data_seat(model: nn.Module) -> tuple[int, int]:
    """Which of how many parts of a replica's data this rank reads: the shards of FSDP2 each read
    their own; ranks of tensor parallelism read the same."""
    for module in fsdp_modules(model):
        for group in _groups(_state(module)):
            ranks = group.mesh_info.shard_process_group
            return ranks.rank(), ranks.size()
    return 0, 1


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
