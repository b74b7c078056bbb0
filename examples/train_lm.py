"""Train a byte-level Llama with EDiT: an ordinary PyTorch loop with one `attach`.

edit-ext train --replicas 4 --sync-every 20 --warmup-steps 100
torchrun --nproc-per-node 4 -m edit_ext.examples.train_lm --sync-every 20 --warmup-steps 100

Elastic: machines come and go, and those that are there go on from the last checkpoint. Without the
variable, torchrun takes no machine into a running job (seen with torch 2.13).
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:8 --nproc-per-node 1 --max-restarts 100 \\
    --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME \\
    -m edit_ext.examples.train_lm --out SHARED/FOLDER --checkpoint-every 100 --resume auto
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import edit_ext
from edit_ext import launch
from edit_ext.examples.checkpoint import (
    ResumeError,
    Saved,
    clear_checkpoints,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from edit_ext.examples.data import Batches, Corpus, DataError, load_corpus, validation_batches
from edit_ext.examples.meeting import init_replicas
from edit_ext.examples.method_options import config_of
from edit_ext.examples.model import PRESETS, Llama
from edit_ext.examples.options import fixed_settings, parse_options
from edit_ext.examples.pace import Pace, link, out_of_time, steps_of_all
from edit_ext.examples.records import Records

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(options: argparse.Namespace, corpus: Corpus, saved: Saved | None) -> None:
    """The run of one replica, from `saved` (on rank 0; the others hear of it) on if there is one.

    Raises ResumeError if that cannot be read.
    """
    rank, replicas = init_replicas(options.timeout)
    if rank == 0:
        clear_checkpoints(Path(options.out), keep=saved.path if saved else None)
    saved = from_rank_0(saved)
    torch.manual_seed(options.seed)  # the same everywhere: replicas start equal
    device = home(options)
    model = build_model(options).to(device)
    optimizer = build_optimizer(model, options)
    sync = edit_ext.attach(model, optimizer, config_of(options), comm_wrapper=link(options))
    records = Records(options, rank, replicas, saved)
    pace = Pace(options, rank, replicas)
    batches = Batches(
        corpus.train, batch_size=options.batch_size, seq_len=options.seq_len, seed=options.seed,
        rank=sync.data_rank, world=sync.data_world, start=records.step_done,
        dealt=records.tokens // options.seq_len,
    )  # fmt: skip

    with sync:
        if saved:
            with records.paused(sync):
                load_checkpoint(saved.path, sync, model, optimizer)
        records.begin(model, corpus)
        for step in range(records.step_done, options.steps):
            if out_of_time(options, records.seconds()):
                break
            at = step if options.lr_by == "local" else sync.mean_step
            lr = set_learning_rate(optimizer, at, options)
            inputs, targets = next_batch(batches, step, options)
            loss = model(inputs.to(device), targets.to(device))
            pace.sleep(step)  # behind the sync, as the computing of a step is
            loss.backward()
            if options.grad_clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
            optimizer.step()
            optimizer.zero_grad()

            done = step + 1
            records.step(done, loss, lr, sync)
            if due(done, options.eval_every) and done < options.steps:
                meet(sync, options)
                with records.paused(sync), sync.anchor_weights():
                    records.validation(evaluate(model, corpus, options))
            if due(done, options.checkpoint_every):
                meet(sync, options)
                with records.paused(sync):
                    save_checkpoint(
                        Path(options.out), done, sync, model, optimizer,
                        settings=fixed_settings(options), records=records.state(sync),
                    )  # fmt: skip
    # Leaving `with sync` has ended the last window: all replicas hold the agreed weights.
    with records.paused(sync):
        final = evaluate(model, corpus, options)
    records.end(sync, final, steps_of_all(records.step_done))
    if dist.is_initialized():
        dist.destroy_process_group()


def from_rank_0(saved: Saved | None) -> Saved | None:
    """What rank 0 has found: on a network file system others may still see the step before."""
    if dist.is_initialized():
        found = [saved]
        dist.broadcast_object_list(found, src=0)
        return found[0]
    return saved


def home(options: argparse.Namespace) -> torch.device:
    """The device of this process: GPUs are handed out by local rank, in turn if they are few."""
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    )
    torch.cuda.set_device(device)
    return device


def build_model(options: argparse.Namespace) -> Llama:
    config = dataclasses.replace(PRESETS[options.preset], tied=options.tied)
    return Llama(config).to(DTYPES[options.dtype])


def build_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; decay for matrices, none for the gains of norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: float, options: argparse.Namespace
) -> float:
    """Linear rise over --warmup-lr steps, then half a cosine down to --final-lr of it."""
    rise = min(1.0, (step + 1) / max(1, options.warmup_lr))
    progress = max(0, step - options.warmup_lr) / max(1, options.steps - options.warmup_lr)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    fall = options.final_lr + (1 - options.final_lr) * cosine
    lr: float = options.lr * rise * fall
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def meet(sync: edit_ext.Handle, options: argparse.Namespace) -> None:
    """Before a call of all replicas: by the clock they come to it after unequal numbers of syncs,
    and one that waits for it takes part in no sync that another is in."""
    if options.method == "aedit":
        sync.flush()


def next_batch(batches: Batches, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The batch of this step; noise for the replica that --corrupt-replica names."""
    if options.corrupt_replica == batches.rank:
        first, last = options.corrupt_steps
        if first <= step < last:
            return batches.noise(step)
    return batches.batch(step)


def due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0


def evaluate(model: nn.Module, corpus: Corpus, options: argparse.Namespace) -> float:
    """Mean validation loss in nats a byte; each rank reads its share, and all ranks must call."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares = validation_batches(
        corpus.validation, batch_size=options.batch_size, seq_len=options.seq_len,
        count=options.eval_windows, rank=rank, world=world,
    )  # fmt: skip
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64)  # loss summed over bytes, bytes
    model.eval()
    with torch.no_grad():
        for inputs, targets in shares:
            loss = model(inputs.to(device), targets.to(device)).double().cpu()
            total += torch.stack((loss * targets.numel(), torch.tensor(float(targets.numel()))))
    model.train()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total[0] / total[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 after one line on bad input, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_options(arguments)
    if options.replicas > 1 and "WORLD_SIZE" not in os.environ:
        return launch.train(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        corpus = load_corpus(options.data, window=options.seq_len + 1)
        saved = None
        if options.resume and os.environ.get("RANK", "0") == "0":
            saved = find_checkpoint(
                Path(options.out), fixed_settings(options), begin=options.resume == "auto"
            )
        train(options, corpus, saved)
    except (DataError, ResumeError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line a machine
            print(f"edit-ext train: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
