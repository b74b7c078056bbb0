"""ADOPT against numbers worked out by hand and a scalar reference, and as an optimizer of torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from edit_ext.optim import ADOPT

GOLDEN = ((0.5, 1.0), (0.4, 0.9992), (-0.3, 0.9990800108003), (0.2, 0.9985720005198))
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": True},
    {"clip": False},
    {"maximize": True, "weight_decay": 0.3},
    {"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.5, "weight_decay": 0.2},
]


def scalar(p: float, grads: list[float], **given: Any) -> tuple[float, float, float]:
    """(parameter, m, v) after these gradients of one number, in fp64."""
    of = {"lr": 0.05, "betas": (0.9, 0.9999), "eps": 1e-6, "weight_decay": 0.0, **given}
    lr, (b1, b2), decay = of["lr"], of["betas"], of["weight_decay"]
    m = v = 0.0
    for s, g in enumerate(grads):
        g = -g if of.get("maximize") else g
        g = g if of.get("decoupled") else g + decay * p
        if s == 0:
            v = g * g
            continue
        p = p - lr * decay * p if of.get("decoupled") else p
        n = g / max(math.sqrt(v), of["eps"])
        n = max(-(s**0.25), min(s**0.25, n)) if of.get("clip", True) else n
        m = b1 * m + (1 - b1) * n
        p, v = p - lr * m, b2 * v + (1 - b2) * g * g
    return p, m, v


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 4), (5, 1)]
    return [nn.Parameter(torch.randn(s, generator=source, dtype=dtype)) for s in shapes]


def feed(params: list[nn.Parameter], t: int, skip: int | None = None) -> None:
    """Gradients of step t, a tenth of them ten times as large; None for the one at `skip`."""
    source = torch.Generator().manual_seed(1000 + t)
    for place, p in enumerate(params):
        g = torch.randn(p.shape, generator=source, dtype=torch.float64)
        g = g * (1 + 9 * (torch.rand(p.shape, generator=source) < 0.1))
        p.grad = None if place == skip else g.to(p.dtype)


def run(params: list[nn.Parameter], optimizer: ADOPT, steps: range) -> list[Tensor]:
    for t in steps:
        feed(params, t, skip=t % 5)
        optimizer.step()
    own = [optimizer.state[p] for p in params]
    states = [state[key] for state in own for key in ("step", "exp_avg", "exp_avg_sq")]
    return [each.detach().clone() for each in [*params, *states]]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_golden(foreach: bool) -> None:
    """Four gradients of one number, and of the same number twice, give the numbers by hand."""
    params = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    optimizer = ADOPT(params, lr=0.01, foreach=foreach)
    for g, expected in GOLDEN:
        for p in params:
            p.grad = torch.full((1,), g, dtype=torch.float64)
        optimizer.step()
        assert all(p.item() == pytest.approx(expected, abs=1e-13) for p in params)
    state = optimizer.state[params[0]]
    assert state["exp_avg_sq"].item() == pytest.approx(0.24995400339991, abs=1e-14)
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["step"].item() == 4 and state["step"].dtype == torch.float32
    assert state["step"].shape == ()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_scalar_reference(settings: dict[str, Any], foreach: bool) -> None:
    """Every element of every tensor goes the way of a scalar, with missing gradients too."""
    params = tensors()
    begun = [p.detach().clone() for p in params]
    grads: list[list[Tensor]] = [[] for _ in params]
    optimizer = ADOPT(params, **{"lr": 0.05, **settings}, foreach=foreach)
    for t in range(40):
        feed(params, t, skip=t % 7)
        for seen, p in zip(grads, params, strict=True):
            seen += [] if p.grad is None else [p.grad.clone()]
        optimizer.step()
    for p, first, seen in zip(params, begun, grads, strict=True):
        state = optimizer.state[p]
        for i in range(p.numel()):
            grads_of_one = [g.view(-1)[i].item() for g in seen]
            expected = scalar(first.view(-1)[i].item(), grads_of_one, **settings)
            for got, want in zip((p, state["exp_avg"], state["exp_avg_sq"]), expected, strict=True):
                assert got.detach().view(-1)[i].item() == pytest.approx(want, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_foreach_equals_loop(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """foreach changes no bit on the CPU, and gradients stay as they are."""
    results = []
    for foreach in (False, True, None):
        params = tensors(dtype=dtype)
        results.append(run(params, ADOPT(params, **settings, foreach=foreach), range(30)))
        given = [p.grad for p in params]
        feed(params, 29, skip=29 % 5)
        for g, p in zip(given, params, strict=True):
            assert (g is None) == (p.grad is None)
            assert g is None or p.grad is None or torch.equal(g, p.grad)
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_groups() -> None:
    """Each group goes by its own settings, one added later too."""
    for foreach in (False, True):
        params, alone = tensors(), tensors()
        optimizer = ADOPT([{"params": params[:2], "lr": 0.1}], foreach=foreach)
        optimizer.add_param_group({"params": params[2:], "weight_decay": 0.2, "maximize": True})
        apart = [
            ADOPT(alone[:2], lr=0.1),
            ADOPT(alone[2:], weight_decay=0.2, maximize=True),
        ]
        for t in range(12):
            feed(params, t)
            feed(alone, t)
            optimizer.step()
            for each in apart:
                each.step()
        assert same(list(params), list(alone))


def test_first_step_only_measures() -> None:
    """The first gradient moves nothing, decoupled decay neither, and sets v to its square."""
    p = nn.Parameter(torch.tensor([2.0, -4.0]))
    optimizer = ADOPT([p], weight_decay=0.5, decoupled=True)
    p.grad = torch.tensor([3.0, 0.0])
    optimizer.step()
    assert p.tolist() == [2, -4]
    assert optimizer.state[p]["exp_avg_sq"].tolist() == [9, 0]
    assert optimizer.state[p]["exp_avg"].tolist() == [0, 0]


def test_elements_without_gradient_divide_by_eps() -> None:
    """v = 0: the first gradient thereafter counts as s^(1/4), or as g / eps without clipping."""
    for clip, expected in ((True, 1.0), (False, 0.5 / 1e-6)):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = ADOPT([p], lr=1.0, betas=(0.0, 0.9), clip=clip)
        for g in (0.0, 0.5):
            p.grad = torch.full_like(p, g)
            optimizer.step()
        assert p.item() == pytest.approx(-expected)


@pytest.mark.parametrize("foreach", [False, True])
def test_resume(foreach: bool) -> None:
    """A run cut in two by a state dict ends bit for bit as one in one piece."""
    whole = tensors(dtype=torch.float32)
    expected = run(whole, ADOPT(whole, weight_decay=0.1, foreach=foreach), range(20))
    params = tensors(dtype=torch.float32)
    before = ADOPT(params, weight_decay=0.1, foreach=foreach)
    run(params, before, range(9))
    after = ADOPT(params, lr=7.0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.param_groups[0]["lr"] == 1e-3
    assert all(after.state[p]["step"].dtype == torch.float32 for p in params)
    assert same(run(params, after, range(9, 20)), expected)


def test_bf16_states() -> None:
    """States have their parameter's dtype, also after load_state_dict; the counter stays fp32."""
    params = tensors(dtype=torch.bfloat16)
    optimizer = ADOPT(params)
    run(params, optimizer, range(3))
    again = ADOPT(params)
    again.load_state_dict(optimizer.state_dict())
    for p in params:
        kinds = {key: value.dtype for key, value in again.state[p].items()}
        assert kinds["exp_avg"] == kinds["exp_avg_sq"] == torch.bfloat16
        assert kinds["step"] == torch.float32


