"""`edit-ext doctor`: what was built, what this machine offers, and whether processes can talk.

Under torchrun the group check spans all ranks, and rank 0 reports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from .comm import gloo_address

Section = dict[str, Any]
GROUP_TIMEOUT = timedelta(seconds=30)


def examine() -> dict[str, Section]:
    """One section per topic, plain values only; `problems` lists what stops edit_ext working."""
    sections: dict[str, Section] = {
        "torch": _torch(),
        "extension": _extension(),
        "compiler": _compiler(),
        "CUDA": _cuda(),
        "NCCL": _nccl(),
        "threads": _threads(),
        "groups": _groups(),
    }
    problems = {name: each["problem"] for name, each in sections.items() if "problem" in each}
    return {**sections, "problems": problems}


def _torch() -> Section:
    return {"version": torch.__version__, "folder": os.path.dirname(torch.__file__)}


def _extension() -> Section:
    found: Section = {"file": _C.__file__, **_C.build_info()}
    built, running = str(found["torch"]).split("+")[0], torch.__version__.split("+")[0]
    if built != running:
        found["problem"] = f"built against torch {built}, running with {running}: build it again"
    return found


def _compiler() -> Section:
    """The compiler that a build would use now; the one that was used stands under `extension`."""
    name = os.environ.get("CXX", "c++")
    return {"command": name, "version": _first_line(name, "--version")}


def _cuda() -> Section:
    found: Section = {
        "torch_build": torch.version.cuda or "none: this torch is a CPU build",
        "toolkit": _first_line("nvcc", "--version", matching="release"),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    return found


def _nccl() -> Section:
    if not (dist.is_available() and dist.is_nccl_available()):
        return {"version": "none: this torch is built without NCCL"}
    return {"version": ".".join(map(str, torch.cuda.nccl.version()))}


def _threads() -> Section:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "usable_cores": usable,
        "torch_threads": torch.get_num_threads(),
        "kernel_threads": _C.kernel_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def _groups() -> Section:
    if not dist.is_available():
        return {"problem": "this torch is built without torch.distributed"}
    names = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    names |= {"mpi": dist.is_mpi_available, "ucc": dist.is_ucc_available}
    found: Section = {"backends": [name for name, available in names.items() if available()]}
    found["address"] = gloo_address()
    try:
        return {**found, **_try_group()}
    except (RuntimeError, ValueError, OSError) as error:
        return {**found, "problem": f"a Gloo group does not work: {error}"}


def _try_group() -> Section:
    """Sums one number over all ranks of the launcher, or over a group of one without a launcher."""
    if dist.is_torchelastic_launched() or "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    else:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=GROUP_TIMEOUT
        )
    try:
        ranks = torch.ones(1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(ranks)
        seconds = time.perf_counter() - start
        if int(ranks) != dist.get_world_size():
            raise RuntimeError(f"the ranks of {dist.get_world_size()} summed to {int(ranks)}")
        return {"rank": dist.get_rank(), "ranks": int(ranks), "all_reduce_seconds": seconds}
    finally:
        dist.destroy_process_group()


def _first_line(command: str, *arguments: str, matching: str = "") -> str:
    """The first line of a tool's output with `matching` in it, or why there is none."""
    if shutil.which(command) is None:
        return f"none: no {command} on PATH"
    try:
        result = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none: {error}"
    return next((line for line in result.stdout.splitlines() if matching in line), "unknown")


def _print(sections: dict[str, Section]) -> None:
    for name, section in sections.items():
        for key, value in section.items():
            if isinstance(value, list | tuple):
                value = ", ".join(map(str, value)) or "none"
            elif isinstance(value, float):
                value = f"{value:.2g}"
            print(f"{name:10} {key!s:20} {value}")
    print("all is well" if not sections["problems"] else "see the problems above")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `edit-ext doctor`; returns 0, or 1 when something stops edit_ext working."""
    parser = argparse.ArgumentParser(prog="edit-ext doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    args = parser.parse_args(argv)
    sections = examine()
    if sections["groups"].get("rank", 0) == 0:
        if args.json:
            print(json.dumps(sections, indent=2))
        else:
            _print(sections)
    return 1 if sections["problems"] else 0
