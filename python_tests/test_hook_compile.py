"""torch.compile around, inside and after attach: the right number of syncs, no new compilations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nets import batch, loss, make_net, plain, same, sgd, train_step, values
from torch import nn
from torch._dynamo.testing import CompileCounter

import edit_ext


def trained(model: nn.Module, root: nn.Module, before: bool) -> tuple[int, int, dict]:
    """Eleven steps, attached before or after the first; steps, syncs and weights."""
    optimizer = sgd(model)
    first = 0
    if not before:
        train_step(root, optimizer, 0, 0)
        first = 1
    sync = edit_ext.attach(root, optimizer, plain(outer_lr=0.5))
    for t in range(first, 11 + first):
        train_step(root, optimizer, 0, t)
    result = sync.step, sync.totals()["syncs"], values(model)
    sync.detach()
    return result


@pytest.mark.parametrize("before", [True, False], ids=["before-first-call", "after-first-call"])
@pytest.mark.parametrize("how", ["wrapped", "in-place", "blocks-wrapped", "blocks-in-place"])
def test_row_14_compiled_then_attached(how: str, before: bool) -> None:
    """Compiled as a whole or block by block: five syncs, weights as without compilation, no more
    compilations than without attach."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = make_net()
    uncompiled = make_net()
    reference = trained(uncompiled, uncompiled, before)
    root: nn.Module = model
    if how == "wrapped":
        root = torch.compile(model, backend=counter)
    elif how == "in-place":
        model.compile(backend=counter)
    else:
        for name in ("0", "1", "2"):
            block = model.blocks[int(name)]
            if how == "blocks-wrapped":
                model.blocks[int(name)] = torch.compile(block, backend=counter)
            else:
                block.compile(backend=counter)
    steps, syncs, weights = trained(model, root, before)
    assert (steps, syncs) == reference[:2] == (11, 5)
    clean = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    for name, value in reference[2].items():
        torch.testing.assert_close(clean[name], value, rtol=1e-6, atol=1e-7)
    assert counter.frame_count <= (1 if how in ("wrapped", "in-place") else 3)


# What is compiled after attach, and how often that compiles: a graph ends at each of our hooks.
LATER: dict[str, tuple[Callable[[nn.Module], nn.Module], int]] = {
    "wrapped": (lambda model: torch.compile(model, backend=counter), 6),
    "in-place": (lambda model: (model.compile(backend=counter), model)[1], 6),
    "blocks-wrapped": (lambda model: blocks(model, wrap=True), 4),
    "blocks-in-place": (lambda model: blocks(model, wrap=False), 4),
}
counter = CompileCounter()


def blocks(model: nn.Module, wrap: bool) -> nn.Module:
    for index, block in enumerate(model.blocks):
        if wrap:
            model.blocks[index] = torch.compile(block, backend=counter)
        else:
            block.compile(backend=counter)
    return model


@pytest.mark.parametrize("first", [0, 3], ids=["at once", "after steps"])
@pytest.mark.parametrize("how", LATER)
def test_row_14_attached_then_compiled(how: str, first: int) -> None:
    """attach first, torch.compile afterwards: hooks are called, not traced; weights as without
    compilation, five syncs, and nothing is compiled after the first compiled step."""
    torch._dynamo.reset()
    counter.clear()
    compiled, count = LATER[how]
    root = model = make_net()
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain(outer_lr=0.5))
    frames = []
    for t in range(11):
        if t == first:
            root = compiled(model)
        train_step(root, optimizer, 0, t)
        frames.append(counter.frame_count)
    assert (sync.step, sync.totals()["syncs"]) == (11, 5)
    assert frames == [0] * first + [count] * (11 - first)
    other = make_net()
    reference = trained(other, other, True)[2]
    for name, value in values(model).items():
        clean = reference[name.replace("_orig_mod.", "")]
        torch.testing.assert_close(value, clean, rtol=1e-6, atol=1e-7)


def test_row_14_attached_inside_what_runs_compiled() -> None:
    """attach to the model inside after the first step of torch.compile(model), which then runs
    without the hooks of its modules: five syncs, no new compilation, and it is said once; from then
    on the whole forward waits."""
    torch._dynamo.reset()
    counter.clear()
    model = make_net()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend=counter)
    train_step(compiled, optimizer, 0, 0)
    sync = edit_ext.attach(model, optimizer, plain(outer_lr=0.5))
    late = []  # at which steps a sync was open when the optimizer stepped
    with pytest.warns(UserWarning, match="or was compiled before attach") as caught:
        for t in range(1, 12):
            loss(compiled, batch(0, t)).backward()
            if sync._engine.syncs.active:
                late.append(t)
            optimizer.step()
            optimizer.zero_grad()
    assert len([w for w in caught if "edit_ext" in str(w.message)]) == 1
    assert (sync.step, sync.totals()["syncs"], counter.frame_count) == (11, 5, 1)
    assert late == [3]


def test_whole_root_is_said() -> None:
    """explain() says that a compiled root waits for all layers at once."""
    model = torch.compile(make_net(), backend="eager")
    sync = edit_ext.attach(model, sgd(model), plain())
    assert "because the root is compiled as a whole" in sync.explain(steps=4)
    sync.detach()
    assert loss(model, batch(0, 0)).item() > 0 and same(values(model), values(model))
