"""FSDP2 models as people build them: each trains as its plain twin does in one process."""

from __future__ import annotations

from typing import Any

import pytest
import shards
import torch
from fsdp_cases import Case, seeded
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """Ten rows and three rows: on four shards 3, 3, 3, 1 and 1, 1, 1, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.stem(x)))


def shard_stack(model: nn.Module, mesh: Any) -> nn.Module:
    for module in (model.stem, model.head):
        fully_shard(module, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def with_options(**options: Any) -> Any:
    return lambda model, mesh: shards.shard(model, mesh, **options)


def in_halves(dtype: torch.dtype) -> Any:
    """The loss as two shards compute it: each half in `dtype`, gradients added after that."""

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        cast = {name: p.to(dtype) for name, p in model.named_parameters()}
        x, y = data
        total = torch.zeros(())
        for half in (slice(0, 2), slice(2, 4)):
            each = {name: p + 0 for name, p in cast.items()}
            out = functional_call(model, each, x[half].to(dtype))
            total = total + (out.float() - y[half]).square().mean() / 2
        return total

    return loss


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Recomputing(shards.Net):
    """Blocks run under torch.utils.checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for place in self.path:
            inner = checkpoint(self.blocks[place], x, use_reentrant=self.reentrant)
            x = x + 0.5 * torch.tanh(inner)
        return self.head(x) * self.scale


class Reentrant(Recomputing):
    """No block runs twice: FSDP2 by itself loses a part of such a block's gradient here."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.path = [0, 1, 2]


def wrap_then_shard(model: nn.Module, mesh: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return shards.shard(model, mesh)


def shard_then_wrap(model: nn.Module, mesh: Any) -> nn.Module:
    shards.shard(model, mesh)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


CASES: dict[str, Case] = {
    "uneven and empty shards": Case(
        seeded(Stack), shard_stack, shape=(1, 4), layer_of=lambda name: name.split(".")[0]
    ),
    "mixed precision": Case(
        prepare=with_options(mp_policy=MIXED), loss=in_halves(torch.bfloat16), atol=2e-3
    ),
    "bf16": Case(lambda: shards.make_net().bfloat16(), loss=in_halves(torch.bfloat16), atol=2e-2),
    "offload": Case(prepare=with_options(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "kept unsharded": Case(prepare=with_options(reshard_after_forward=False)),
    "resharded to pairs": Case(prepare=with_options(reshard_after_forward=2), shape=(1, 4)),
    "checkpoint_wrapper, then sharded": Case(prepare=wrap_then_shard),
    "sharded, then checkpoint_wrapper": Case(prepare=shard_then_wrap),
    "checkpoint inside": Case(seeded(Recomputing)),
    "reentrant checkpoint inside": Case(seeded(Reentrant)),
}


def run(name: str) -> dict[str, Any]:
    return CASES[name].run()


@pytest.mark.parametrize("name", CASES)
def test_trains_like_its_plain_twin(ranks: Ranks, name: str) -> None:
    """Whole weights, norms and clips equal the simulation; shapes and names stay clean."""
    results = ranks.run(4, run, name)
    CASES[name].check(results)
    plain = dict((CASES[name].plain or CASES[name].make)().named_parameters())
    assert set(results[0]["names"]) == set(plain)
