"""Half-lives by hand, budgets that hold, and the paper's K, 3K, 6K."""

from __future__ import annotations

import doctest
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import edit_ext
from edit_ext import half_lives
from edit_ext.half_lives import half_life, half_life_periods, suggest_periods
from edit_ext.optim import ADOPT

OPTIM = torch.optim
MOMENTS = {"exp_avg", "exp_avg_sq"}
KNOWN: list[tuple[Any, dict[str, Any], set[str]]] = [
    (OPTIM.Adam, {}, MOMENTS),
    (OPTIM.AdamW, {}, MOMENTS),
    (OPTIM.NAdam, {}, MOMENTS),
    (OPTIM.RAdam, {}, MOMENTS),
    (OPTIM.Adamax, {}, {"exp_avg", "exp_inf"}),
    (ADOPT, {}, MOMENTS),
    (OPTIM.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


def test_doctests() -> None:
    """The examples in the docstrings are true."""
    result = doctest.testmod(half_lives)
    assert result.attempted >= 7 and not result.failed


@pytest.mark.parametrize(
    ("beta", "steps"), [(0.9, 6.58), (0.95, 13.5), (0.99, 69.0), (0.999, 692.8), (0.9999, 6931)]
)
def test_half_life(beta: float, steps: float) -> None:
    """The numbers of the paper, to three digits; and a beta to the power of it is a half."""
    assert half_life(beta) == pytest.approx(steps, rel=1e-3)
    assert beta ** half_life(beta) == pytest.approx(0.5)
    assert beta ** half_life(beta, 0.1) == pytest.approx(0.1)


def test_half_life_at_the_ends() -> None:
    """A beta of 0 forgets at once; the largest below 1 has a finite half-life."""
    assert half_life(0.0) == half_life(0) == 0
    assert half_life(math.nextafter(1.0, 0.0)) == pytest.approx(math.log(2) * 2**53)


@pytest.mark.parametrize(
    ("beta", "remains", "error", "words"),
    [
        (1.0, 0.5, ValueError, "beta must be at least 0 and below 1, but is 1.0."),
        (-0.1, 0.5, ValueError, "beta must be at least 0"),
        (math.nan, 0.5, ValueError, "beta must be at least 0"),
        ("0.9", 0.5, TypeError, "beta must be a number, but is '0.9'."),
        (True, 0.5, TypeError, "beta must be a number"),
        (0.9, 0.0, ValueError, "remains must be above 0 and below 1, but is 0.0."),
        (0.9, 1.0, ValueError, "remains must be above 0"),
        (0.9, None, TypeError, "remains must be a number"),
    ],
)
def test_half_life_refuses(beta: Any, remains: Any, error: type[Exception], words: str) -> None:
    """Outside the ranges there is no half-life."""
    with pytest.raises(error, match=words):
        half_life(beta, remains)


@pytest.mark.parametrize("k", [1, 16, 32, 49, 107, 256, 1000])
def test_rule_of_the_paper(k: int) -> None:
    """A budget of 1.5/K gives K, 3K, 6K with Adam's betas, reversed or alike as they are."""
    for betas, states in (
        ((0.9, 0.999), (3 * k, 6 * k)),
        ((0.9, 0.95), (3 * k, 6 * k)),
        ((0.0, 0.99), (3 * k, 6 * k)),
        ((0.99, 0.9), (6 * k, 3 * k)),
        ((0.95, 0.95), (4 * k, 4 * k)),
        ((0.0, 0.0), (4 * k, 4 * k)),
    ):
        found = suggest_periods(OPTIM.Adam([weight()], betas=betas), 1.5 / k)
        assert found["param_every"] == k
        assert tuple(found["state_every"].values()) == states
        assert list(found["state_every"]) == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(("kind", "given", "names"), KNOWN, ids=[k[0].__name__ for k in KNOWN])
def test_budget_holds(kind: Any, given: dict[str, Any], names: set[str]) -> None:
    """Payloads per step are within the budget, most of it is used, and weights go first."""
    source = random.Random(7)
    for _ in range(300):
        if "momentum" in given:
            optimizer = kind([weight()], lr=0.1, momentum=source.uniform(0.1, 0.999))
        else:
            betas = (source.uniform(0, 0.999), source.uniform(0, 0.999))
            optimizer = kind([weight()], betas=betas)
        budget = math.exp(source.uniform(math.log(1e-4), math.log(3)))
        found = suggest_periods(optimizer, budget)
        first, states = found["param_every"], found["state_every"]
        assert set(states) == names and all(every >= first for every in states.values())
        used = sum(Fraction(1, every) for every in (first, *states.values()))
        assert used <= Fraction(budget) * (1 + Fraction(1, 10**11))
        # One step more in a period of K or more is all that rounding may cost.
        assert budget > 1.5 or used >= Fraction(budget) / (1 + Fraction(2, first))
        edit_ext.DESLOC(**found)


@pytest.mark.parametrize(("kind", "given", "names"), KNOWN, ids=[k[0].__name__ for k in KNOWN])
def test_names_are_those_of_the_states(kind: Any, given: dict[str, Any], names: set[str]) -> None:
    """The optimizer has the states after a step, and no other of its parameter's shape."""
    param = weight()
    optimizer = kind([param], lr=0.1, **given)
    param.grad = torch.ones_like(param)
    optimizer.step()
    shaped = {k for k, v in optimizer.state[param].items() if v.shape == param.shape}
    assert shaped == names == set(half_life_periods(optimizer, 1))


def test_half_life_periods() -> None:
    """A state's half-life or the weights' period, whichever is longer."""
    adam = OPTIM.AdamW([weight()], betas=(0.9, 0.999))
    assert half_life_periods(adam, 1) == {"exp_avg": 7, "exp_avg_sq": 693}
    assert half_life_periods(adam, 32) == {"exp_avg": 32, "exp_avg_sq": 693}
    assert half_life_periods(adam, 1000) == {"exp_avg": 1000, "exp_avg_sq": 1000}
    adamax = OPTIM.Adamax([weight()], betas=(0.0, 0.99))
    assert half_life_periods(adamax, 1) == {"exp_avg": 1, "exp_inf": 69}


def test_smallest_half_life() -> None:
    """Groups and optimizers that differ: no state is averaged too seldom."""
    groups = [{"params": [weight()], "betas": b} for b in ((0.95, 0.99), (0.9, 0.999))]
    adam = OPTIM.Adam(groups)
    assert half_life_periods(adam, 1) == {"exp_avg": 7, "exp_avg_sq": 69}
    sgd = OPTIM.SGD([{"params": [weight()], "momentum": m} for m in (0.0, 0.99, 0.95)], lr=0.1)
    assert half_life_periods([adam, sgd], 1) == {
        "exp_avg": 7,
        "exp_avg_sq": 69,
        "momentum_buffer": 14,
    }


class Own(OPTIM.AdamW):
    """A user's own AdamW."""


def test_subclasses_are_known() -> None:
    """A subclass goes by the settings of its base."""
    assert half_life_periods(Own([weight()]), 8) == {"exp_avg": 8, "exp_avg_sq": 693}


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (OPTIM.RMSprop([weight()]), r"half-lives are known \(Adam, .*, SGD\), but is RMSprop"),
        (OPTIM.SGD([weight()], lr=0.1), "SGD without momentum has none"),
        (OPTIM.SGD([weight()], lr=0.1, momentum=1.0), "momentum of SGD must be below 1"),
        (OPTIM.AdamW([weight()], amsgrad=True), "amsgrad of AdamW must be False, but is True"),
    ],
    ids=["rmsprop", "sgd", "momentum 1", "amsgrad"],
)
def test_refuses_optimizers(optimizer: OPTIM.Optimizer, words: str) -> None:
    """What has no known half-life is refused in a sentence by both."""
    with pytest.raises(ValueError, match=words):
        suggest_periods(optimizer, 0.1)
    with pytest.raises(ValueError, match=words):
        half_life_periods(optimizer, 8)


def test_refuses_numbers() -> None:
    """A budget is a number well above 0, a period an integer of at least 1."""
    adam = OPTIM.Adam([weight()])
    for budget in (0, -1.0, 5e-324, math.inf, math.nan):
        with pytest.raises(ValueError, match="budget must be at least 1e-09 payloads per step and"):
            suggest_periods(adam, budget)
    for wrong in ("1", True, None):
        with pytest.raises(TypeError, match="budget must be a number"):
            suggest_periods(adam, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="param_every must be at least 1, but is 0"):
        half_life_periods(adam, 0)
    with pytest.raises(TypeError, match=r"param_every must be an integer, but is 1.5"):
        half_life_periods(adam, 1.5)  # type: ignore[arg-type]
