"""One EDiT sync in fp64, written to be read: the yardstick of every faster path.

Follows Algorithm 2 and Eq. 1 to 4 of EDiT (arXiv 2412.07210); where the paper is silent the choice
is stated here. N elements in one layer, R replicas. The sign is an optimizer's: pseudo-gradient =
anchor - parameter. Nothing of the compiled part is imported. The ledger at the end counts bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CLIP_EPS = 1e-6  # added to the norm in Eq. 4
SIGMA_FLOOR = 0.01  # of the mean: steady norms must not turn a ripple into an outlier
ALIGN = 128  # elements; tensors and pieces of a flat layer start at multiples of it
WIRES = {"fp32": torch.float64, "bf16": torch.bfloat16}  # fp32 is not modelled


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The numbers that decide a sync; keywords of the compiled ``Policy``. ``None`` means off."""

    outer: str = "sgd"  # or "replace": the anchor becomes the (clipped) weighted mean
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    nesterov: bool = True
    clip_norm: float | None = 10.0
    weighting: str = "softmax"  # or "uniform", "steps"
    temperature: float = 1.0
    z_threshold: float | None = 3.0
    ema_alpha: float = 0.02  # above 0, below 1
    ema_warmup: int = 10  # norms fed before the first flag; at least 2
    max_flags_in_a_row: int = 10


class Detector(NamedTuple):
    """Running mean and variance of one replica's norms of one layer (Eq. 1), fp64.

    One row of the table [R, 5]. The recursion starts at zero, as in the paper:

    >>> d = Detector()
    >>> for norm in (0, 1, 1.2, 0.9, 1.1, 1.0, 5.0):
    ...     d = d.feed(norm, alpha=0.02)
    >>> f"{d.mean:.12f} {d.var:.13f}"
    '0.197885507776 0.5523014764531'
    """

    mean: float = 0.0
    var: float = 0.0
    fed: float = 0.0  # how many norms
    flags_in_a_row: float = 0.0  # of finite norms
    nonfinite_in_a_row: float = 0.0

    def feed(self, norm: float, alpha: float) -> Detector:
        """The row after an accepted norm: mean' = a x + (1-a) mean, var' with x - mean'."""
        mean = alpha * norm + (1 - alpha) * self.mean
        var = (1 - alpha) * self.var + alpha * (norm - mean) * (norm - mean)
        return Detector(mean, var, self.fed + 1)

    def limit(self, z_threshold: float, alpha: float) -> float:
        """The largest norm that passes, once two norms or more were fed.

        Zero start leaves the raw values too small by q = 1 - (1-a)^fed: they are read normalised,
        as mean and variance of the weighted sample. w2 is the sum of its squared weights (1/n for n
        equal ones): 1/(1-w2) makes the variance unbiased, 1+w2 adds the uncertainty of the mean.
        ``z_threshold`` is read as a normal tail and turned into Student's quantile for 1/w2 - 1
        degrees of freedom (Cornish-Fisher; Abramowitz and Stegun 26.7.5): the normal quantile would
        flag 2.5 times too often in the 100 syncs after the tenth.

        >>> round(Detector().feed(1.0, 0.02).feed(1.2, 0.02).limit(3.0, alpha=0.02), 4)
        5.909
        """
        keep = 1 - alpha
        decay = keep**self.fed  # an integer power: products alone, in the fast paths
        q = 1 - decay
        mean = self.mean / q
        var = (self.var / keep + self.mean * self.mean) / q - mean * mean
        w2 = alpha * alpha * (1 - decay * decay) / (1 - keep * keep) / (q * q)
        sigma = max(math.sqrt(max(var / (1 - w2), 0.0)), SIGMA_FLOOR * mean)
        d, nu = z_threshold, 1 / w2 - 1
        student = d + (d**3 + d) / (4 * nu) + (5 * d**5 + 16 * d**3 + 3 * d) / (96 * nu * nu)
        return float(mean + student * sigma * math.sqrt(1 + w2))

    def judge(self, norm: float, policy: Policy) -> tuple[Detector, bool]:
        """The row after ``norm`` was seen, and whether it is flagged. A small norm never is.

        Flagged norms are not fed: an outlier must not blind its own detector. After
        ``max_flags_in_a_row`` finite flags the next norm is taken for a new level: accepted, and
        the statistics start anew with it. A norm that is not finite is flagged whatever the policy.
        """
        if not math.isfinite(norm):
            return self._replace(nonfinite_in_a_row=self.nonfinite_in_a_row + 1), True
        # A layer that has never moved has no scale to compare with: mean > 0.
        on = policy.z_threshold is not None and self.mean > 0.0
        ready = on and self.fed >= policy.ema_warmup
        if ready and norm > self.limit(policy.z_threshold or 0.0, policy.ema_alpha):
            if self.flags_in_a_row >= policy.max_flags_in_a_row:
                return Detector().feed(norm, policy.ema_alpha), False
            return Detector(self.mean, self.var, self.fed, self.flags_in_a_row + 1), True
        return self.feed(norm, policy.ema_alpha), False


