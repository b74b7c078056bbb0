"""ADOPT: Adam whose second moment does not contain the gradient that it divides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

FLAGS = ("clip", "decoupled", "maximize")


class ADOPT(torch.optim.Optimizer):
    """ADOPT (arXiv 2411.02853), which converges with any second beta; with 0.9999 the second moment
    has a half-life of 6931 steps, and so replicas need to average it seldom.

    A parameter's first step with a gradient g only sets its second moment, v = g^2. In each later
    one, s = 1, 2, ... being the number of steps before it:

        n = clamp(g / max(sqrt(v), eps), +-s^(1/4))
        m = b1 m + (1 - b1) n
        p = p - lr m
        v = b2 v + (1 - b2) g^2

    There is no bias correction. Weight decay is added to g before all this, in the first step too;
    `decoupled` is p = p - lr weight_decay p before the update, and not in the first step. A
    gradient of None leaves its parameter and its states alone.

    params: tensors, named tensors or groups of them, as torch's optimizers take; DTensors too. A
        group may have its own value of each setting.
    lr: a number or a tensor of one element, which is read at each step (on a GPU: it is waited
        for); above or equal to 0, as is weight_decay.
    betas: (b1, b2), each in [0, 1).
    eps: the least denominator, above 0, in units of the gradient.
    clip: False leaves n as it is.
    maximize: go up the gradient instead of down.
    foreach: True: all tensors of a group in one call for each operation, with two copies of their
        size at the peak, three with maximize or coupled decay; False: one after the other; None:
        True if all are on a GPU. The same operations in the same order; on the CPU the same bits.

    States, which `edit_ext.DESLOC` averages by these names: `exp_avg` (m) and `exp_avg_sq` (v), of
    the parameter's shape and dtype, as AdamW keeps them, and `step`, a fp32 scalar on the CPU. In
    bf16, whose numbers are 0.4 % apart, a second moment with b2 = 0.9999 hardly moves: train with
    fp32 parameters under autocast. Where states are zeroed between steps, `step` must be too
    (`FedAvgReset(reset_step=True)`), or the next step divides by eps.

    Raises TypeError or ValueError for a setting that cannot work and for complex parameters, and
    RuntimeError in `step` for sparse gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
        clip: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "clip": clip,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, a dict with `params` and any settings of its own, which are checked."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.is_complex():
                self.param_groups.pop()
                raise TypeError(
                    f"params must be real tensors, but one of shape {list(param.shape)} is "
                    f"{param.dtype}: give ADOPT torch.view_as_real of it."
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. closure: computes the loss, and with it gradients, anew; its value comes back.

        Raises RuntimeError if a gradient is sparse, before anything of its group is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                _refuse_sparse(param)
            rule = _Rule.of(group)
            for number, batch in _batches(params, self.state, group["foreach"]):
                states = [self.state[p] for p in batch]
                momenta = [state["exp_avg"] for state in states]
                squares = [state["exp_avg_sq"] for state in states]
                if len(batch) == 1:
                    rule.one(number, batch[0], momenta[0], squares[0])
                else:
                    rule.many(number, batch, momenta, squares)
                for state in states:
                    state["step"] += 1
        return loss


@dataclass(frozen=True)
class _Rule:
    """The update with the numbers of one group, written twice: see test_foreach_equals_loop.

    Not by _foreach_mul_ with a number: on the CPU that rounds the number to bf16 first.
    """

    lr: float
    b1: float
    b2: float
    eps: float
    coupled: float  # weight decay as part of the gradient
    decoupled: float  # and as a step of its own
    clip: bool
    maximize: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> _Rule:
        decay = float(group["weight_decay"])
        apart = group["decoupled"]
        return cls(
            lr=float(group["lr"]),
            b1=group["betas"][0],
            b2=group["betas"][1],
            eps=group["eps"],
            coupled=0.0 if apart else decay,
            decoupled=decay if apart else 0.0,
            clip=group["clip"],
            maximize=group["maximize"],
        )

    def one(self, number: int, p: Tensor, m: Tensor, v: Tensor) -> None:
        assert p.grad is not None
        g = -p.grad if self.maximize else p.grad
        if self.coupled:
            g = g.add(p, alpha=self.coupled)
        if number == 0:
            v.copy_(g * g)
            return
        if self.decoupled:
            p.add_(p, alpha=-self.lr * self.decoupled)
        n = g / v.sqrt().clamp_(min=self.eps)
        if self.clip:
            n.clamp_(-(number**0.25), number**0.25)
        m.lerp_(n, 1 - self.b1)
        p.add_(m, alpha=-self.lr)
        v.lerp_(g * g, 1 - self.b2)

    def many(self, number: int, p: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
        g = [each.grad for each in p if each.grad is not None]
        if self.maximize:
            g = list(torch._foreach_neg(g))
        if self.coupled:
            g = list(torch._foreach_add(g, p, alpha=self.coupled))
        if number == 0:
            torch._foreach_zero_(v)
            torch._foreach_addcmul_(v, g, g, 1.0)
            return
        if self.decoupled:
            torch._foreach_add_(p, p, alpha=-self.lr * self.decoupled)
        below = torch._foreach_sqrt(v)
        torch._foreach_clamp_min_(below, self.eps)
        n = torch._foreach_div(g, below)
        del below
        if self.clip:
            torch._foreach_clamp_min_(n, -(number**0.25))
            torch._foreach_clamp_max_(n, number**0.25)
        torch._foreach_lerp_(m, n, 1 - self.b1)
        del n
        torch._foreach_add_(p, m, alpha=-self.lr)
        torch._foreach_lerp_(v, torch._foreach_mul(g, g), 1 - self.b2)


def _batches(
    params: list[Tensor], states: dict[Tensor, Any], foreach: bool | None
) -> Iterable[tuple[int, list[Tensor]]]:
    """(steps made before, parameters that can be stepped together); makes states not yet there."""
    if foreach is None:
        foreach = all(p.is_cuda for p in params)
    together: dict[Any, list[Tensor]] = {}
    for place, p in enumerate(params):
        state = states[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # DTensors of two meshes cannot be in one call, nor DTensors and plain tensors.
        kind = type(p), getattr(p, "device_mesh", None), p.device, p.dtype
        key = (int(state["step"]), kind if foreach else place)
        together.setdefault(key, []).append(p)
    return [(key[0], batch) for key, batch in together.items()]


def _refuse_sparse(param: Tensor) -> None:
    assert param.grad is not None
    if param.grad.layout != torch.strided:
        raise RuntimeError(
            f"ADOPT needs dense gradients, but that of a parameter of shape {list(param.shape)} "
            f"has the layout {param.grad.layout}; give an embedding sparse=False."
        )


def _check(settings: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for a setting that cannot work."""
    lr, betas = settings["lr"], settings["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or one element, but has shape {list(lr.shape)}.")
    _number("lr", float(lr) if isinstance(lr, Tensor) else lr)
    _number("weight_decay", settings["weight_decay"])
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, but is {betas!r}.")
    for place, beta in enumerate(betas):
        _number(f"betas[{place}]", beta)
        if beta >= 1:
            raise ValueError(f"betas[{place}] must be at least 0 and below 1, but is {beta!r}.")
    _number("eps", settings["eps"])
    if settings["eps"] == 0:
        raise ValueError("eps must be above 0, but is 0: elements without gradient divide by it.")
    for name in FLAGS:
        if not isinstance(settings[name], bool):
            raise TypeError(f"{name} must be True or False, but is {settings[name]!r}.")
    if settings["foreach"] not in (None, True, False):
        raise TypeError(f"foreach must be True, False or None, but is {settings['foreach']!r}.")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, but is {value!r}.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, but is {value!r}.")
