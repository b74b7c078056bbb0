"""The operators against the fp64 reference, and their schemas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from edit_ext import _C, ops, reference

POLICY = {
    "weighting": "softmax",
    "temperature": 1.0,
    "z_threshold": 3.0,
    "ema_alpha": 0.02,
    "ema_warmup": 10,
    "max_flags_in_a_row": 10,
}
SHAPES = [(17, 9), (), (1,), (0,), (3, 5, 7), (70001,)]


def flat(tensors: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensors in the flat layout, zeros between them."""
    offsets, size = ops.flat_offsets(tensors)
    buffer = torch.zeros(size, dtype=dtype)
    for at, t in zip(offsets, tensors, strict=True):
        buffer[at : at + t.numel()] = t.flatten().to(dtype)
    return buffer


def randoms(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def spread(seed: int, around: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    noise = randoms(seed)
    return [a + (scale * n).to(a.dtype) for a, n in zip(around, noise, strict=True)]


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten().double() for t in tensors])


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pseudo_grad_equals_reference(dtype: torch.dtype, wire: torch.dtype) -> None:
    """send = round(anchor) - param in the wire's dtype; sumsq before that; zeros between."""
    anchor = randoms(0)
    params = [t.to(dtype) for t in spread(1, anchor, 0.1)]
    send = torch.full_like(flat(anchor), 7.0).to(wire)
    sumsq = ops.pseudo_grad(flat(anchor), params, send)
    want = [a.to(dtype).double() - p.double() for a, p in zip(anchor, params, strict=True)]
    assert torch.equal(send, flat([w.float() for w in want]).to(wire))
    assert sumsq.item() == pytest.approx(joined(want).square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_passes_run_on_as_many_threads_as_torch_uses(threads: int) -> None:
    """Without OpenMP at build time torch's parallel_for runs on one thread and says nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert _C.kernel_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_arrays_of_other_libraries() -> None:
    """NumPy arrays are worked on in place; a read-only one is refused, not copied."""
    anchor, param = np.full(128, 2.0, np.float32), np.full(3, 0.5, np.float32)
    send = np.ones(128, np.float32)
    norm2 = ops.pseudo_grad(anchor, [param], send)
    assert norm2.item() == 6.75 and send[:4].tolist() == [1.5, 1.5, 1.5, 0.0]
    ops.write_back(anchor, [param])
    assert param.tolist() == [2.0, 2.0, 2.0]
    stacked = ops.stacked_outer_step(
        [[param]], anchor, np.zeros(128, np.float32), np.zeros((1, 5)), clip_norm=None
    )
    assert stacked.norms.item() == 0.0
    param.flags.writeable = False
    with pytest.raises(ValueError, match="an array is read-only"):
        ops.write_back(anchor, [param])


def test_golden_sync_through_the_steps() -> None:
    """Both golden outer steps (clip 10 and 0.05), from params to the new anchor."""
    start = torch.tensor([1.0, 2.0])
    replicas = [[torch.tensor([0.9, 2.1])], [torch.tensor([1.2, 1.7])]]
    for clip, want in ((10.0, (1.0423743290, 1.9015008946)), (0.05, (1.0248962305, 1.9421287253))):
        anchor = flat([start])
        sends = [torch.zeros(128), torch.zeros(128)]
        sums = [ops.pseudo_grad(anchor, p, send) for p, send in zip(replicas, sends, strict=True)]
        norms = torch.cat([*sums, torch.tensor([math.nan]).double()]).sqrt()
        weights, flags, skip = ops.decide(
            norms, torch.ones(3, dtype=torch.int64), torch.zeros(3, 5).double(), **POLICY
        )
        assert flags.tolist() == [False, False, True] and not skip
        assert weights.tolist() == pytest.approx([0.5545652671, 0.4454347329, 0.0], abs=1e-6)
        merged, momentum = torch.zeros(128), torch.zeros(128)
        norm2 = ops.merge([*sends, torch.full((128,), math.nan)], weights, merged)
        assert norm2.sqrt().item() == pytest.approx(0.0851008972, rel=1e-6)
        ops.outer_step(merged, anchor, momentum, norm2, 0.7, 0.8, True, clip)
        out = [torch.empty(2)]
        ops.write_back(anchor, out)
        assert out[0].tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7, 8])
def test_stacked_equals_reference(replicas: int) -> None:
    """Three stacked syncs, one replica running wild in the last but one: equal to the reference."""
    anchor_parts = randoms(0)
    anchor = flat(anchor_parts)
    momentum, detector = torch.zeros_like(anchor), torch.zeros(replicas, 5).double()
    n = joined(anchor_parts).numel()
    policy = reference.Policy(ema_warmup=2, clip_norm=5.0, temperature=3.0)
    want_anchor, want_momentum = joined(anchor_parts), torch.zeros(n).double()
    rows = [reference.Detector()] * replicas
    for k in range(5):
        stacks = []
        for r in range(replicas):
            scale = 5.0 if (k, r) == (3, 1) else 0.01
            now = [
                anchor[at : at + t.numel()].view(t.shape)
                for at, t in zip(ops.flat_offsets(anchor_parts)[0], anchor_parts, strict=True)
            ]
            stacks.append(spread(10 * k + r, now, scale))
        want = reference.sync_layer(
            want_anchor, [joined(s) for s in stacks], want_momentum, rows, policy, [1] * replicas
        )
        got = ops.stacked_outer_step(
            stacks, anchor, momentum, detector, ema_warmup=2, clip_norm=5.0, temperature=3.0
        )
        want_anchor, want_momentum, rows = want.anchor, want.momentum, want.detectors
        assert got.flags.tolist() == want.flags
        assert want.flags == [(k, r) == (3, 1) for r in range(replicas)]
        assert got.norms.tolist() == pytest.approx(want.norms, rel=1e-5)
        assert got.weights.tolist() == pytest.approx(want.weights, abs=1e-5)
        assert got.scalars.tolist() == pytest.approx([want.merged_norm, want.clip, 0.0], rel=1e-4)
        for stack in stacks:
            assert torch.allclose(joined(stack), want_anchor, rtol=1e-5, atol=1e-6)


def test_stacked_norm_survives_cancellation() -> None:
    """Replicas that nearly cancel: the norm of the merged step comes from the exact pass."""
    n = 40000
    move = torch.randn(n, generator=torch.Generator().manual_seed(3))
    small = 1e-4 * torch.randn(n, generator=torch.Generator().manual_seed(4))
    anchor = torch.zeros(ops.flat_offsets([move])[1])
    stacks = [[move + small], [small - move]]
    merged = sum((0.0 - s[0].double()) * 0.5 for s in stacks)
    got = ops.stacked_outer_step(
        stacks, anchor, torch.zeros_like(anchor), torch.zeros(2, 5).double(), weighting="uniform"
    )
    assert got.scalars[0].item() == pytest.approx(merged.norm().item(), rel=1e-5)


def test_stacked_returns_to_the_anchor_when_all_are_flagged() -> None:
    """All NaN: every replica gets the anchor back, the momentum stays as it was."""
    anchor, momentum = flat(randoms(0)), flat(randoms(1))
    before = anchor.clone(), momentum.clone()
    stacks = [[torch.full_like(t, math.nan) for t in randoms(0)] for _ in range(3)]
    got = ops.stacked_outer_step(stacks, anchor, momentum, torch.zeros(3, 5).double())
    assert got.flags.all() and got.scalars[2] == 1.0 and not got.weights.any()
    assert torch.equal(anchor, before[0]) and torch.equal(momentum, before[1])
    for stack in stacks:
        assert torch.equal(joined(stack), joined(randoms(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_24_alignment(dtype: torch.dtype) -> None:
    """Parameters at odd places of one buffer: right values, neighbours untouched."""
    for offset in (1, 2, 3, 7):
        for n in (1, 7, 31, 1023, 20001):
            pool = torch.full((n + 40,), 9.0, dtype=dtype)
            param = pool[16 + offset : 16 + offset + n]
            param.copy_(torch.randn(n, generator=torch.Generator().manual_seed(n)))
            anchor = flat([torch.randn(n, generator=torch.Generator().manual_seed(n + 1))])
            send = torch.zeros_like(anchor)
            ops.pseudo_grad(anchor, [param], send)
            assert torch.equal(send[:n], anchor[:n].to(dtype).float() - param.float())
            ops.write_back(anchor, [param])
            assert torch.equal(param, anchor[:n].to(dtype))
            assert (pool[: 16 + offset] == 9.0).all() and (pool[16 + offset + n :] == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bit_parameters_do_not_overflow(dtype: torch.dtype) -> None:
    """Differences of 300, of norm 5000 and of 1e-6: norms to 1e-3 of fp64."""
    for value, n in ((300.0, 1), (50.0, 10000), (1e-6, 1)):
        param = torch.full((n,), -value).to(dtype)
        send = torch.zeros(ops.flat_offsets([param])[1])
        norm = ops.pseudo_grad(torch.zeros_like(send), [param], send).sqrt().item()
        assert norm == pytest.approx(param.double().norm().item(), rel=1e-3)


def test_autograd_notices_what_was_written() -> None:
    """A graph that has saved a parameter refuses its backward after a write."""
    param = torch.nn.Parameter(torch.full((3,), 3.0))
    for write in (
        lambda: ops.write_back(torch.zeros(128), [param]),
        lambda: ops.stacked_outer_step(
            [[param]], torch.zeros(128), torch.zeros(128), torch.zeros(1, 5).double()
        ),
    ):
        loss = (param * param).sum()
        with torch.no_grad():
            write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def op_arguments() -> dict[str, tuple]:
    anchor, params = flat(randoms(0)), randoms(1)
    pieces = [torch.randn(300), torch.randn(300)]
    steps = torch.ones(2, dtype=torch.int64)
    one = torch.ones(1, dtype=torch.float64)
    stacked = {**POLICY, "outer_lr": 0.7, "outer_momentum": 0.8, "nesterov": True}
    return {
        "pseudo_grad": ((anchor, params, torch.zeros_like(anchor)), {}),
        "decide": ((torch.rand(2).double(), steps, torch.zeros(2, 5).double()), POLICY),
        "merge": ((pieces, torch.tensor([0.5, 0.5]), torch.zeros(300)), {}),
        "outer_step": (
            (torch.randn(300), torch.randn(300), torch.randn(300), one, 0.7, 0.8, True, 10.0),
            {},
        ),
        "write_back": ((anchor, randoms(2)), {}),
        "stacked_outer_step": (
            ([*randoms(1), *randoms(2)], 2, anchor, torch.zeros_like(anchor)),
            {"detector": torch.zeros(2, 5).double(), "clip_norm": 10.0, **stacked},
        ),
        "stream": ((1, torch.randn(300), torch.randn(300), torch.zeros(300)), {}),
    }


@pytest.mark.parametrize("name", list(op_arguments()))
def test_opcheck(name: str) -> None:
    """Schema, mutation annotations and fake kernel of every operator agree with what it does."""
    args, kwargs = op_arguments()[name]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.edit_ext, name), args, kwargs, test_utils=checks)


@pytest.mark.parametrize("name", list(op_arguments()))
def test_what_is_written_has_a_new_version(name: str) -> None:
    """The version counter of each tensor moves that the operator's schema says it writes."""
    args, kwargs = op_arguments()[name]
    operator = getattr(torch.ops.edit_ext, name)
    written = []
    for place, argument in enumerate(operator.default._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs[argument.name]
            written += value if isinstance(value, list) else [value]
    before = [tensor._version for tensor in written]
    operator(*args, **kwargs)
    assert written and all(t._version > v for t, v in zip(written, before, strict=True))


def test_every_operator_is_checked() -> None:
    """A new operator without arguments in `op_arguments` fails here."""
    names = {
        n.split("::")[1].split(".")[0]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("edit_ext::")
    }
    assert names == set(op_arguments())
