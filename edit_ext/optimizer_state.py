"""Inner optimizer states by parameter name, for checkpoints and for replicas that join."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .comm import RankGroup
from .sharding import from_local, is_sharded, local
from .start import broadcast_into

Optimizers = Sequence[torch.optim.Optimizer]


def pack(optimizers: Optimizers, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """`groups`: JSON of all parameter groups; `state`: {name: {key: tensor or number}}.

    The tensors are the optimizers' own. Raises ValueError for a parameter that two of them step.
    """
    state: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for param, own in optimizer.state.items():
            if names[param] in state:
                raise ValueError(f"two optimizers hold a state of the parameter {names[param]!r}")
            state[names[param]] = dict(own)
    return {"groups": json.dumps(_groups(optimizers, names)), "state": state}


def room(saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    """What `pack` would give once loaded, with memory for the values.

    saved: "name.key" of every state in the checkpoint, with DCP's description of it. Raises
    ValueError for a state of a parameter that is not here.
    """
    params = {name: param for param, name in names.items()}
    state: dict[str, dict[str, Any]] = {}
    for path, what in saved.items():
        name, _, key = path.rpartition(".")
        if name not in params:
            raise ValueError(f"the checkpoint has an optimizer state of {name!r}, unknown here")
        size = getattr(what, "size", None)
        value: Any = 0  # a number: DCP puts the saved one in its place
        if size is not None:
            like, dtype = params[name], what.properties.dtype
            value = torch.zeros(size, dtype=dtype)
            if tuple(size) == tuple(like.shape):
                value = torch.zeros_like(like, dtype=dtype).detach()
        state.setdefault(name, {})[key] = value
    return {"groups": "", "state": state}


def unpack(optimizers: Optimizers, names: Mapping[Tensor, str], packed: Mapping[str, Any]) -> None:
    """Take over groups and states. Raises ValueError when the groups hold other parameters."""
    saved, here = json.loads(packed["groups"]), _groups(optimizers, names)
    for number, (theirs, ours) in enumerate(zip(saved, here, strict=False)):
        if theirs["params"] != ours["params"]:
            raise ValueError(
                f"parameter group {number} of the optimizer holds {ours['params']}; the checkpoint "
                f"has {theirs['params']} there"
            )
    if len(saved) != len(here):
        raise ValueError(
            f"the optimizer has {len(here)} parameter groups, the checkpoint {len(saved)}"
        )
    groups = iter(saved)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in next(groups).items():
                if key != "params":
                    group[key] = _as(value, group.get(key))
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if names[param] in packed["state"]:
                    optimizer.state[param] = dict(packed["state"][names[param]])


def broadcast(
    optimizers: Optimizers, names: Mapping[Tensor, str], group: RankGroup, source: int, take: bool
) -> None:
    """Send what member `source` has to all; those with `take` have the same afterwards. Collective.

    Raises TypeError on the source for a state that is neither a tensor nor plain.
    """
    params = {name: param for param, name in names.items()}
    mine: dict[str, Any]
    mine = pack(optimizers, names) if group.rank == source else {"groups": "", "state": {}}
    told = json.dumps(_described(mine)) if group.rank == source else ""
    what = "the inner optimizer's state"
    packed = json.loads(group.gather_text(told, what)[source])
    for name, states in packed["state"].items():
        for key, about in states.items():
            if not isinstance(about, dict):
                continue
            param, shape = params[name], about["shape"]
            whole = shape == list(local(param).shape)
            if group.rank == source:
                part = local(mine["state"][name][key]).contiguous()
            else:
                where = param.device if about["device"] != "cpu" else "cpu"
                part = torch.empty(shape, dtype=getattr(torch, about["dtype"]), device=where)
            broadcast_into(group, part, f"{what}, {key!r} of {name!r}", source)
            states[key] = from_local(part, param) if is_sharded(param) and whole else part
    if take:
        unpack(optimizers, names, packed)


def _described(packed: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, states in packed["state"].items():
        for key, value in states.items():
            about = value
            if isinstance(value, Tensor):
                own = local(value)
                about = {
                    "dtype": str(own.dtype)[6:],
                    "shape": list(own.shape),
                    "device": own.device.type,
                }
            elif not isinstance(value, bool | int | float | str | None):
                raise TypeError(
                    f"the optimizer state {key!r} of {name!r} is a {type(value).__name__}, which "
                    "cannot be sent to a replica that joins"
                )
            state.setdefault(name, {})[key] = about
    return {"groups": packed["groups"], "state": state}


def _groups(optimizers: Optimizers, names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    return [
        {
            key: [names[p] for p in value] if key == "params" else _plain(value)
            for key, value in group.items()
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _as(saved: Any, here: Any) -> Any:
    """JSON knows no tuple and no tensor: what is here now says which it was."""
    if isinstance(here, Tensor):
        return here.fill_(saved)
    return tuple(saved) if isinstance(here, tuple) else saved
