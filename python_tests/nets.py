"""Small models and loops that the tests of the hook share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import edit_ext


class Net(nn.Module):
    """A stem, blocks of unequal sizes of which one runs twice, a layer that never runs, a scale.

    Layers: (root), stem, blocks.0 to blocks.2, spare, head. No size is a multiple of 2, 3 and 4.
    """

    def __init__(self, twice: bool = True, spare: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(
            [nn.Linear(7, 7), nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 7)), Gain(7)]
        )
        if spare:
            self.spare = nn.Linear(3, 1)
        self.head = nn.Linear(7, 3)
        self.path = [0, 1, 0, 2] if twice else [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for place in self.path:
            x = x + 0.5 * torch.tanh(self.blocks[place](x))
        return self.head(x) * self.scale


class Gain(nn.Module):
    """Elementwise gain: a layer of one small vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def make_net(**options: Any) -> Net:
    """The same weights in every process, without touching its random state."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Net(**options)


def layer_of(name: str) -> str:
    """The layer of a parameter of Net, as the hook should find it."""
    parts = name.split(".")
    return "(root)" if len(parts) == 1 else ".".join(parts[: 2 if parts[0] == "blocks" else 1])


def batch(replica: int, t: int) -> tuple[Tensor, Tensor]:
    """Inputs [4, 5] and targets [4, 3], different for every replica and step."""
    generator = torch.Generator().manual_seed(1000 * replica + t)
    x = torch.randn(4, 5, generator=generator)
    return x, torch.sin(x[:, :3]) + 0.1 * replica


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error in fp32."""
    x, y = data
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - y).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, t: int) -> float:
    """One ordinary iteration of a training loop."""
    value = loss(model, batch(replica, t))
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def plain(**changes: Any) -> edit_ext.EDiT:
    """Outer step = the mean of the replicas: lr 1, no momentum, no clip, no z-test, 20 s."""
    fields: dict[str, Any] = {
        "sync_every": 2,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "clip_norm": None,
        "z_threshold": None,
        "weighting": "uniform",
        "timeout": 20.0,
    }
    return edit_ext.EDiT(**{**fields, **changes})


def plain_timed(**changes: Any) -> edit_ext.AEDiT:
    """The same by the clock, which the tests bring along; a replica weighs as many steps as it
    made."""
    fields: dict[str, Any] = {
        "sync_seconds": 10.0,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "clip_norm": None,
        "z_threshold": None,
        "weighting": "steps",
        "timeout": 20.0,
    }
    return edit_ext.AEDiT(**{**fields, **changes})


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype and torch.equal(bits(value), bits(right[name]))
        for name, value in left.items()
    )


def bits(value: Tensor) -> Tensor:
    """The bytes of a tensor in logical order, so that a NaN equals itself and 0.0 is not -0.0."""
    return value.contiguous().reshape(-1).view(torch.uint8)
