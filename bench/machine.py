"""What a number was measured on: printed above every table and kept in its JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def machine(device: str = "cpu") -> dict[str, Any]:
    """CPU model, cores, last-level cache in bytes, threads, versions, commit, SIMD path, load."""
    from edit_ext import _C

    build = _C.build_info()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "last_level_cache": last_level_cache(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
        "simd": build.get("simd", "unknown"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "load": round(os.getloadavg()[0], 2),
    }


def header(info: dict[str, Any]) -> str:
    """Two lines for people."""
    cache = info["last_level_cache"]
    return (
        f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads in use, last-level cache "
        f"{'unknown' if cache is None else f'{cache / 2**20:.0f} MiB'}, load {info['load']}, "
        f"{'no GPU used' if info['device'] == 'cpu' else 'GPU ' + info['device']}\n"
        f"torch {info['torch']}, edit_ext commit {info['commit']}, SIMD path {info['simd']}"
    )


def last_level_cache() -> int | None:
    """Bytes of the largest cache that the first core sees; None where the system does not say."""
    sizes = []
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes, default=None)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Commit of the source tree; "unknown" for an installed copy without one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
