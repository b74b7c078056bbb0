"""Offload: the same bits as on the device, states that go both ways, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import test_checkpoint as saved
import torch
from nets import batch, loss, make_net, same, sgd
from ranks import Ranks
from test_gpu import GPU, HOME
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import edit_ext
from edit_ext import _C

THERE = _C.on_cuda(torch.zeros(1)) or GPU
WITHOUT = pytest.mark.skipif(not THERE, reason="no CUDA device here")

STEPS = 9  # four syncs and a part of a window
RULES: dict[str, Any] = {"sync_every": 2, "clip_norm": 0.2, "ema_warmup": 2, "timeout": 30.0}


class Normed(nn.Module):
    """Net behind a BatchNorm, whose statistics are a layer without anchor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.net = make_net()
        self.blocks = self.net.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class Run:
    """A model on the device and its loop; one of two replicas, or alone."""

    def __init__(self, offload: bool, **changes: Any) -> None:
        self.model = Normed().to(HOME)
        self.optimizer = sgd(self.model)
        config = edit_ext.EDiT(**{**RULES, **changes}, offload=offload)
        self.sync = edit_ext.attach(self.model, self.optimizer, config, comm="c10d")
        self.seen: list[Tensor] = []

    def train(self, first: int, last: int) -> None:
        for t in range(first, last):
            x, y = batch(self.sync.data_rank, t)
            value = loss(self.model, (x.to(HOME), y.to(HOME)))
            if t % 3 == 0:
                self.sync.explain()  # reads the state in the middle of a sync
            value.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if t % 4 == 0:
                with self.sync.anchor_weights():
                    self.seen += [p.detach().cpu() for p in self.model.parameters()]

    def end(self) -> dict[str, Tensor]:
        """Weights, buffers, anchors, momenta, detectors, and weights seen on the way."""
        found = {f"model {n}": v.cpu() for n, v in self.model.state_dict().items()}
        state = self.sync.state_dict()
        found |= {f"anchor {n}": v.cpu() for n, v in state["anchors"].items()}
        for name, layer in state["layers"].items():
            found[f"momentum {name}"] = layer["momentum"].cpu()
            found[f"detector {name}"] = layer["detector"].cpu()
        found |= {f"seen {i}": v for i, v in enumerate(self.seen)}
        found["norms"] = torch.tensor([e["merged_norm"] for e in self.sync.metrics()])
        return found


def trained(offload: bool, changes: dict[str, Any]) -> dict[str, Tensor]:
    run = Run(offload, **changes)
    run.train(0, STEPS)
    run.sync.flush()
    found = run.end()
    run.sync.detach()
    return found


@pytest.mark.gpu
@WITHOUT
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wire": "bf16", "prefetch": 1},
        {"wire": "bf16", "prefetch": 0},
        {"granularity": "model", "prefetch": 3, "momentum": "replicated"},
    ],
)
def test_same_bits(ranks: Ranks, replicas: int, changes: dict[str, Any]) -> None:
    """Weights, anchors, momenta, norms and what was evaluated on the way: as without offload."""
    here = ranks.run(replicas, trained, True, changes)
    there = ranks.run(replicas, trained, False, changes)
    for left, right in zip(here, there, strict=True):
        assert same(left, right)
    assert any(v.any() for n, v in here[0].items() if n.startswith("momentum"))


def resumed(before: bool, after: bool) -> dict[str, Tensor]:
    """A run that goes on from the state of another, in the middle of a window."""
    first, half = Run(before), STEPS - 4
    first.train(0, half)
    weights = {n: v.clone() for n, v in first.model.state_dict().items()}
    state = first.sync.state_dict()
    first.sync.detach()
    second = Run(after)
    second.model.load_state_dict(weights)
    second.sync.load_state_dict(state)
    second.seen = first.seen
    second.train(half, STEPS)
    second.sync.metrics()
    found = second.end()
    second.sync.detach()
    return found


@pytest.mark.gpu
@WITHOUT
@pytest.mark.filterwarnings("ignore:edit_ext. the run goes on with settings")
def test_states_go_both_ways() -> None:
    """A state saved with offload continues without, and the other way, to the same bits; it tells
    that the setting has changed."""
    straight = resumed(False, False)
    assert same(resumed(True, False), straight) and same(resumed(False, True), straight)
    run, other = Run(True), Run(False)
    with pytest.warns(UserWarning, match="offload: True -> False"):
        other.sync.load_state_dict(run.sync.state_dict())


def checkpointed(before: bool, after: bool, path: str) -> dict[str, Tensor]:
    """Sharded by FSDP2; saved by DCP in the middle of a window, gone on from in a new model."""
    run = saved.attached(1, 2, offload=before)
    saved.train(run, 0, saved.HALF)
    saved.save(run, path)
    run[3].detach()
    again = saved.attached(1, 2, offload=after)
    saved.load(again, path)
    saved.train(again, saved.HALF, saved.WHOLE)
    found = saved.end(again)
    again[3].detach()
    return {n: v for n, v in found.items() if n != "meta"}  # which names the settings


@pytest.mark.gpu
@WITHOUT
@pytest.mark.skipif(GPU, reason="the mesh of these tests is on the CPU")
def test_checkpoints_go_both_ways(ranks: Ranks, tmp_path: Any) -> None:
    """The same of a checkpoint: the bits of a run without offload."""
    cases = [(False, False), (True, False), (False, True), (True, True)]
    straight, *others = (
        ranks.run(2, checkpointed, *case, str(tmp_path / str(i))) for i, case in enumerate(cases)
    )
    for other in others:
        assert all(map(same, other, straight))


def refused() -> list[str]:
    """What attach says of a plain model, and of one that FSDP2 keeps on the host."""
    said = []
    mesh = saved.shards.mesh_of(1, 2)
    plain, sharded = saved.shards.make_net(), saved.shards.make_net()
    for part in [*sharded.blocks, sharded]:
        fully_shard(part, mesh=mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    for model, group in ((plain, None), (sharded, mesh)):
        with pytest.raises(ValueError) as caught:
            edit_ext.attach(
                model, sgd(model), edit_ext.EDiT(offload=True, timeout=20.0), mesh=group
            )
        said.append(str(caught.value))
    return said


@pytest.mark.skipif(THERE, reason="the emulator takes the CPU's memory for a GPU's")
def test_refused_on_the_host(ranks: Ranks) -> None:
    """Without a GPU there is nothing to save, and every rank says so in a sentence."""
    for said in ranks.run(2, refused):
        for text in said:
            assert text.startswith("offload=True has no effect: parameter 'scale' is on cpu")
            assert "CPUOffloadPolicy" in text
    params = [torch.zeros(3)]
    with pytest.raises(ValueError, match="layer a: offload is true on cpu; expected false"):
        _C.Layer(
            "a",
            params,
            replica=None,
            lane=_C.make_lane(params[0]),
            pool=_C.BufferPool(1),
            offload=True,
        )
