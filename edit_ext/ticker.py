"""When several optimizers together have made one logical step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

PATIENCE = 64  # steps of one optimizer without a tick before the warning


class Ticker:
    """One tick per logical step: when all optimizers that own gradients have stepped.

    If none of them owns a gradient (an empty batch), all of them have to step, so that replicas
    with and without gradients count alike.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._stepped: set[int] = set()
        self._last: set[int] = set(range(len(self.optimizers)))
        self._without_tick = 0
        self._warned = False

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """`optimizer` has stepped; True if that completes a logical step."""
        self._stepped.add(self._number(optimizer))
        waiting = [
            number
            for number, other in enumerate(self.optimizers)
            if number not in self._stepped and _has_gradients(other)
        ]
        all_idle = not any(_has_gradients(self.optimizers[number]) for number in self._stepped)
        if waiting or (all_idle and len(self._stepped) < len(self.optimizers)):
            self._without_tick += 1
            self._complain(waiting)
            return False
        self._last, self._stepped = self._stepped, set()
        self._without_tick = 0
        return True

    def in_last_tick(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` took part in the last logical step, so that its next is a new one."""
        return self._number(optimizer) in self._last

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return next(n for n, other in enumerate(self.optimizers) if other is optimizer)

    def _complain(self, waiting: list[int]) -> None:
        if waiting and self._without_tick >= PATIENCE and not self._warned:
            self._warned = True
            names = ", ".join(f"{n} ({type(self.optimizers[n]).__name__})" for n in waiting)
            warnings.warn(
                f"edit_ext: {PATIENCE} optimizer steps without a complete one: optimizer {names} "
                "owns gradients but does not step, so no sync becomes due.",
                stacklevel=2,
            )


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
