"""How often optimizer states need averaging: by their half-lives, or by a budget of traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

from .optim import ADOPT

Optimizer = torch.optim.Optimizer

ADAMS: dict[type[Optimizer], tuple[str, str]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.NAdam: ("exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: ("exp_avg", "exp_inf"),
    ADOPT: ("exp_avg", "exp_avg_sq"),
}
"""The states that the two `betas` of an optimizer rule."""

MOST = 2.0  # times by which the slower of two states may be averaged less often
LEAST = 1e-9  # payloads per step: a period of 1.5e9 steps
ROUNDING = 1e-12  # by which a budget written as a quotient may be short of it


def half_life(beta: float, remains: float = 0.5) -> float:
    """Steps after which `remains` of a value is left in an average that keeps `beta` at each step.

        ln(remains) / ln(beta)      (arXiv 2505.22549; beta^t = remains)

    beta: in [0, 1); 0 keeps nothing, and its half-life is 0. remains: in (0, 1). Raises TypeError
    for what is no number, ValueError out of these ranges.

    >>> [round(half_life(beta), 2) for beta in (0.9, 0.95, 0.99, 0.999, 0.9999)]
    [6.58, 13.51, 68.97, 692.8, 6931.13]
    >>> round(half_life(0.9, remains=0.25) / half_life(0.9), 12)
    2.0
    """
    _in_range("beta", beta, low_included=True)
    _in_range("remains", remains, low_included=False)
    return math.log(remains) / math.log(beta) if beta else 0.0


def suggest_periods(optimizer: Optimizer, budget: float) -> dict[str, Any]:
    """Periods for `edit_ext.DESLOC(**suggest_periods(optimizer, budget))` within a budget.

    budget: payloads of the model's size that a replica may exchange per optimizer step, 1e-9
    or more; plain data parallel training needs 1. With K_x for the weights and K_j for each state,

        1/K_x + sum_j 1/K_j <= budget,    K_x <= K_j

    Weights get two thirds of the budget and states one: K = K_x = ceil(1.5 / budget), and a single
    state has the period 2 K. Of two states with half-lives h <= h', let r = min(h'/h, 2); then

        K_j = ceil(2 K (1 + 1/r)),    K_j' = ceil(2 K (1 + r))

    which is 3 K and 6 K where one is at least twice as slow (Adam's betas; the paper's rule), 4 K
    and 4 K where both are alike, and 1.5/K in all. What rounding leaves of the budget stays unused,
    and what is above 1.5. With several parameter groups a state's half-life is the smallest one.

    Returns {"param_every": K_x, "state_every": {name of the state: K_j}}.

    Raises TypeError or ValueError for a budget that is no such number, and ValueError for an
    optimizer whose states have no known half-life: see `half_life_periods`.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> suggest_periods(torch.optim.AdamW([weight]), budget=1.5 / 32)
    {'param_every': 32, 'state_every': {'exp_avg': 96, 'exp_avg_sq': 192}}
    >>> suggest_periods(torch.optim.AdamW([weight], betas=(0.95, 0.95)), budget=1.5 / 32)
    {'param_every': 32, 'state_every': {'exp_avg': 128, 'exp_avg_sq': 128}}
    >>> suggest_periods(torch.optim.SGD([weight], momentum=0.9), budget=1.5 / 32)
    {'param_every': 32, 'state_every': {'momentum_buffer': 64}}
    """
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"budget must be a number, but is {budget!r}.")
    if not LEAST <= float(budget) < math.inf:
        raise ValueError(
            f"budget must be at least {LEAST:g} payloads per step and finite, but is {budget!r}."
        )
    lives = _half_lives(optimizer)
    every = math.ceil(1.5 / float(budget) * (1 - ROUNDING))
    if len(lives) == 1:
        return {"param_every": every, "state_every": dict.fromkeys(lives, 2 * every)}
    fast, slow = sorted(lives, key=lives.__getitem__)
    if lives[fast] == lives[slow]:
        ratio = 1.0
    else:
        ratio = min(lives[slow] / lives[fast], MOST) if lives[fast] else MOST
    periods = {
        fast: math.ceil(2 * every * (1 + 1 / ratio)),
        slow: math.ceil(2 * every * (1 + ratio)),
    }
    return {"param_every": every, "state_every": {name: periods[name] for name in lives}}


def half_life_periods(
    optimizer: Optimizer | Sequence[Optimizer], param_every: int
) -> dict[str, int]:
    """A period for each state of one or several optimizers: its half-life, rounded, in steps, but
    not below `param_every`, as weights are averaged at least as often as any state:

        K_j = max(param_every, round(ln(1/2) / ln(beta_j)))

    Known are Adam, AdamW, NAdam, RAdam and Adamax of torch and `edit_ext.optim.ADOPT` by their
    `betas`, and SGD by its `momentum`. Where groups or optimizers differ, a state gets the smallest
    half-life, so that none is averaged too seldom; groups of SGD without momentum have no state.

    Returns {name of the state: steps}.

    Raises TypeError or ValueError for a `param_every` that is no integer of at least 1; ValueError
    for other optimizers, for amsgrad, whose maximum never decays, and if no state is left.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> half_life_periods(ADOPT([weight]), param_every=32)
    {'exp_avg': 32, 'exp_avg_sq': 6931}
    """
    if isinstance(param_every, bool) or not isinstance(param_every, Integral):
        raise TypeError(f"param_every must be an integer, but is {param_every!r}.")
    if param_every < 1:
        raise ValueError(f"param_every must be at least 1, but is {param_every!r}.")
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    lives: dict[str, float] = {}
    for each in given:
        for name, life in _half_lives(each).items():
            lives[name] = min(life, lives.get(name, math.inf))
    return {name: max(int(param_every), round(life)) for name, life in lives.items()}


def _half_lives(optimizer: Optimizer) -> dict[str, float]:
    """{state: the smallest half-life among the groups, in steps}; at least one."""
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        for name, beta in _decays(optimizer, group).items():
            found[name] = min(half_life(beta), found.get(name, math.inf))
    if not found:
        raise ValueError(
            "optimizer must have states to average, but SGD without momentum has none: "
            "edit_ext.PostLocalSGD averages weights alone."
        )
    return found


def _decays(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, float]:
    """{state: what it keeps at each step} of a group."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        momentum = float(group["momentum"])
        if momentum >= 1:
            raise ValueError(f"momentum of {kind} must be below 1, but is {momentum!r}.")
        return {"momentum_buffer": momentum} if momentum else {}
    names = next((names for base, names in ADAMS.items() if isinstance(optimizer, base)), None)
    if names is None:
        known = ", ".join([base.__name__ for base in ADAMS] + ["SGD"])
        raise ValueError(
            f"optimizer must be one whose states' half-lives are known ({known}), but is {kind}: "
            "give state_every as a number or by the names of its states."
        )
    if group.get("amsgrad"):
        raise ValueError(
            f"amsgrad of {kind} must be False, but is True: its maximum never decays and has no "
            "half-life; give state_every as a number or by the names of its states."
        )
    return dict(zip(names, map(float, group["betas"]), strict=True))


def _in_range(name: str, value: Any, *, low_included: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, but is {value!r}.")
    if not (0 < float(value) < 1 or (low_included and value == 0)):
        floor = "at least 0" if low_included else "above 0"
        raise ValueError(f"{name} must be {floor} and below 1, but is {value!r}.")