def test_learning_rate() -> None:
    """A scheduler's learning rate is that of the step, and a tensor's is read at each step."""
    number, tensor = tensors(), tensors()
    plain, held = ADOPT(number, lr=0.1), ADOPT(tensor, lr=torch.tensor(0.1, dtype=torch.float64))
    schedule = torch.optim.lr_scheduler.LinearLR(plain, 1.0, 0.1, total_iters=6)
    for t in range(8):
        feed(number, t)
        feed(tensor, t)
        plain.step()
        held.step()
        schedule.step()
        held.param_groups[0]["lr"].fill_(plain.param_groups[0]["lr"])
    assert plain.param_groups[0]["lr"] == pytest.approx(0.01)
    assert same(list(number), list(tensor))


def test_closure() -> None:
    """A closure runs with gradients on, and its value comes back."""
    p = nn.Parameter(torch.tensor([3.0]))
    optimizer = ADOPT([p], lr=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9
    assert optimizer.step(closure) == 9  # the first one only measured
    assert optimizer.step(closure) < 9
    assert optimizer.step() is None


def test_missing_gradients() -> None:
    """A gradient of None makes no state and changes nothing."""
    first, second = tensors()[:2]
    was = second.detach().clone()
    optimizer = ADOPT([first, second])
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, was) and second not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[first]["step"].item() == 1


