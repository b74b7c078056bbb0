"""The whole-training reference against data parallel training and the one-sync reference."""

import pytest
import torch
from simulate import simulate
from torch import Tensor, nn

from edit_ext import reference
from edit_ext.reference import Detector, Policy


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batch(replica: int, t: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * replica + t)  # other data each step and replica
    return torch.randn(8, 3, generator=draw), torch.randn(8, 2, generator=draw)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    x, y = (part.to(next(model.parameters()).dtype) for part in data)
    return nn.functional.mse_loss(model(x), y)


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def by_module(name: str) -> str:
    return name.split(".")[0]


def test_simulated_every_step_sync_is_data_parallel() -> None:
    """sync_every 1, outer lr 1, no momentum, uniform, SGD: one model trained on mean gradients."""
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "weighting": "uniform", "clip_norm": None}
    common = {"replicas": 3, "steps": 6, "optimizer": sgd, "layer_of": by_module}
    run = simulate(net, batch, loss, sync_every=1, z_threshold=None, **plain, **common)
    model = net()
    inner = sgd(model.parameters())
    for t in range(6):
        inner.zero_grad()
        (sum(loss(model, batch(r, t)) for r in range(3)) / 3).backward()
        inner.step()
    assert len(run.syncs) == 6
    warm = simulate(net, batch, loss, warmup_steps=6, **common)
    assert warm.syncs == []
    for name, want in model.named_parameters():
        for r in range(3):
            torch.testing.assert_close(run.params(r)[name], want.detach(), rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(warm.params(r)[name], want.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [(torch.float64, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "bf16")],
)
def test_simulated_syncs_equal_the_reference(dtype: torch.dtype, wire: str) -> None:
    """Two writings of the same equations: one flagged mid-run, uneven steps, the last window."""
    seen: dict[tuple[int, int], dict[str, Tensor]] = {}

    def watch(replica: int, t: int, model: nn.Module) -> None:
        if (replica, t) == (1, 20):  # the last step before the sixth sync
            with torch.no_grad():
                model[2].weight.add_(40.0)
        seen[replica, t] = {n: p.detach().clone() for n, p in model.named_parameters()}

    policy = Policy(ema_warmup=3)
    run = simulate(
        lambda: net(dtype),
        batch,
        loss,
        replicas=3,
        steps=[25, 25, 21],
        optimizer=sgd,
        layer_of=by_module,
        corrupt=watch,
        sync_every=3,
        warmup_steps=2,
        ema_warmup=3,
        wire=wire,
    )
    assert [s.steps for s in run.syncs[-2:]] == [[3, 3, 1], [2, 2, 0]]
    assert [s.layers["2"].flags[1] for s in run.syncs] == [s.index == 6 for s in run.syncs]

    for layer in ("0", "2"):

        def flat(tensors: dict[str, Tensor], layer: str = layer) -> Tensor:
            return torch.cat([t.flatten() for n, t in tensors.items() if by_module(n) == layer])

        anchor = flat(seen[0, 2]).double()
        momentum, rows, done = torch.zeros_like(anchor), [Detector()] * 3, [2] * 3
        for s in run.syncs:
            done = [t + n for t, n in zip(done, s.steps, strict=True)]
            held = [anchor.to(dtype) for _ in range(3)]
            for r, n in enumerate(s.steps):
                if n:
                    held[r] = flat(seen[r, done[r]])
            want = reference.sync_layer(
                anchor, held, momentum, rows, policy, s.steps, param_dtype=dtype, wire=wire
            )
            got = s.layers[layer]
            assert got.flags == want.flags and s.idle == want.idle and got.skip == want.skip
            assert got.norms == pytest.approx(want.norms, rel=1e-12)
            assert got.weights == pytest.approx(want.weights, rel=1e-10)
            assert got.clip == pytest.approx(want.clip, rel=1e-12)
            torch.testing.assert_close(flat(s.anchors), want.anchor, rtol=1e-12, atol=1e-14)
            anchor, momentum, rows = want.anchor, want.momentum, want.detectors
        for r in range(3):
            torch.testing.assert_close(flat(run.params(r)), want.params, rtol=1e-12, atol=1e-14)
            assert torch.equal(flat(run.params(r)), flat(run.params(0)))


def test_simulated_buffers_and_unvisited_layers() -> None:
    """BatchNorm statistics are averaged, counters are not; an unvisited layer keeps its weights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.norm, self.used, self.spare = nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.norm(x))

    means: dict[int, Tensor] = {}

    def watch(replica: int, t: int, model: nn.Module) -> None:
        means[replica] = model.norm.running_mean.clone()

    common = {"replicas": 2, "optimizer": sgd, "layer_of": by_module, "sync_every": 2}
    run = simulate(Model, batch, loss, steps=[2, 2], corrupt=watch, **common)
    for r, model in enumerate(run.models):
        torch.testing.assert_close(model.norm.running_mean, (means[0] + means[1]) / 2)
        assert model.norm.num_batches_tracked == 2
        assert torch.equal(run.params(r)["spare.weight"], Model().spare.weight)
    assert run.syncs[0].layers["spare"].norms == [0.0, 0.0]


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_simulated_fp32_anchors_follow_fp64(wire: str) -> None:
    """Arithmetic in fp32, in a device's order, stays within 1e-5 of fp64 over ten syncs."""
    wide, narrow = (
        simulate(
            lambda: net(torch.float32),
            batch,
            loss,
            replicas=3,
            steps=20,
            optimizer=sgd,
            layer_of=by_module,
            sync_every=2,
            anchor_dtype=dtype,
            wire=wire,
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert len(wide.syncs) == 10
    for a, b in zip(wide.syncs, narrow.syncs, strict=True):
        for name, anchor in a.anchors.items():
            assert b.anchors[name].dtype == torch.float32
            torch.testing.assert_close(b.anchors[name].double(), anchor, rtol=1e-5, atol=1e-6)
