"""Field reports about wrong numbers: each row's scenario with the value that is right."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import batch, loss, make_net, plain, same, sgd, train_step, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext


class Values(nn.Module):
    """Parameters and nothing else: `move` stands for a window of local steps."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(t.clone()) for t in tensors])

    def forward(self) -> Tensor:
        return sum((v.float().sum() for v in self.values), torch.zeros(()))


def move(model: Values, optimizer: torch.optim.Optimizer, moves: Sequence[Tensor]) -> None:
    """One step that adds `moves` to the parameters; syncs what is due before."""
    model()
    optimizer.step()  # without gradients: the step that counts
    with torch.no_grad():
        for value, change in zip(model.values, moves, strict=True):
            value.add_(change)


def windows(
    start: list[Tensor], moves: list[list[Tensor]], count: int, config: edit_ext.EDiT
) -> dict[str, Any]:
    """`count` windows of one step in which this rank moves by moves[rank]; then a flush."""
    model = Values(*start)
    optimizer = sgd(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sync = edit_ext.attach(model, optimizer, config)
    with warnings.catch_warnings(record=True) as said, sync:
        warnings.simplefilter("always")
        for _ in range(count):
            move(model, optimizer, moves[rank])
        sync.flush()
        state = sync.state_dict()
        metrics = sync.metrics()
    return {
        "warnings": [str(w.message) for w in said],
        "params": [v.detach().clone() for v in model.values],
        "anchors": list(state["anchors"].values()),
        "metrics": metrics,
    }


def one_window(world: int, ranks: Ranks, *args: Any) -> list[dict[str, Any]]:
    return ranks.run(world, windows, *args)


def scalar(x: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(x, dtype=dtype)


def diloco(lr: float, momentum: float, count: int) -> list[float]:
    """Each window ends with this rank at 0.8 or 0.6 of the agreed value."""
    model = Values(scalar(1.0))
    optimizer = sgd(model)
    factor = (0.8, 0.6)[dist.get_rank()]
    seen = []
    config = plain(sync_every=1, outer_lr=lr, outer_momentum=momentum)
    with edit_ext.attach(model, optimizer, config) as sync:
        for _ in range(count):
            model()
            optimizer.step()
            with torch.no_grad():
                model.values[0].mul_(factor)
            sync.flush()
            seen.append(model.values[0].item())
    return seen


def test_row_01_diloco_maths(ranks: Ranks) -> None:
    """1.0 with replicas at 0.8 and 0.6 gives 0.7; five windows equal torch's SGD on the mean."""
    assert ranks.run(2, diloco, 1.0, 0.0, 1) == [[pytest.approx(0.7, rel=1e-7)]] * 2
    reference = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    expected = []
    for _ in range(5):
        reference.grad = reference.detach() - (0.8 + 0.6) / 2 * reference.detach()
        outer.step()
        expected.append(reference.item())
    for seen in ranks.run(2, diloco, 0.7, 0.9, 5):
        assert seen == pytest.approx(expected, rel=1e-6)


def test_row_03_world_of_one() -> None:
    """One replica: with outer lr 1 it is plain training, with 0.7 a lookahead optimizer."""
    assert not dist.is_initialized()
    for lr, momentum in ((1.0, 0.0), (0.7, 0.0), (0.7, 0.8)):
        model, reference = make_net(), make_net()
        optimizer, inner = sgd(model), sgd(reference)
        sync = edit_ext.attach(model, optimizer, plain(outer_lr=lr, outer_momentum=momentum))
        slow = {name: p.detach().double() for name, p in reference.named_parameters()}
        speed = {name: torch.zeros_like(p) for name, p in slow.items()}
        for t in range(9):
            if t and t % 2 == 0:
                lookahead(reference, slow, speed, lr, momentum)
            train_step(model, optimizer, 0, t)
            train_step(reference, inner, 0, t)
        for name, value in values(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name), rtol=2e-6, atol=1e-7)
        assert sync.totals()["syncs"] == 4 and sync.totals()["bytes_sent"] == 0


@torch.no_grad()
def lookahead(
    model: nn.Module, slow: dict[str, Tensor], speed: dict[str, Tensor], lr: float, mu: float
) -> None:
    """Slow weights step towards fast ones by Nesterov momentum; fast ones start from them."""
    for name, p in model.named_parameters():
        g = slow[name] - p.double()
        speed[name] = mu * speed[name] + g
        slow[name] -= lr * (g + mu * speed[name])
        p.copy_(slow[name])


def test_row_10_odd_shapes(ranks: Ranks) -> None:
    """0-dim, 1-element and empty parameters sync like any other."""
    start = [scalar(1.0), torch.ones(1), torch.ones(0), torch.ones(3, 0), torch.arange(5.0)]
    moves = [[torch.full_like(t, d) for t in start] for d in (0.5, 1.0, 0.0)]
    for result in one_window(3, ranks, start, moves, 1, plain(sync_every=1)):
        for value, before in zip(result["params"], start, strict=True):
            assert value.shape == before.shape
            torch.testing.assert_close(value, before + 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_row_20_half_norms(ranks: Ranks, dtype: torch.dtype) -> None:
    """Norms of 16-bit pseudo-gradients are summed wider, and a clipped step keeps its direction."""
    big, small = torch.full((625,), 200.0), torch.full((4,), 2.0**-20)
    start = [torch.zeros(1, dtype=dtype), *(torch.zeros_like(x, dtype=dtype) for x in (big, small))]
    moves = [scalar(300.0).view(1).to(dtype), big.to(dtype), small.to(dtype)]
    for index, move_by in enumerate(moves):
        alone = [m if i == index else torch.zeros_like(m) for i, m in enumerate(moves)]
        config = plain(sync_every=1, clip_norm=1.0)
        results = one_window(2, ranks, start, [alone, alone], 1, config)
        exact = move_by.double().norm().item()
        for result in results:
            entry = result["metrics"][0]
            assert entry["norms"] == pytest.approx([exact] * 2, rel=1e-3)
            step = result["anchors"][index].double()
            length = min(exact, 1.0)
            assert step.norm().item() == pytest.approx(length, rel=1e-3)
            torch.testing.assert_close(
                step, move_by.double() * (length / exact), rtol=1e-3, atol=1e-12
            )


def test_row_21_softmax_weights(ranks: Ranks) -> None:
    """Weights sum to 1 over accepted replicas, whatever the norms; all flagged: back. No NaN."""
    inf, nan = float("inf"), float("nan")
    cases = {
        (1e18, 1e18): [0.5, 0.5],
        (0.0, 0.0): [0.5, 0.5],
        (1e18, 1.0): [0.0, 1.0],
        (1e30, 1.0): [0.0, 1.0],  # squares above the range of fp32 count as not finite
        (1e30, 1e30): [0.0, 0.0],
        (nan, 1.0): [0.0, 1.0],
        (1.0, inf): [1.0, 0.0],
        (nan, inf): [0.0, 0.0],
        (1.0, 1.0 + 1.0): [1 / (1 + 2.718281828**-1), 1 / (1 + 2.718281828)],
    }
    config = plain(sync_every=1, weighting="softmax")
    for moved, expected in cases.items():
        moves = [[torch.tensor([m])] for m in moved]
        results = one_window(2, ranks, [torch.zeros(1)], moves, 1, config)
        for result in results:
            assert [w for w in result["warnings"] if "every replica was flagged" in w] or any(
                expected
            )
            entry = result["metrics"][0]
            assert entry["weights"] == pytest.approx(expected, rel=1e-6), moved
            value = sum(w * m for w, m in zip(expected, moved, strict=True) if w)
            assert result["params"][0].item() == pytest.approx(value, rel=1e-6), moved
            assert entry["skip"] == (not any(expected))


def test_row_22_bf16_updates(ranks: Ranks) -> None:
    """bf16 weights of 1.0 that one of four replicas moves by 2^-8 a window arrive in full."""
    start = [torch.ones(8, dtype=torch.bfloat16)]
    moves = [[torch.full((8,), -(2.0**-8) * (r == 0), dtype=torch.bfloat16)] for r in range(4)]
    for momentum in (0.0, 0.5):
        config = plain(sync_every=1, outer_momentum=momentum)
        result, *_ = one_window(4, ranks, start, moves, 50, config)
        exact, speed = 1.0, 0.0
        for _ in range(50):
            speed = momentum * speed + 2.0**-8 / 4
            exact -= 2.0**-8 / 4 + momentum * speed
        moved = 1.0 - result["anchors"][0][0].item()
        assert moved == pytest.approx(1.0 - exact, rel=0.02) and moved > 0.02


def unaligned(world: int) -> None:
    """Views into one buffer move by rank-dependent powers of two, which every dtype holds."""
    flats = {d: torch.full((1100,), 7.0, dtype=d) for d in (torch.float32, torch.bfloat16)}
    params: list[nn.Parameter] = []
    inside = {d: torch.zeros(1100, dtype=torch.bool) for d in flats}
    for dtype, first in ((torch.float32, 3), (torch.bfloat16, 1)):
        for size in (1, 7, 31, 1023):
            params.append(nn.Parameter(flats[dtype][first : first + size]))
            inside[dtype][first : first + size] = True
            first += size + 1
    model = nn.Module()
    model.values = nn.ParameterList(params)
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(sync_every=1)):
        optimizer.step()
        with torch.no_grad():
            for p in params:
                p.add_(2.0 ** -dist.get_rank())
    mean = sum(2.0**-r for r in range(world)) / world
    for dtype, flat in flats.items():
        assert torch.equal(flat[~inside[dtype]], torch.full_like(flat[~inside[dtype]], 7.0))
        expected = torch.full_like(flat[inside[dtype]], 7.0 + mean)
        torch.testing.assert_close(flat[inside[dtype]], expected, rtol=1e-6, atol=0)


def test_row_24_alignment(ranks: Ranks) -> None:
    """Parameters at odd offsets of a shared buffer sync exactly; neighbours stay untouched."""
    ranks.run(2, unaligned, 2)


def mean_of(dtype: torch.dtype, world: int) -> list[float]:
    """Warm-up and one window with the same batch everywhere; final weights."""
    model = make_net().to(dtype)
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(warmup_steps=2)):
        for t in range(4):
            train_step(model, optimizer, 0, t)
    return torch.cat([v.flatten().float() for v in values(model).values()]).tolist()