def weights(
    norms: Sequence[float], accepted: Sequence[bool], steps: Sequence[int], policy: Policy
) -> list[float]:
    """Weight of each replica (Eq. 2), exactly 0 where not accepted; all 0 if none is.

    >>> weights([1.0, 1.0, float("nan")], [True, True, False], [4, 4, 4], Policy())
    [0.5, 0.5, 0.0]
    """
    chosen = [r for r, ok in enumerate(accepted) if ok]
    least = min((norms[r] for r in chosen), default=0.0)
    raw = [0.0] * len(norms)
    for r in chosen:
        if policy.weighting == "softmax":
            raw[r] = math.exp((least - norms[r]) / policy.temperature)
        else:
            raw[r] = 1.0 if policy.weighting == "uniform" else float(steps[r])
    total = sum(raw)
    return [value / total if value else 0.0 for value in raw]


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor that shortens a merged step of this norm to ``clip_norm`` (Eq. 4).

    >>> round(clip_coefficient(0.085100897, 0.05), 8), clip_coefficient(0.1, 10.0)
    (0.58753097, 1.0)
    """
    if clip_norm is None or not norm > 0:
        return 1.0
    return min(clip_norm / (norm + CLIP_EPS), 1.0)


def outer_step(grad: Tensor, momentum: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """What the anchor loses [N] and the new momentum [N], as ``torch.optim.SGD`` has them."""
    if policy.outer == "replace":
        return grad, momentum
    momentum = policy.outer_momentum * momentum + grad
    step = grad + policy.outer_momentum * momentum if policy.nesterov else momentum
    return policy.outer_lr * step, momentum


@dataclass(frozen=True)
class SyncResult:
    """What a sync of one layer decides and computes; lists have one entry a replica."""

    norms: list[float]
    flags: list[bool]
    idle: list[bool]
    weights: list[float]
    merged: Tensor  # weighted pseudo-gradient before clipping, fp64 [N]
    merged_norm: float
    clip: float
    skip: bool  # none accepted, or merged norm not finite: anchor and momentum are as before
    anchor: Tensor  # fp64 [N]
    params: Tensor  # what every replica holds now: the anchor in the parameter's dtype [N]
    momentum: Tensor  # fp64 [N]
    detectors: list[Detector]
    stuck: list[int]  # replicas not finite for over max_flags_in_a_row syncs: the host raises


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values after a trip through ``dtype`` (nearest even), in fp64."""
    return values.to(dtype).double()


