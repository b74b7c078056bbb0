"""The toy problem of DES-LOC's paper (arXiv 2505.22549, Fig. 1): many workers, each with Adam, on

    f(x) = (1 - x1)^2 + 100 (x2 - x1^2)^2,    least at (1, 1)

in one process. What is averaged, and after which steps, is read from the product's own recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import edit_ext
from edit_ext.recipe import PARAMETERS, Recipe

STATES = ("exp_avg", "exp_avg_sq")
B2, EPS = 0.999, 1e-8  # 692 steps are the half-life of a mean with 0.999
WORKERS, SIGMA = 256, 1.5
SIGMA_OF_WORKERS = 3.0  # standard deviation of N(0, 3), whose magnitude is a worker's sigma
EVERY, VARIANCE_EVERY = 192, 692
METHODS = {
    "DES-LOC": edit_ext.DESLOC(
        param_every=EVERY, state_every={"exp_avg": EVERY, "exp_avg_sq": VARIANCE_EVERY}
    ),
    "Local Adam": edit_ext.LocalAdam(sync_every=EVERY),
    "persistent": edit_ext.FedAvgPersistent(sync_every=EVERY),
    "reset": edit_ext.FedAvgReset(sync_every=EVERY),
    "reset, step too": edit_ext.FedAvgReset(sync_every=EVERY, reset_step=True),
}


@dataclass(frozen=True)
class Setting:
    """What the paper does not give."""

    start: tuple[float, float]
    lr: float
    b1: float
    clip: float
    """Bound of each coordinate of a noisy gradient; math.inf: none."""
    corrected: bool
    """Whether Adam corrects the bias of its states' zero start, as torch.optim.Adam does."""


def averaged(recipe: Recipe, local: int) -> set[str]:
    """Which of parameters and states are averaged once `local` steps are complete."""
    due: set[str] = set()
    for track in (recipe.tracks[number] for number in recipe.due(local)):
        due.update([PARAMETERS] if track.states is None else track.states or STATES)
    return due


class Workers:
    """All workers of all methods, settings and seeds. Tensors are fp64 of shape
    [2 coordinates, methods, settings, seeds, workers]."""

    def __init__(
        self, recipes: Sequence[Recipe], settings: Sequence[Setting], seeds: int, workers: int
    ) -> None:
        self.recipes, self.settings = recipes, settings
        start = torch.tensor([s.start for s in settings], dtype=torch.float64)
        shape = 2, len(recipes), len(settings), seeds, workers
        self.tensors = {
            PARAMETERS: start.T[:, None, :, None, None].expand(shape).clone(),
            **{name: torch.zeros(shape, dtype=torch.float64) for name in STATES},
        }
        self.local = 0
        self.counted = [0] * len(recipes)  # Adam's own counters, of each method
        self._lr, self._b1, self._clip = (
            torch.tensor(values, dtype=torch.float64)[:, None, None]
            for values in zip(*((s.lr, s.b1, s.clip) for s in settings), strict=True)
        )
        self._corrected = torch.tensor([s.corrected for s in settings])[:, None, None]

    def step(self, noise: Tensor) -> None:
        """One step of all workers, then the averages that are due. With g = clip(grad f + noise):

            u = b1 u + (1 - b1) g,    v = b2 v + (1 - b2) g^2
            x = x - lr (u / c1) / (sqrt(v / c2) + eps)

        c1 = 1 - b1^t and c2 = 1 - b2^t, or 1 without bias correction; t: steps of the counter.
        noise: of each coordinate, seed and worker, [2, 1, 1, seeds, workers]; alike in all methods.
        """
        x, u, v = self.tensors.values()
        g = gradient(x).add_(noise).clamp_(-self._clip, self._clip)
        u.lerp_(g, 1 - self._b1)
        v.mul_(B2).addcmul_(g, g, value=1 - B2)
        self.local += 1
        self.counted = [count + 1 for count in self.counted]
        steps = torch.tensor(self.counted, dtype=torch.float64)[:, None, None, None]
        c1 = torch.where(self._corrected, 1 - self._b1**steps, 1.0)
        c2 = torch.where(self._corrected, 1 - B2**steps, 1.0)
        denominator = torch.sqrt(v, out=g).mul_(c2.rsqrt()).add_(EPS)
        x.addcdiv_(u * (self._lr / c1), denominator, value=-1.0)
        for number, recipe in enumerate(self.recipes):
            self._sync(number, recipe)

    def _sync(self, number: int, recipe: Recipe) -> None:
        due = averaged(recipe, self.local)
        for name in due:
            tensor = self.tensors[name][:, number]
            tensor.copy_(tensor.mean(dim=-1, keepdim=True).expand_as(tensor))
        if recipe.resets is not None and PARAMETERS in due:
            for name in STATES:
                self.tensors[name][:, number] = 0.0
            if recipe.resets == "states and step":
                self.counted[number] = 0

    @property
    def mean(self) -> Tensor:
        """The workers' mean point, [2, methods, settings, seeds]."""
        return self.tensors[PARAMETERS].mean(dim=-1)


def gradient(x: Tensor) -> Tensor:
    """Of f at x, coordinates first."""
    x1, x2 = x
    g = torch.empty_like(x)
    torch.mul(x1, x1, out=g[1]).sub_(x2).mul_(-200.0)  # 200 (x2 - x1^2)
    torch.mul(g[1], x1, out=g[0]).add_(1.0).sub_(x1).mul_(-2.0)
    return g


def paths(
    recipes: Mapping[str, Recipe],
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    rounds: int,
    workers: int = WORKERS,
    alike: bool = True,
) -> Tensor:
    """Mean points after each round of EVERY steps, [methods, settings, seeds, rounds + 1, 2]; the
    first is the start. alike: noise of SIGMA on all workers, else worker m's standard deviation is
    |N(0, SIGMA_OF_WORKERS)|. A seed gives the same noise whatever else runs beside it."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    group = Workers(list(recipes.values()), settings, len(seeds), workers)
    sigma = torch.full((len(seeds), workers), SIGMA, dtype=torch.float64)
    if not alike:
        drawn = [torch.randn(workers, dtype=torch.float64, generator=g) for g in generators]
        sigma = SIGMA_OF_WORKERS * torch.stack(drawn).abs()
    points = [group.mean]
    for _ in range(rounds):
        shape = EVERY, 2, workers
        noise = [torch.randn(shape, dtype=torch.float64, generator=g) for g in generators]
        for each in torch.stack(noise, dim=2) * sigma:
            group.step(each[:, None, None])
        points.append(group.mean)
    return torch.stack(points).permute(2, 3, 4, 0, 1)


def distances(points: Tensor) -> Tensor:
    """Of points [..., 2] to (1, 1), [...]."""
    return (points - 1.0).norm(dim=-1)
