"""torch.compile around, inside and after attach: the right number of syncs, no new compilations."""

from __future__ import annotations

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
def test_compiled_then_attached(how: str, before: bool) -> None:
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


def test_attached_then_compiled() -> None:
    """attach first, torch.compile afterwards: hooks are called, not traced; five syncs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = make_net()
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain(outer_lr=0.5))
    compiled = torch.compile(model, backend=counter)
    frames = []
    for t in range(11):
        train_step(compiled, optimizer, 0, t)
        frames.append(counter.frame_count)
    assert (sync.step, sync.totals()["syncs"]) == (11, 5)
    assert frames[-1] == frames[3], "recompiled in later windows"
    other = make_net()
    reference = trained(other, other, True)[2]
    for name, value in values(model).items():
        torch.testing.assert_close(value, reference[name], rtol=1e-6, atol=1e-7)


def test_whole_root_is_said() -> None:
    """explain() says that a compiled root waits for all layers at once."""
    model = torch.compile(make_net(), backend="eager")
    sync = edit_ext.attach(model, sgd(model), plain())
    assert "because the root is compiled as a whole" in sync.explain(steps=4)
    sync.detach()
    assert loss(model, batch(0, 0)).item() > 0 and same(values(model), values(model))
