"""States of the inner optimizer that replicas average or reset: which there are, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checks import DTYPES
from .recipe import Recipe
from .sharding import local

COUNTER = "step"  # of torch's optimizers: never averaged


class InnerStates:
    """Finds states by name in torch optimizers. A state is a floating tensor of its parameter's
    shape; the step counter is none."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe) -> None:
        self._optimizers = list(optimizers)
        self._recipe = recipe
        self._stand_ins: dict[tuple[int, str], Tensor] = {}
        self.checked = not any(True for _ in recipe.state_tracks())

    def check(self, params: dict[str, nn.Parameter]) -> None:
        """After a step: are the states there that the settings name, and can they be averaged?

        Raises ValueError or TypeError naming state, parameter and what is wrong.
        """
        found: set[str] = set()
        for name, param in params.items():
            own = self._of(param)
            for key, value in own.items():
                if not _is_state(param, key, value) or self._track(key) is None:
                    continue
                problem = _unfit(param, value)
                if problem:
                    raise problem(
                        f"optimizer state {key!r} of {name!r} is {value.dtype} of shape "
                        f"{list(value.shape)}: only floating tensors of the parameter's shape "
                        f"{list(param.shape)} in float32, bfloat16 or float16 can be averaged; "
                        "leave it out of state_every, or use another optimizer"
                    )
                found.add(key)
        if all(p.grad is None and not self._of(p) for p in params.values()):
            return  # no gradient has come yet
        self.checked = True
        for _, track in self._recipe.state_tracks():
            missing = sorted(set(track.states or ()) - found)
            if missing:
                known = ", ".join(map(repr, sorted(self.names(params.values())))) or "none"
                raise ValueError(
                    f"the optimizer has no state {missing[0]!r} after its first step; its states "
                    f"are: {known}"
                )

    def names(self, params: Iterable[nn.Parameter]) -> set[str]:
        """Names of the states of these parameters that can be averaged."""
        return {
            key
            for param in params
            for key, value in self._of(param).items()
            if _is_state(param, key, value) and not _unfit(param, value)
        }

    def averaged(self, params: Iterable[nn.Parameter]) -> dict[str, str]:
        """Names of these parameters' states that some track averages, and their dtypes."""
        params = list(params)
        return {
            key: str(next(v[key].dtype for v in map(self._of, params) if key in v)).split(".")[1]
            for key in sorted(self.names(params))
            if self._track(key)
        }

    def track(self, key: str) -> int:
        """The number of the track that averages states of this name."""
        track = self._track(key)
        assert track is not None
        return track

    def tensors(self, params: Sequence[nn.Parameter], key: str, dtype: str) -> list[Tensor]:
        """This rank's memory of the state `key` of each parameter; zeros where it has none."""
        return [self._tensor(param, key, getattr(torch, dtype)) for param in params]

    @torch.no_grad()
    def reset(self, params: Iterable[nn.Parameter], *, step: bool) -> None:
        """Zero the states of these parameters; `step`: the step counter too."""
        for param in params:
            own = self._of(param)
            for key, value in own.items():
                if isinstance(value, Tensor) and (step or key != COUNTER):
                    value.zero_()
                elif step and key == COUNTER:
                    own[key] = 0

    def _track(self, key: str) -> int | None:
        found = (n for n, t in self._recipe.state_tracks() if not t.states or key in t.states)
        return next(found, None)

    def _of(self, param: nn.Parameter) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if param in optimizer.state:
                own: dict[str, Any] = optimizer.state[param]
                return own
        return {}

    def _tensor(self, param: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        here = self._of(param).get(key)
        if isinstance(here, Tensor):
            self._stand_ins.pop((id(param), key), None)
            return local(here)
        # A parameter without gradients so far: it takes part with zeros, and the mean is not kept,
        # because an optimizer takes a state that it has not made for a complete one.
        place = (id(param), key)
        if place not in self._stand_ins:
            self._stand_ins[place] = torch.zeros_like(local(param), dtype=dtype)
        return self._stand_ins[place].zero_()


def _is_state(param: nn.Parameter, key: str, value: Any) -> bool:
    """Not a counter, nor one number beside a larger parameter, such as NAdam's `mu_product`."""
    one_of_many = isinstance(value, Tensor) and value.numel() == 1 and value.shape != param.shape
    return isinstance(value, Tensor) and key != COUNTER and not one_of_many


def _unfit(param: nn.Parameter, value: Tensor) -> type[Exception] | None:
    if type(local(value)) is not Tensor or value.dtype not in DTYPES:
        return TypeError
    return ValueError if value.shape != param.shape else None
