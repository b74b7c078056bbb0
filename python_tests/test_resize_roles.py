"""A run through many groups: its first replica leaves, one goes on alone, those that left join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import same
from ranks import Ranks
from torch import Tensor, nn

import edit_ext

GROUPS = ([0, 1], [0, 1, 2], [1, 2], [2], [0, 1, 2], [2, 0])
STEPS = 5  # with each group: windows of 3 are cut everywhere


def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """BatchNorm's buffers, a frozen bias, two optimizers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].bias.requires_grad_(False)
    rest = [p for part in model[1:] for p in part.parameters() if p.requires_grad]
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    return model, [first, torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], t: int) -> None:
    """Two accumulated micro-batches of this rank."""
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(100 * dist.get_rank() + t))
    for part in x.chunk(2):
        (model(part) - part[:, :3].sin()).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def through_groups(rules: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor] | None]:
    rank, before, t = dist.get_rank(), [], 0
    model, optimizers = make()
    config = edit_ext.EDiT(sync_every=3, timeout=20.0, **rules)
    sync: edit_ext.Handle | None = None
    counts = []
    for members in GROUPS:
        if sync is not None:
            sync.resize(members)
        elif rank in members:
            start = "join" if before else "check"
            if before:  # nothing of what it has may count
                with torch.no_grad():
                    for param in model.parameters():
                        param.fill_(3.0)
                for optimizer in optimizers:
                    optimizer.state.clear()
            sync = edit_ext.attach(model, optimizers, config, group=members, start=start)
        if rank in members:
            assert sync is not None
            for _ in range(STEPS):
                step(model, optimizers, t)
                t += 1
            counts.append((sync.step, sync.sync_index, sync.data_world))
        else:
            sync = None
        before = members
        dist.barrier()
    if sync is None:
        return counts, None
    with sync:
        sync.flush()
    return counts, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "rules", [{"momentum": "replicated", "wire": "bf16"}, {"warmup_steps": 12}], ids=str
)
def test_every_role(ranks: Ranks, rules: dict[str, Any]) -> None:
    """Steps and syncs are counted on by whoever is there; all that is left is equal at the end,
    buffers and frozen weights too."""
    (first, left), _, (last, right) = ranks.run(3, through_groups, rules)
    assert left is not None and right is not None and same(left, right)
    syncs = [0, 2, 4, 5] if "warmup_steps" in rules else [3, 6, 8, 9]
    assert first[-2:] == last[-2:] == [(25, syncs[2], 3), (30, syncs[3], 2)]
    assert last[0] == (10, syncs[0], 3) and last[2] == (20, syncs[1], 1)