@pytest.mark.parametrize("foreach", [False, True])
def test_reset_states(foreach: bool) -> None:
    """With states and step zeroed, the next step is a first one."""
    params = tensors()
    optimizer = ADOPT(params, foreach=foreach)
    run(params, optimizer, range(9))
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    was = [p.detach().clone() for p in params]
    feed(params, 9)
    optimizer.step()
    assert same(list(params), was)
    for p in params:
        assert p.grad is not None
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], p.grad.square())


REFUSED = [
    ({"lr": -1.0}, ValueError, "lr must be at least 0 and finite, but is -1.0."),
    ({"lr": math.nan}, ValueError, "lr must be at least 0"),
    ({"lr": "fast"}, TypeError, "lr must be a number"),
    ({"lr": torch.ones(2)}, ValueError, r"lr must be .* one element, but has shape \[2\]"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be at least 0 and below 1, but is 1.0"),
    ({"betas": 0.9}, TypeError, "betas must be two numbers, but is 0.9"),
    ({"eps": 0.0}, ValueError, "eps must be above 0"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0"),
    ({"clip": 1}, TypeError, "clip must be True or False, but is 1"),
    ({"foreach": "yes"}, TypeError, "foreach must be True, False or None"),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED, ids=[str(r[0]) for r in REFUSED])
def test_refuses_settings(given: dict[str, Any], error: type[Exception], words: str) -> None:
    """A setting that cannot work is refused in a sentence, for all and for a group alone."""
    with pytest.raises(error, match=words):
        ADOPT(tensors(), **given)
    optimizer = ADOPT(tensors()[:1])
    with pytest.raises(error, match=words):
        optimizer.add_param_group({"params": tensors()[1:], **given})
    assert len(optimizer.param_groups) == 1


def test_refuses_complex_and_sparse() -> None:
    """Complex parameters when they are given, sparse gradients at the step, before any change."""
    optimizer = ADOPT(tensors())
    with pytest.raises(TypeError, match=r"params must be real tensors, but one of shape \[2\]"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.cfloat))]})
    assert len(optimizer.param_groups) == 1
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = ADOPT(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"needs dense gradients, .* shape \[4, 3\]"):
        optimizer.step()
    assert not optimizer.state


def test_dtensors() -> None:
    """DTensors go the way of plain tensors, beside them in a group, in calls or one by one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        meshes = [init_device_mesh("cpu", (1,)) for _ in range(2)]
        for foreach in (False, True):
            plain, mixed = tensors(), tensors()[:1]
            for place, p in enumerate(tensors()[1:]):
                spread = distribute_tensor(p.detach(), meshes[place % 2], [Shard(0)])
                mixed.append(nn.Parameter(spread))
            settings: dict[str, Any] = {"weight_decay": 0.1, "maximize": True}
            settings |= {"decoupled": foreach, "foreach": foreach}
            pair = [ADOPT(each, **settings) for each in (plain, mixed)]
            for t in range(6):
                feed(plain, t, skip=t % 5)
                for p, like in zip(mixed, plain, strict=True):
                    p.grad = like.grad
                    if isinstance(p, DTensor) and like.grad is not None:
                        p.grad = distribute_tensor(like.grad, p.device_mesh, p.placements)
                for each in pair:
                    each.step()
            whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in mixed]
            assert same(list(plain), whole)
            assert isinstance(pair[1].state[mixed[1]]["exp_avg"], DTensor)
    finally:
        dist.destroy_process_group()
