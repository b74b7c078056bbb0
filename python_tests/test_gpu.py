"""What a GPU must do that the CPU's twin has promised: the same bits, on its own stream, unseen by
the host. Run by `pytest -m gpu` on a machine with one, and under the emulator on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import plain, sgd
from ranks import Ranks
from test_ops import POLICY as DECISIONS
from torch import Tensor, nn

import edit_ext
from edit_ext import _C, ops, reference

HOME = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = HOME.type == "cuda"
SIZES = [(17, 9), (), (0,), (70001,), (3, 5, 7)]
POLICY = {**DECISIONS, "outer_lr": 0.7, "outer_momentum": 0.8, "nesterov": True, "clip_norm": 10.0}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.on_cuda(torch.zeros(1)) and not GPU, reason="no CUDA device here"),
]


def draw(seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(size, generator=generator)).to(dtype) for size in SIZES]


def flat(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    offsets, size = ops.flat_offsets(tensors)
    out = torch.zeros(size, dtype=dtype)
    for at, t in zip(offsets, tensors, strict=True):
        out[at : at + t.numel()] = t.flatten().to(dtype)
    return out


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Any operation of torch that waits for the GPU is an error inside."""
    if GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if GPU:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_give_the_same_bits(dtype: torch.dtype, wire: torch.dtype) -> None:
    """Pseudo-gradient, merge, outer step and write-back equal the CPU's, with no host wait."""
    results = []
    for home in (torch.device("cpu"), HOME):
        anchor = flat(draw(0)).to(home)
        params = [t.to(home) for t in draw(1, dtype)]
        send, other = torch.zeros(len(anchor), dtype=wire, device=home), anchor.to(wire) * 0.01
        weights = torch.tensor([0.25, 0.75], device=home)
        merged, momentum = torch.zeros_like(anchor), torch.ones_like(anchor)
        with no_host_sync():
            norm2 = ops.pseudo_grad(anchor, params, send)
            merged2 = ops.merge([send, other], weights, merged)
            ops.outer_step(merged, anchor, momentum, merged2, 0.7, 0.8, True, 10.0)
            ops.write_back(anchor, params)
        results.append([t.cpu() for t in (norm2, send, merged2, merged, momentum, anchor, *params)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_stacked_gives_the_same_bits(replicas: int) -> None:
    """A whole stacked sync equals the CPU's in every bit, decisions too."""
    results = []
    for home in (torch.device("cpu"), HOME):
        params = [[t.to(home) for t in draw(r + 1)] for r in range(replicas)]
        anchor, momentum = flat(draw(0)).to(home), flat(draw(99)).to(home)
        detector = torch.zeros(replicas, 5, dtype=torch.float64, device=home)
        with no_host_sync():
            out = ops.stacked_outer_step(params, anchor, momentum, detector, **POLICY)
        tensors: list[Any] = [*vars(out).values()] if hasattr(out, "__dict__") else list(out)
        kept = [t.cpu() for t in tensors if isinstance(t, Tensor)]
        results.append([*kept, anchor.cpu(), momentum.cpu(), *(p.cpu() for r in params for p in r)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_sums_of_a_large_tensor() -> None:
    """2^31 + 17 elements where there is room: the norm is right to 1e-6, and so is the end."""
    room = GPU and torch.cuda.mem_get_info()[0] > 60 * 2**30
    n = 2**31 + 17 if room else 2**22 + 17
    anchor = torch.full((edit_ext.ops.flat_offsets([torch.empty(n, device="meta")])[1],), 0.5)
    anchor = anchor.to(HOME)
    param = torch.full((n,), 0.25, device=HOME)
    param[-1] = 4.5
    send = torch.empty_like(anchor)
    norm2 = ops.pseudo_grad(anchor, [param], send)
    assert norm2.item() == pytest.approx((n - 1) * 0.0625 + 16.0, rel=1e-6)
    assert send[n - 2].item() == 0.25 and send[n - 1].item() == -4.0


def layer_on(home: torch.device, pool: _C.BufferPool) -> _C.Layer:
    params = [t.to(home) for t in draw(5)]
    return _C.Layer("block", params, replica=None, lane=_C.make_lane(params[0]), pool=pool)


def rules() -> _C.Policy:
    return _C.Policy(outer="sgd", **POLICY)


def test_a_whole_sync_waits_for_nobody() -> None:
    """begin and wait of a layer run under torch's sync-debug mode; statistics come later."""
    layer = layer_on(HOME, _C.BufferPool(1))
    for sync_index in range(3):
        with torch.no_grad():
            for p in layer.params:
                p.add_(0.01 * (sync_index + 1))
        with no_host_sync():
            layer.begin(rules(), sync_index=sync_index, steps=4, done=False)
            layer.wait()
        stats = layer.stats()
        assert stats["sync_index"] == sync_index and stats["flags"] == [False]
        assert layer.settled


def test_an_error_that_nobody_read_is_not_lost() -> None:
    """A decision that has to raise does so at the layer's next begin, if stats() was not called."""
    layer = layer_on(HOME, _C.BufferPool(1))
    strict = _C.Policy(**{**POLICY, "max_flags_in_a_row": 1})

    def sync(sync_index: int) -> None:
        with torch.no_grad():
            layer.params[0].fill_(float("nan"))
        layer.begin(strict, sync_index=sync_index, steps=1, done=False)
        layer.wait()

    sync(0)
    sync(1)
    with pytest.raises(RuntimeError, match="sync 1: replica 0 had a norm that is not finite"):
        sync(2)


def test_races_of_streams_and_buffers() -> None:
    """200 syncs of two layers that share buffers, beside work on the caller's stream, same bits."""
    pool = _C.BufferPool(1)
    layers = [layer_on(HOME, pool), layer_on(HOME, pool)]
    twin_pool = _C.BufferPool(2)
    twins = [layer_on(HOME, twin_pool), layer_on(HOME, twin_pool)]
    noise = torch.randn(512, 512, device=HOME)
    for k in range(200 if GPU else 10):
        for group in (layers, twins):
            for layer in group:
                with torch.no_grad():
                    for i, p in enumerate(layer.params):
                        p.add_(1e-3 * (i + k % 7))
        for layer in layers:  # one after the other through one set of buffers, in a hurry
            layer.begin(rules(), sync_index=k, steps=1, done=False)
            layer.wait()
            noise = noise @ noise.T / 512.0
            torch.empty(70001, device=HOME).normal_()
        for layer in twins:  # with all the time in the world
            layer.begin(rules(), sync_index=k, steps=1, done=False)
            layer.wait()
            layer.stats()  # an error if the caller's stream is not behind the side stream
            if GPU:
                torch.cuda.synchronize()
    for layer, twin in zip(layers, twins, strict=True):
        assert torch.equal(layer.anchor, twin.anchor)
        assert all(torch.equal(a, b) for a, b in zip(layer.params, twin.params, strict=True))


def test_two_ranks_share_a_gpu_over_gloo(ranks: Ranks) -> None:
    """Staged through pinned memory, two replicas on one device end with equal anchors."""
    first, second = ranks.run(2, agreed_anchor, HOME.type)
    assert first == second


def agreed_anchor(home: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(home)
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(), comm="c10d") as sync:
        for t in range(6):
            x = torch.full((2, 7), 0.1 * (dist.get_rank() + 1) * (t + 1), device=home)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        with sync.anchor_weights():
            return [v for p in model.parameters() for v in p.detach().cpu().flatten().tolist()]


def test_merge_follows_the_reference() -> None:
    """Weights decided on the device are those of the reference."""
    norms = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, device=HOME)
    steps = torch.ones(3, dtype=torch.int64, device=HOME)
    detector = torch.zeros(3, 5, dtype=torch.float64, device=HOME)
    weights, flags, skip = ops.decide(norms, steps, detector, **DECISIONS)
    want = reference.weights([1.0, 2.0, 4.0], [True] * 3, [1] * 3, reference.Policy())
    assert weights.tolist() == pytest.approx(want, rel=1e-6)
    assert not flags.any() and not skip.item()


def test_fsdp_gathers_behind_our_write(ranks: Ranks) -> None:
    """FSDP2 gathers on streams of its own; with our write-back held up, it still gathers what we
    wrote. Two shards on one device, over Gloo as far as that takes its memory."""
    for wrong in ranks.run(2, seen_in_a_sync, HOME.type):
        if isinstance(wrong, str):
            pytest.skip(f"FSDP2 over Gloo does not work on {HOME}: {wrong}")
        assert wrong == []


def seen_in_a_sync(home: str) -> list[str] | str:
    """Names of weights that differ, in the forward of a sync, from what the layers hold."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(home, (1, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(home)
    for part in [*model, model]:
        fully_shard(part, mesh=mesh["shard"])
    optimizer = sgd(model)
    seen: dict[str, Tensor] = {}
    wrong: list[str] = []
    x = torch.ones(2, 64, device=home)
    try:
        model.eval()(x)  # whether the transport takes this memory at all
    except RuntimeError as error:
        return str(error).splitlines()[0]
    model.train()
    with edit_ext.attach(model, optimizer, edit_ext.EDiT(sync_every=1, timeout=20.0), mesh=mesh):
        for name, part in model.named_children():
            part.register_forward_pre_hook(
                lambda m, args, name=name: seen.update({name: m.weight.detach().clone()})
            )
            part.register_forward_pre_hook(lambda m, args: hold_up(), prepend=True)
        for _ in range(4):
            model(x)
            for name, part in model.named_children():
                part.reshard()
                if not torch.equal(seen[name], part.weight.full_tensor().detach()):
                    wrong.append(name)
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return wrong


def hold_up() -> None:
    """The current stream is busy for some milliseconds."""
    if GPU:
        torch.cuda._sleep(20_000_000)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_short_another_device() -> None:
    """Tensors on the second GPU while the first is current: operators and a sync are right."""
    results = []
    for home in (torch.device("cpu"), torch.device("cuda:1")):
        anchor, momentum = flat(draw(0)).to(home), flat(draw(9)).to(home)
        params = [[t.to(home) for t in draw(r + 1)] for r in range(2)]
        sends = [torch.zeros_like(anchor) for _ in params]
        for tensors, send in zip(params, sends, strict=True):
            ops.pseudo_grad(anchor, tensors, send)
        merged = torch.zeros_like(anchor)
        norm2 = ops.merge(sends, torch.tensor([0.5, 0.5], device=home), merged)
        ops.outer_step(merged, anchor, momentum, norm2, 0.7, 0.8, True, 10.0)
        ops.write_back(anchor, params[0])
        detector = torch.zeros(2, 5, dtype=torch.float64, device=home)
        ops.stacked_outer_step(params, anchor, momentum, detector, **POLICY)
        layer = layer_on(home, _C.BufferPool(1))
        torch._foreach_add_(layer.params, 0.01)
        layer.begin(rules(), sync_index=0, steps=1, done=False)
        layer.wait()
        assert layer.stats()["flags"] == [False]
        kept = [anchor, momentum, layer.anchor, *layer.params, *(t for p in params for t in p)]
        results.append([t.cpu() for t in kept])
    assert torch.cuda.current_device() == 0
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
