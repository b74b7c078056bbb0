"""A backward that breaks off in the warm-up when some of its gradients are on their way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from nets import plain, sgd
from ranks import Ranks
from torch import Tensor, nn

import edit_ext
from edit_ext import warmup


class Breaks(torch.autograd.Function):
    """The identity, whose backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        if Breaks.armed:
            raise MemoryError("out of memory, say")
        return grad


def train(broken: list[int], retry: bool = True) -> list[float]:
    """Gradient sums of the steps; the ranks `broken` retry the second one, or step without."""
    rank = dist.get_rank()
    warmup.BUCKET = 40  # elements, so that a layer is a bucket
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = sgd(model, lr=0.0)
    sums = []
    with edit_ext.attach(model, optimizer, plain(warmup_steps=4)):
        for t in range(4):
            x = torch.full((2, 6), 0.1 * (rank + 1) * (t + 1))

            def backward(x: Tensor = x) -> None:
                model(x)  # the root's forward, where hooks act
                out = layers[3](layers[2](Breaks.apply(layers[1](layers[0](x)))))
                out.square().sum().backward()

            Breaks.armed = t == 1 and rank in broken
            try:
                backward()
            except MemoryError:
                Breaks.armed = False
                optimizer.zero_grad()
                if retry:
                    backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            sums.append([float(grad.double().sum()) for grad in grads])
            optimizer.step()
            optimizer.zero_grad()
    return sums


def test_all_replicas_retry(ranks: Ranks) -> None:
    """What was on its way is thrown away on all of them, and the averages are right."""
    straight = ranks.run(2, train, [])
    retried = ranks.run(2, train, [0, 1])
    assert straight[0] == straight[1] == retried[0] == retried[1]


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("who", [0, 1])
def test_one_replica_alone_is_an_error_on_both(ranks: Ranks, who: int, retry: bool) -> None:
    """Its peers average gradients that it has not: nobody goes on with those, whether it tries
    again or goes on to its step."""
    for outcome in ranks.outcomes(2, train, [who], retry):
        assert outcome.error is not None
        assert "broke off a backward" in outcome.error, outcome.error
