"""The references themselves: the papers' golden numbers, and torch's own optimizers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import method_references as ref
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import edit_ext

# DES-LOC-Adam, two workers on (x - a)^2 / 2 with a = 0 and 2, x = 1: the paper's order, and after
# the step; x of both workers after steps 1 to 4.
PAPER = [(0.9000002, 1.0999998), (0.76531291, 1.23468709), (0.94197513, 1.05802487),
         (0.84625941, 1.15374059)]  # fmt: skip
AFTER = [(0.9000002, 1.0999998), (1.0, 1.0), (0.94197513, 1.05802487), (1.0, 1.0)]
TARGETS = (0.0, 2.0)
LR, BETAS, FLOOR, RHO = 0.1, (0.9, 0.99), 1e-4, 0.5


def target_grad(replica: int, t: int, x: ref.Values) -> ref.Values:
    return {"x": x["x"] - TARGETS[replica]}


@pytest.mark.parametrize("paper", [True, False])
def test_desloc_golden_numbers(paper: bool) -> None:
    """K_x = K_u = 2, K_v = 4 in both orders."""
    start = {"x": torch.ones(2, dtype=torch.float64)}
    due = ref.periods({"x": 2, "exp_avg": 2, "exp_avg_sq": 4})
    inner = ref.adam(LR, BETAS, clip=RHO, floor=FLOOR)
    for steps, wanted in enumerate(PAPER if paper else AFTER, 1):
        rule = ref.Clocks(start, due, ["exp_avg", "exp_avg_sq"], paper=paper)
        # Of the order after the step the average of step t is there before forward t.
        ends = ref.train(start, target_grad, 2, steps + (not paper), inner, rule)
        found = ends.forwards[-1] if not paper else before_close(start, inner, due, steps)
        for worker, value in zip(found, wanted, strict=True):
            assert worker["x"][0].item() == pytest.approx(value, abs=1e-8)


def before_close(start: ref.Values, inner: ref.Step, due: Any, steps: int) -> list[ref.Values]:
    """The weights after the last step of the paper's order, without the closing sync."""

    class Open(ref.Clocks):
        def close(self, t: int, workers: list[ref.Worker]) -> None:
            """Nothing: what the workers hold is wanted."""

    rule = Open(start, due, ["exp_avg", "exp_avg_sq"], paper=True)
    return ref.train(start, target_grad, 2, steps, inner, rule).final


class ClippedAdam(torch.optim.Optimizer):
    """Adam of DES-LOC's Alg. 2: clipped coordinates, no bias correction, lambda under the root."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad.clamp(-RHO, RHO)
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
                v.mul_(BETAS[1]).add_(g * g, alpha=1 - BETAS[1])
                p.sub_(LR * m / (v + FLOOR * FLOOR).sqrt())


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(2))

    def forward(self, a: float) -> torch.Tensor:
        return 0.5 * (self.x - a).square().sum()


def hooked(order: str) -> list[float]:
    """x after each step, by the hook; of the order after the step when the next forward runs."""
    model = Point()
    optimizer = ClippedAdam(model.parameters())
    config = edit_ext.DESLOC(
        param_every=2, state_every={"exp_avg": 2, "exp_avg_sq": 4}, order=order
    )
    found = []
    with edit_ext.attach(model, optimizer, config) as sync:
        for t in range(5):
            model(TARGETS[dist.get_rank()]).backward()
            if t and order == "after_step":
                found.append(model.x[0].item())
            optimizer.step()
            optimizer.zero_grad()
            if order == "before_step":
                found.append(model.x[0].item())
        sync.flush()
    return found[:4]


@pytest.mark.parametrize("order", ["before_step", "after_step"])
def test_hook_gives_the_golden_numbers(ranks: Ranks, order: str) -> None:
    """The same from attach(), in fp32."""
    both = zip(*ranks.run(2, hooked, order), strict=True)
    for found, wanted in zip(both, PAPER if order == "before_step" else AFTER, strict=True):
        assert found == pytest.approx(wanted, abs=2e-7)


def test_adopt_golden_numbers() -> None:
    """p = 1, lr 0.01, four gradients."""
    worker, step = ref.Worker({"p": torch.ones(1).double()}), ref.adopt(0.01, (0.9, 0.9999))
    found = []
    for g in (0.5, 0.4, -0.3, 0.2):
        step(worker, {"p": torch.tensor([g], dtype=torch.float64)})
        found.append(worker.x["p"].item())
    assert found == pytest.approx([1.0, 0.9992, 0.9990800108003, 0.9985720005198], abs=1e-12)
    assert worker.states["exp_avg_sq"]["p"].item() == pytest.approx(0.24995400339991, abs=1e-13)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ref.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (ref.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            ref.sgd(0.1, 0.9, 0.9),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9),
        ),
        (ref.adam(0.01, (0.9, 0.95)), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.95))),
    ],
)
def test_inner_optimizers_are_those_of_torch(ours: ref.Step, theirs: Any) -> None:
    """In fp64 over ten random gradients, states included."""
    generator = torch.Generator().manual_seed(3)
    param = nn.Parameter(torch.randn(7, generator=generator).double())
    worker = ref.Worker({"p": param.detach().clone()})
    optimizer = theirs([param])
    for _ in range(10):
        g = torch.randn(7, generator=generator).double()
        param.grad = g.clone()
        optimizer.step()
        ours(worker, {"p": g})
        torch.testing.assert_close(worker.x["p"], param.detach(), rtol=1e-12, atol=1e-12)
    for key, value in worker.states.items():
        torch.testing.assert_close(value["p"], optimizer.state[param][key], rtol=1e-12, atol=1e-12)


def test_references_stand_alone() -> None:
    """Nothing of edit_ext is imported where the equations are."""
    tree = ast.parse(Path(ref.__file__).read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    allowed = {"__future__", "collections", "dataclasses", "torch"}
    assert {name.split(".")[0] for name in names} <= allowed
