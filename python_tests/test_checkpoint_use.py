"""Checkpoints in the hands of a user: export, and what is refused in a sentence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import nets
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_fsdp import adam
from torch import nn

import edit_ext
from edit_ext.cli import main
from edit_ext.export import export


def trained(steps: int, model: nn.Module | None = None, **changes: Any) -> tuple[Any, Any, Any]:
    """One replica in this process."""
    model = model or nets.make_net()
    optimizer = adam(model.parameters())
    sync = edit_ext.attach(model, optimizer, edit_ext.EDiT(sync_every=4, **changes))
    for t in range(steps):
        nets.train_step(model, optimizer, 0, t)
    return model, optimizer, sync


def save(run: tuple[Any, Any, Any], path: Path, key: str = "run") -> None:
    model, optimizer, sync = run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({key: sync.checkpoint(model, optimizer)}, checkpoint_id=path, no_dist=True)


def load(run: tuple[Any, Any, Any], path: Path, key: str = "run") -> None:
    model, optimizer, sync = run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {key: sync.checkpoint(model, optimizer, path)}
        dcp.load(tree, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("warmup", [0, 8])
def test_export(tmp_path: Path, warmup: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds the agreed weights in the model's dtypes, frozen ones and buffers; in the
    warm-up, when nothing has been agreed on, the weights."""
    net = nets.make_net().to(torch.bfloat16)
    net.spare.requires_grad_(False)
    net.head.register_buffer("count", torch.tensor(3))
    run = trained(6, net, warmup_steps=warmup)
    model, _, sync = run
    save(run, tmp_path / "saved")
    with sync.anchor_weights():
        expected = {n: v.clone() for n, v in model.state_dict().items()}
    assert main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "model.pt")]) == 0
    assert "model.pt: 15 tensors" in capsys.readouterr().out
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert nets.same(found, expected)
    other = nets.make_net().to(torch.bfloat16)
    other.head.register_buffer("count", torch.tensor(0))
    other.load_state_dict(found)


def test_two_runs_in_one_checkpoint(tmp_path: Path) -> None:
    """Each finds its own; export wants to be told which."""
    first, second = trained(6), trained(5, nn.Linear(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"a": first[2].checkpoint(*first[:2]), "b": second[2].checkpoint(*second[:2])}
        dcp.save(tree, checkpoint_id=tmp_path, no_dist=True)
    again = trained(0)
    load(again, tmp_path, "a")
    assert again[2].step == 6 and nets.same(nets.values(again[0]), nets.values(first[0]))
    assert set(export(tmp_path, "b")) == {"weight", "bias"}
    with pytest.raises(ValueError, match="holds the runs 'a', 'b'; 2 of them fit"):
        export(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No folder, an empty one, and a checkpoint of somebody else."""
    model, optimizer, sync = trained(1)
    with pytest.raises(ValueError, match=r"nowhere is no checkpoint of torch\.distributed"):
        sync.checkpoint(model, optimizer, tmp_path / "nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match="was not saved by checkpoint"):
        sync.checkpoint(model, optimizer, tmp_path)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), "-o", str(tmp_path / "x.pt")])
    assert "holds no state of edit_ext" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), "-o", str(tmp_path / "no" / "x.pt")])
    assert "is no folder" in capsys.readouterr().err


def test_another_model_or_optimizer(tmp_path: Path) -> None:
    """Named, and nothing of the handle has changed."""
    run = trained(5)
    save(run, tmp_path)
    fewer = trained(0, nets.make_net(spare=False))
    with pytest.raises(ValueError, match=r"another model: 'spare\.bias' is not"):
        load(fewer, tmp_path)
    assert fewer[2].step == 0
    model = nets.make_net()
    groups = [{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    sync = edit_ext.attach(model, optimizer, edit_ext.EDiT(sync_every=4))
    with pytest.raises(ValueError, match="parameter group 0 of the optimizer holds"):
        load((model, optimizer, sync), tmp_path)


def test_layers_cut_otherwise(tmp_path: Path) -> None:
    """The weights go on; detectors of other layers start anew, which is said."""
    run = trained(6)
    save(run, tmp_path)
    model = nets.make_net()
    optimizer = adam(model.parameters())
    sync = edit_ext.attach(
        model, optimizer, edit_ext.EDiT(sync_every=4), layers=["blocks.0", "blocks.1", "head"]
    )
    with pytest.warns(UserWarning, match="detectors of such layers start anew"):
        tree = {"run": sync.checkpoint(model, optimizer, tmp_path)}
        dcp.load(tree, checkpoint_id=tmp_path, no_dist=True)
    assert sync.step == 6 and nets.same(nets.values(model), nets.values(run[0]))
    for t in range(6, 10):
        nets.train_step(model, optimizer, 0, t)
    assert sync.sync_index == run[2].sync_index + 1


def test_a_tree_that_was_loaded_can_be_saved(tmp_path: Path) -> None:
    """It then holds the optimizer's states, not the empty room that they were loaded into."""
    run = trained(6)
    save(run, tmp_path / "first")
    model, optimizer, sync = trained(0)
    tree = {"run": sync.checkpoint(model, optimizer, tmp_path / "first")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, checkpoint_id=tmp_path / "first", no_dist=True)
        nets.train_step(model, optimizer, 0, 6)
        dcp.save(tree, checkpoint_id=tmp_path / "second", no_dist=True)
    again = trained(0)
    load(again, tmp_path / "second")
    assert again[2].step == 7
    for param, twin in zip(model.parameters(), again[0].parameters(), strict=True):
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, again[1].state[twin][key]) and value.any()


def test_not_inside_a_sync(tmp_path: Path) -> None:
    """Between the forward and the step of a sync there is nothing whole to save."""
    model, optimizer, sync = trained(4)
    nets.loss(model, nets.batch(0, 4))  # the sync begins; `spare` is never visited
    with pytest.raises(RuntimeError, match="save after optimizer"):
        sync.checkpoint(model, optimizer).state_dict()
