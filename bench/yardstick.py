"""The ceiling of a memory-bound kernel: the best of several streaming kernels, in the same rounds.

Bytes are those a kernel is asked to move. torch's own kernels write through the caches, so that the
memory also delivers each line that is about to be overwritten: they read well below what the
machine can do, and are not the ceiling. Ours write past the caches (non-temporal stores).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from edit_ext import ops

from .timing import Case, Times

BYTES = {  # an element of fp32
    "torch copy": 8,
    "torch add": 12,
    "stream copy": 8,
    "stream triad": 12,
    "stream read": 4,
}


def cases(n: int) -> dict[str, Case]:
    """Five kernels over three vectors of n fp32 elements, by name; torch's two on a GPU.

    There a copy is the ceiling that kernels are held to.
    """
    a, b, out = (torch.full((n,), value) for value in (1.0, 2.0, 0.0))

    def stream(kind: int) -> Callable[[], object]:
        return lambda: ops.stream(kind, a, b, out)

    torchs = {
        "torch copy": Case(lambda: out.copy_(a)),
        "torch add": Case(lambda: torch.add(a, b, out=out)),
    }
    if a.device.type != "cpu":
        return torchs
    return {
        **torchs,
        "stream copy": Case(stream(0)),
        "stream triad": Case(stream(1)),
        "stream read": Case(stream(2)),
    }


def gbps(times: Mapping[str, Times], n: int) -> dict[str, float]:
    """GB/s (1e9 bytes) of each kernel that was timed, by its median."""
    return {name: BYTES[name] * n / times[name].median / 1e9 for name in BYTES if name in times}
