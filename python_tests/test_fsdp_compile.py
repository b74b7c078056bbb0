"""torch.compile and FSDP2, in every order: the plain model's weights, and no new compilation."""

from __future__ import annotations

from typing import Any

import pytest
import shards
import torch
from fsdp_cases import Case
from ranks import Ranks
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh

counter = CompileCounter()


def in_place(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=counter)
    return model


def wrapped(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=counter)
    return model


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=counter)


def whole_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=counter)
    return model


def then_sharded(compile_it: Any) -> Any:
    return lambda model, mesh: shards.shard(compile_it(model), mesh)


def once_sharded(compile_it: Any) -> Any:
    return lambda model, mesh: compile_it(shards.shard(model, mesh))


CASES: dict[str, Case] = {
    "blocks in place, then sharded": Case(prepare=then_sharded(in_place)),
    "sharded, then blocks in place": Case(prepare=once_sharded(in_place)),
    "attached, then blocks in place": Case(late=in_place),
    "blocks wrapped, then sharded": Case(prepare=then_sharded(wrapped)),
    "sharded, then blocks wrapped": Case(prepare=once_sharded(wrapped)),
    "whole, attached": Case(prepare=once_sharded(whole)),
    "attached, whole used": Case(late=whole),
    "whole in place": Case(prepare=once_sharded(whole_in_place)),
}


def run(name: str) -> dict[str, Any]:
    """The case with the number of compilations after each step."""
    torch._dynamo.reset()
    counter.clear()
    case, frames = CASES[name], []

    def counted(
        model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int
    ) -> None:
        shards.train_step(model, optimizer, mesh, t)
        frames.append(counter.frame_count)

    case.step = counted
    return {**case.run(), "frames": frames}


@pytest.mark.parametrize("name", CASES)
def test_row_14_compiled_shards(ranks: Ranks, name: str) -> None:
    """Weights, norms and clips equal the simulation; nothing is compiled after the first step."""
    results = ranks.run(4, run, name, seconds=90)
    CASES[name].check(results)
    for result in results:
        assert 0 < result["frames"][0] == result["frames"][-1]