def sync_layer(
    anchor: Tensor,
    replicas: Sequence[Tensor],
    momentum: Tensor,
    detectors: Sequence[Detector],
    policy: Policy,
    steps: Sequence[int],
    *,
    param_dtype: torch.dtype = torch.float64,
    wire: str = "fp32",
) -> SyncResult:
    """One sync of one layer (Algorithm 2): ``anchor``, ``momentum`` [N], R ``replicas`` [N].

    ``steps``: local steps of each window; a replica without any is idle, has weight 0 and is not
    judged. A 16-bit parameter cannot hold the anchor, so differences are taken from the anchor
    *rounded* to ``param_dtype``; else each window undoes the part of the anchor below half a step.
    ``wire="bf16"`` rounds what is sent, after its norm was taken, and the step that comes back; the
    momentum is never rounded.

    >>> old, zero = torch.tensor([1.0]).double(), torch.zeros(1).double()
    >>> plain = Policy(outer_lr=1.0, outer_momentum=0.0, weighting="uniform")
    >>> sync_layer(old, [old - 0.2, old - 0.4], zero, [Detector()] * 2, plain, [1, 1]).anchor
    tensor([0.7000], dtype=torch.float64)
    """
    held = rounded(anchor, param_dtype)
    grads = [held - p.double() for p in replicas]
    norms = [math.sqrt((g * g).sum().item()) for g in grads]
    rows, idle, flags = list(detectors), [n == 0 for n in steps], [False] * len(grads)
    for r, norm in enumerate(norms):
        if not idle[r]:
            rows[r], flags[r] = rows[r].judge(norm, policy)
    share = weights(norms, [not (flags[r] or idle[r]) for r in range(len(norms))], steps, policy)

    merged = torch.zeros_like(held)
    for weight, grad in zip(share, grads, strict=True):
        if weight:  # left out by selection: 0 * NaN is NaN
            merged += weight * rounded(grad, WIRES[wire])
    merged_norm = math.sqrt((merged * merged).sum().item())
    clip = clip_coefficient(merged_norm, policy.clip_norm)
    stuck = [r for r, d in enumerate(rows) if d.nonfinite_in_a_row > policy.max_flags_in_a_row]
    skip = not any(share) or not math.isfinite(merged_norm) or bool(stuck)

    new, buffer = anchor.double(), momentum.double()
    if not skip:
        step, buffer = outer_step(clip * merged, buffer, policy)
        new = new - rounded(step, WIRES[wire])
    decided = (norms, flags, idle, share, merged, merged_norm, clip, skip)
    return SyncResult(*decided, new, new.to(param_dtype), buffer, rows, stuck)


def memory_bytes(replicas: int, *, param: int = 4, wire: int = 4) -> dict[str, float]:
    """Bytes one rank reads and writes per parameter; ``param`` and ``wire``: bytes an element.

    A 4-byte wire hands back anchor pieces, a narrower one steps, applied by all to their anchors.

    >>> memory_bytes(4)["total"], 24 + 24 / 4
    (30.0, 30.0)
    """
    narrow = wire < 4
    parts = {
        "pseudo_grad": 4 + param + wire,  # reads anchor and parameter, writes what is sent
        "merge": wire + 4 / replicas,  # reads R pieces of N/R, writes one
        "outer_step": (12 + (wire if narrow else 8)) / replicas,  # merged, momentum twice, result
        "write_back": (wire + 8 if narrow else 4) + param,  # step and anchor twice, or anchor
    }
    return {**parts, "total": sum(parts.values())}


def stacked_bytes(replicas: int) -> int:
    """12 R + 20 bytes per parameter: all replicas on one device, fp32, norms by a Gram matrix."""
    return 4 * (replicas + 1) + 8 * (replicas + 2)  # params, anchor; again and momentum, in and out


def padded(count: int) -> int:
    """Elements that a tensor of ``count`` elements takes in its flat layer."""
    return -(-count // ALIGN) * ALIGN


def piece_sizes(size: int, replicas: int) -> list[int]:
    """Elements of each replica's piece of a flat layer; the last may be shorter, or empty."""
    piece = padded(-(-size // replicas))
    return [max(0, min(piece, size - r * piece)) for r in range(replicas)]


def wire_bytes(
    counts: Sequence[int], replicas: int, rank: int, *, wire: int = 4, shards: int = 1
) -> int:
    """Bytes replica ``rank`` sends in one sync of a layer of tensors with ``counts`` elements.

    The others' pieces, then its own to each of them, ``wire`` bytes an element; and records: 32
    bytes to each replica (norm, sync index, steps, done), 16 to each rank of the mesh (merged norm,
    hash), 8 to each shard. Without padding the payload is 2 (R-1)/R * N elements, as a ring's.

    >>> wire_bytes([1000], 2, 0, wire=2) - 32 - 16, 2 * (2 - 1) / 2 * 1024 * 2
    (2048, 2048.0)
    """
    size = sum(padded(count) for count in counts)
    own = piece_sizes(size, replicas)[rank]
    records = 32 * (replicas - 1) + 16 * (replicas * shards - 1) + 8 * (shards - 1)
    return wire * (size - own + (replicas - 1) * own) + records
