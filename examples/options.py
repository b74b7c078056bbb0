"""The command line of train_lm.py: every option once, with its unit and its default."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from edit_ext.examples.data import check_data
from edit_ext.examples.kinds import above_zero, at_least, number, number_or_none, step_range
from edit_ext.examples.method_options import CONFIGS, add_settings, check_settings, config_of
from edit_ext.examples.model import PRESETS
from edit_ext.examples.pace import add_pace_options, check_pace
from edit_ext.examples.runlog import METRICS, tensorboard_missing

Kind = Callable[[str], Any]
# What a resumed run may change; all other options must be those of the first part.
CHANGEABLE = {"checkpoint_every", "eval_every", "log_every", "out", "overwrite", "replicas",
              "resume", "tensorboard", "threads", "timeout"}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and no usage text."""

    def error(self, message: str) -> NoReturn:
        # One line a machine, not one a process, when a launcher has already started them all.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; `arguments` None means sys.argv.

    A mistake, missing data included, prints one line and raises SystemExit(2). Creates --out.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        check_pace(options)
        config_of(options)
        check_data(options.data)
        if os.environ.get("RANK", "0") == "0":
            prepare_folder(Path(options.out))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="edit-ext train",
        description="Train a byte-level Llama with EDiT or another method of local updates.",
        epilog="Under torchrun the number of processes is the number of replicas, and with "
        "--resume auto the same line serves a job that is restarted with another number of them. "
        "The learning rate follows the step, whatever the number of replicas; the global batch is "
        "--batch-size sequences of each of them, so it grows with their number.",
        allow_abbrev=False,
    )
    add = _adder(parser, "the run")
    add("--method", str, "edit", "sync averages gradients at every step; aedit goes by the clock, "
        "and replicas meet before each evaluation and checkpoint", choices=CONFIGS)  # fmt: skip
    add("--replicas", at_least(1), _world(), "processes to start here, one replica each")
    add("--threads", at_least(1), None, "torch threads of each process; else the cores are shared")
    add("--out", str, "runs/lm", "folder for metrics and checkpoints, the same for all machines")
    add("--overwrite", None, None, "replace a run found in --out")
    add("--resume", str, None, "go on from the last checkpoint in --out, with this number of "
        "replicas; auto: begin, in place of what is there, if none is", nargs="?", const="always",
        choices=("auto", "always"))  # fmt: skip
    add("--checkpoint-every", at_least(0), 0, "steps; 0 = never")
    add("--eval-every", at_least(0), 100, "steps; 0 = only at the end")
    add("--eval-windows", at_least(1), 256, "held-out windows of --seq-len bytes to evaluate on")
    add("--log-every", at_least(1), 10, "steps")
    add("--tensorboard", None, None, "write TensorBoard files too")
    add("--timeout", number, 600.0, "seconds a peer may be silent")

    add = _adder(parser, "model and data")
    add("--preset", str, "tiny", "size of the model", choices=tuple(PRESETS))
    add("--tied", None, None, "one matrix for embedding and head")
    add("--dtype", str, "fp32", "of parameters and arithmetic", choices=("fp32", "bf16"))
    add("--device", str, "cpu", "where to train; cuda: GPUs by local rank", choices=("cpu", "cuda"))
    add("--data", str, [], "text files, folders, or hf:NAME[:CONFIG] for a Hugging Face data set; "
        "else the source of Python's standard library", nargs="+", metavar="PATH")  # fmt: skip
    add("--seq-len", at_least(1), 128, "bytes")
    add("--batch-size", at_least(1), 8, "sequences per replica and step")
    add("--seed", at_least(0), 0, "of the first weights and of the order of the data")

    add = _adder(parser, "inner optimizer (AdamW)")
    add("--steps", at_least(1), 1000, "optimizer steps of each replica")
    add("--seconds", above_zero, None, "of training, after which a replica ends although --steps "
        "are not over", metavar="S")  # fmt: skip
    add("--lr", number, 2e-3, "the learning rate at its peak")
    add("--warmup-lr", at_least(0), 40, "steps in which the learning rate rises to it")
    add("--final-lr", number, 0.1, "part of --lr that is left at the end; 1 = no decay")
    add("--lr-by", str, "local", "the steps that it follows: the replica's own, or the mean over "
        "all replicas at the last sync", choices=("local", "mean"))  # fmt: skip
    add("--weight-decay", number, 0.1, "of matrices")
    add("--grad-clip", number_or_none, 1.0, "largest norm of a replica's gradient; none = off")

    add_settings(_adder(parser, "the method (each with its own default where nothing is given)"))

    add = _adder(parser, "faults to watch")
    add("--corrupt-replica", at_least(0), None, "the replica that is fed random bytes")
    add("--corrupt-steps", step_range, None, "from step A up to, not including, B", metavar="A:B")
    add_pace_options(add)
    return parser


