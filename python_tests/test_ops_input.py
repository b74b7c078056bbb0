"""What the operators refuse, in which words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_ops import POLICY

from edit_ext import ops


class OnAGpu:
    """As CuPy's arrays say it."""

    __cuda_array_interface__ = {  # noqa: RUF012  # what the protocol wants
        "shape": (128,), "typestr": "<f4", "data": (4096, False), "version": 3,
    }  # fmt: skip


BAD = {
    "wrong dtype of the anchor": (
        lambda: ops.pseudo_grad(torch.zeros(128).double(), [torch.zeros(3)], torch.zeros(128)),
        TypeError,
        r"anchor has dtype Double; expected Float",
    ),
    "anchor too small": (
        lambda: ops.pseudo_grad(torch.zeros(100), [torch.zeros(200)], torch.zeros(256)),
        ValueError,
        r"anchor has 100 elements; expected at least 256",
    ),
    "double parameter": (
        lambda: ops.pseudo_grad(torch.zeros(128), [torch.zeros(3).double()], torch.zeros(128)),
        TypeError,
        r"params\[0\] has dtype Double; expected float32, bfloat16 or float16",
    ),
    "parameter with gaps": (
        lambda: ops.write_back(torch.zeros(128), [torch.zeros(20)[::2]]),
        ValueError,
        r"params\[0\] has strides \[2\]; expected dense storage without gaps",
    ),
    "meta parameter among cpu ones": (
        lambda: ops.write_back(torch.zeros(128), [torch.zeros(3, device="meta")]),
        ValueError,
        r"params\[0\] is on meta; expected cpu",
    ),
    "meta piece among cpu ones": (
        lambda: ops.merge(
            [torch.zeros(9), torch.zeros(9, device="meta")], torch.ones(2), torch.zeros(9)
        ),
        ValueError,
        r"pieces\[1\] is on meta; expected cpu",
    ),
    "meta norm": (
        lambda: ops.outer_step(
            *(torch.zeros(9) for _ in range(3)),
            torch.zeros(1, dtype=torch.float64, device="meta"),
            0.7,
            0.8,
            True,
            None,
        ),
        ValueError,
        r"norm2 is on meta; expected cpu",
    ),
    "meta detector": (
        lambda: ops.stacked_outer_step(
            [[torch.zeros(3)]],
            torch.zeros(128),
            torch.zeros(128),
            torch.zeros(1, 5, dtype=torch.float64, device="meta"),
            outer_lr=0.7,
            outer_momentum=0.8,
            nesterov=True,
            clip_norm=None,
        ),
        ValueError,
        r"detector is on meta; expected cpu",
    ),
    "steps of other replicas": (
        lambda: ops.decide(
            torch.ones(2, dtype=torch.float64),
            torch.ones(3, dtype=torch.int64),
            torch.zeros(2, 5, dtype=torch.float64),
            **POLICY,
        ),
        ValueError,
        r"steps has 3 elements; expected 2",
    ),
    "more weights than pieces": (
        lambda: ops.merge([torch.zeros(9)] * 2, torch.ones(3), torch.zeros(9)),
        ValueError,
        r"weights has 3 elements; expected 2",
    ),
    "half wire": (
        lambda: ops.pseudo_grad(torch.zeros(128), [torch.zeros(3)], torch.zeros(128).half()),
        TypeError,
        r"send has dtype Half; wire formats are float32 and bfloat16",
    ),
    "pieces of different sizes": (
        lambda: ops.merge([torch.zeros(9), torch.zeros(8)], torch.ones(2), torch.zeros(9)),
        ValueError,
        r"pieces\[1\] has 8 elements; expected at least 9",
    ),
    "no pieces": (
        lambda: ops.merge([], torch.ones(2), torch.zeros(9)),
        ValueError,
        r"pieces is empty",
    ),
    "strided momentum": (
        lambda: ops.outer_step(
            torch.zeros(5), torch.zeros(5), torch.zeros(10)[::2], torch.ones(1).double(),
            0.7, 0.8, True, None,
        ),
        ValueError,
        r"momentum has shape \[5\] and strides \[2\]; expected a contiguous vector",
    ),
    "outer_momentum": (
        lambda: ops.outer_step(
            torch.zeros(5), torch.zeros(5), torch.zeros(5), torch.ones(1).double(),
            0.7, 1.5, True, None,
        ),
        ValueError,
        r"outer_momentum is 1.5; expected a number in \[0, 1\)",
    ),
    "detector shape": (
        lambda: ops.decide(
            torch.ones(2).double(), torch.ones(2, dtype=torch.int64), torch.zeros(3, 5).double(),
            **POLICY,
        ),
        ValueError,
        r"detector has shape \[3, 5\] on cpu; expected contiguous fp64 \[2, 5\] on cpu",
    ),
    "too many stacked replicas": (
        lambda: ops.stacked_outer_step(
            [[torch.zeros(3)]] * 9, torch.zeros(128), torch.zeros(128), torch.zeros(9, 5).double()
        ),
        ValueError,
        r"replicas is 9; expected 1 to 8",
    ),
    "replicas of different lengths": (
        lambda: ops.stacked_outer_step(
            [[torch.zeros(3)] * 3, [torch.zeros(3)]], torch.zeros(256), torch.zeros(256),
            torch.zeros(2, 5).double(),
        ),
        ValueError,
        r"replicas\[1\] has 1 tensors; expected 3, as replicas\[0\]",
    ),
    "an anchor that requires grad": (
        lambda: ops.write_back(torch.zeros(128, requires_grad=True), [torch.zeros(3)]),
        ValueError,
        r"anchor requires grad; expected a plain buffer",
    ),
    "a parameter outside no_grad": (
        lambda: ops.write_back(torch.zeros(128), [torch.zeros(3, requires_grad=True)]),
        ValueError,
        r"params\[0\] requires grad; write to it inside torch.no_grad\(\)",
    ),
    "an array on a GPU that is not there": (
        lambda: ops.write_back(OnAGpu(), [torch.zeros(3)]),
        ValueError,
        r"an argument is a OnAGpu in the memory of a GPU, and torch .* sees no GPU here",
    ),
    "an array that runs backwards": (
        lambda: ops.write_back(torch.zeros(128), [np.zeros((3, 4), dtype=np.float32)[:, ::-1]]),
        ValueError,
        r"an array has negative strides",
    ),
    "replicas of different shapes": (
        lambda: ops.stacked_outer_step(
            [[torch.zeros(3)], [torch.zeros(4)]], torch.zeros(128), torch.zeros(128),
            torch.zeros(2, 5).double(),
        ),
        ValueError,
        r"params\[1\] has shape \[4\].*expected those of replica 0, \[3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_named(name: str) -> None:
    """The error has the right class and names argument, value and expectation."""
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()