def test_row_26_gloo_average(ranks: Ranks) -> None:
    """With equal data the result does not scale with the number of ranks, in any dtype."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        model = make_net().to(dtype)
        optimizer = sgd(model)
        for t in range(4):
            train_step(model, optimizer, 0, t)
        alone = torch.cat([v.flatten().float() for v in values(model).values()])
        for world in (2, 3):
            for result in ranks.run(world, mean_of, dtype, world):
                torch.testing.assert_close(
                    torch.tensor(result), alone, rtol=tolerance, atol=tolerance
                )


def every_step(world: int) -> dict[str, Tensor]:
    """sync_every=1, outer lr 1, no momentum, uniform, plain SGD inside."""
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(sync_every=1)):
        for t in range(6):
            train_step(model, optimizer, dist.get_rank(), t)
    return values(model)


def test_short_data_parallel_parity(ranks: Ranks) -> None:
    """A sync after every SGD step with the plain mean equals synchronous data parallel training."""
    for world in (2, 3):
        model = make_net()
        optimizer = sgd(model)
        for t in range(6):
            for r in range(world):
                (loss(model, batch(r, t)) / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        for result in ranks.run(world, every_step, world):
            for name, value in values(model).items():
                torch.testing.assert_close(result[name], value, rtol=1e-6, atol=1e-7)


def sparse() -> dict[str, Tensor]:
    """An embedding with sparse gradients; rank 1 touches only the padding."""
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True, padding_idx=0), nn.Linear(3, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).view_as(p) / 10)
    start = values(model)
    optimizer = sgd(model)
    rows = torch.tensor([1, 4]) if dist.get_rank() == 0 else torch.tensor([0, 0])
    with edit_ext.attach(model, optimizer, plain(sync_every=1)):
        for _ in range(2):
            model(rows).sum().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
    changed = (values(model)["0.weight"] != start["0.weight"]).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 4]
    return values(model)


def test_short_sparse_gradients(ranks: Ranks) -> None:
    """Sparse gradients stay the optimizer's business; the weights sync densely."""
    first, second = ranks.run(2, sparse)
    assert same(first, second)


def sparse_warmup() -> str:
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))
    try:
        edit_ext.attach(model, sgd(model), plain(warmup_steps=1))
    except ValueError as error:
        return str(error)
    return "no error"


def test_sparse_gradients_in_warmup() -> None:
    """Sparse gradients cannot be averaged: refused at attach, with the way out."""
    assert "module '0' has sparse gradients" in sparse_warmup()