def _adder(parser: argparse.ArgumentParser, title: str) -> Callable[..., None]:
    """Adds options to one group: flag, kind (None for a switch), default, help."""
    group = parser.add_argument_group(title)

    def add(flag: str, kind: Kind | None, default: Any, text: str, **more: Any) -> None:
        if kind is None:
            group.add_argument(flag, action="store_true", default=default or False, help=text)
            return
        if default not in (None, [], argparse.SUPPRESS):
            text += f" ({default})"
        more.setdefault("metavar", "N" if kind is not str and "choices" not in more else None)
        group.add_argument(flag, type=kind, default=default, help=text, **more)

    return add


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_options(options: argparse.Namespace) -> None:
    """Relations between options. Raises ValueError with one sentence."""
    world = int(os.environ.get("WORLD_SIZE", options.replicas))
    if world != options.replicas:
        raise ValueError(f"--replicas {options.replicas} under a launcher of {world} processes")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    if options.lr <= 0:
        raise ValueError(f"--lr must be positive, got {options.lr}")
    if not 0 <= options.final_lr <= 1:
        raise ValueError(f"--final-lr must be between 0 and 1, got {options.final_lr}")
    if options.weight_decay < 0:
        raise ValueError(f"--weight-decay must be at least 0, got {options.weight_decay}")
    if options.grad_clip is not None and options.grad_clip <= 0:
        raise ValueError(
            f"--grad-clip must be positive, got {options.grad_clip}; none switches it off"
        )
    if options.timeout <= 0:
        raise ValueError(f"--timeout must be positive, got {options.timeout}")
    if options.resume and options.overwrite:
        raise ValueError("--resume goes on with what --overwrite replaces: give one of them")
    if options.resume == "auto" and not options.checkpoint_every:
        raise ValueError("--resume auto needs --checkpoint-every, or a restart begins again")
    if options.tensorboard and tensorboard_missing():
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard")
    try:
        found = (Path(options.out) / METRICS).exists()
    except OSError as error:
        raise ValueError(f"--out {options.out} cannot be read: {error.strerror}") from error
    first = os.environ.get("RANK", "0") == "0"  # it makes that file while others still start
    if first and found and not (options.resume or options.overwrite):
        raise ValueError(
            f"--out {options.out} already holds a run; go on with --resume or replace it with "
            f"--overwrite"
        )
    if (options.corrupt_replica is None) != (options.corrupt_steps is None):
        raise ValueError("--corrupt-replica and --corrupt-steps go together")
    if options.corrupt_replica is not None and options.corrupt_replica >= options.replicas:
        raise ValueError(
            f"--corrupt-replica {options.corrupt_replica}: there are only replicas 0 to "
            f"{options.replicas - 1}"
        )
    check_settings(options)


def prepare_folder(out: Path) -> None:
    """Create the folder of a run. Raises ValueError if no file can be made in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to: {error.strerror}") from error


def fixed_settings(options: argparse.Namespace) -> dict[str, object]:
    """The options that make a run what it is: what a resumed run must have in common with it."""
    return {k: v for k, v in sorted(vars(options).items()) if k not in CHANGEABLE}
