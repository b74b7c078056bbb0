"""Builds `edit_ext._C` against the torch that is installed. Everything else is in pyproject.toml.

Environment: MAX_JOBS (compilers at a time, default 2), EDIT_EXT_WERROR=0 (warnings of a compiler
that we have not seen are no longer errors), EDIT_EXT_CUDA (0 or 1).
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools

NEEDS_SETUPTOOLS = 77  # the first that reads a licence expression in pyproject.toml
NEEDS_TORCH = (2, 10)

# CMakeLists.txt names the same files, without csrc/torch; python_tests/test_boundary.py compares.
CPU_SOURCES = [
    "csrc/cpu/kernels_scalar.cpp",
    "csrc/cpu/kernels_avx2.cpp",
    "csrc/cpu/kernels_avx512.cpp",
    "csrc/cpu/dispatch.cpp",
    "csrc/cpu/device.cpp",
    "csrc/cpu/stacked.cpp",
    "csrc/cpu/worker.cpp",
]
COMM_SOURCES = [
    "csrc/comm/threads.cpp",
]
TORCH_SOURCES = [
    "csrc/torch/policy.cpp",
    "csrc/torch/ops.cpp",
    "csrc/torch/stacked.cpp",
    "csrc/torch/c10d_comm.cpp",
    "csrc/torch/checksum.cpp",
    "csrc/torch/flight.cpp",
    "csrc/torch/layer.cpp",
    "csrc/torch/module.cpp",
]

# No contraction: scalar code, AVX2, AVX-512 and CUDA must round alike. No -m flags: the two SIMD
# files set their own target, so that nothing else is compiled for a machine that may not be there.
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"]
CXX_WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# at::parallel_for is inline and runs on one thread, without a word, where OpenMP is off.
# csrc/torch/policy.cpp refuses to compile then.
OPENMP = "-fopenmp"


def stop(sentence: str) -> None:
    """Ends the build with one line, without a traceback."""
    sys.exit(f"edit_ext: {sentence}")


def check_switches() -> None:
    cuda = os.environ.get("EDIT_EXT_CUDA", "0")
    if cuda == "1":
        stop(
            "EDIT_EXT_CUDA=1 asks for a CUDA build, and this version has a CPU part only: "
            "unset it or set EDIT_EXT_CUDA=0."
        )
    for name, value in (("EDIT_EXT_CUDA", cuda), ("EDIT_EXT_WERROR", werror())):
        if value not in ("0", "1"):
            stop(f"{name} must be 0 or 1, got {value!r}.")


def werror() -> str:
    return os.environ.get("EDIT_EXT_WERROR", "1")


def check_setuptools() -> None:
    found = setuptools.__version__
    if int(found.split(".")[0]) < NEEDS_SETUPTOOLS:
        stop(
            f"needs setuptools >= {NEEDS_SETUPTOOLS} to build, found {found}: "
            f"run `pip install 'setuptools>={NEEDS_SETUPTOOLS}' ninja`, then this again."
        )


def import_torch():
    """The torch module that the extension will run with; ends the build if there is none."""
    try:
        import torch
    except ImportError:
        # pip's isolated build hides this folder, but it is where the extension will be installed:
        # a torch that lies here is the right one to build against, a freshly downloaded one is not.
        sys.path.append(sysconfig.get_path("purelib"))
        try:
            import torch
        except ImportError:
            stop(
                "no torch to build against: run `pip install 'torch>=2.10' setuptools ninja`, then "
                "`pip install --no-build-isolation .` (for a wheel: "
                "`python -m build --wheel --no-isolation`)."
            )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < NEEDS_TORCH:
        wanted = ".".join(map(str, NEEDS_TORCH))
        stop(f"needs torch >= {wanted} to build and run, found {torch.__version__}.")
    return torch


def compiler_version() -> str:
    """What the compiler says of itself; empty when it cannot be run (the build then says more)."""
    from torch.utils.cpp_extension import get_cxx_compiler

    try:
        return subprocess.run(
            [*get_cxx_compiler().split(), "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def extension(torch) -> setuptools.Extension:
    from torch.utils.cpp_extension import include_paths, library_paths

    flags = CXX_FLAGS + [flag for flag in CXX_WARNINGS if werror() == "1" or flag != "-Werror"]
    for folder in include_paths():
        flags += ["-isystem", folder]  # not -I: warnings are errors in our files, not in torch's
    # ninja does not look at the age of system headers; the version in the command line makes a
    # changed torch recompile everything.
    flags.append(f"-DEDIT_EXT_TORCH_VERSION={torch.__version__}")
    flags.append(OPENMP)
    # With g++ the calls must land in the OpenMP library that torch has loaded (its threads, its
    # set_num_threads), so we name none; clang's calls have other names and need its own.
    clang = "clang" in compiler_version()
    return setuptools.Extension(
        "edit_ext._C",
        sources=CPU_SOURCES + COMM_SOURCES + TORCH_SOURCES,
        depends=sorted(str(header) for header in Path("csrc").glob("*/*.h")),
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        extra_compile_args=flags,
        extra_link_args=[OPENMP] if clang else [],
        language="c++",
    )


def build_command(torch) -> type:
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        """torch's build_ext with a lasting folder for objects, and a summary at the end."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # pip hands in a temporary folder, which would compile all of it anew each time.
            tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            self.build_temp = str(Path("build") / f"ext-{tag}-torch{torch.__version__}")

        def run(self) -> None:
            super().run()
            sources = sum(len(ext.sources) for ext in self.extensions)
            jobs = f"ninja, {os.environ['MAX_JOBS']} jobs" if self.use_ninja else "without ninja"
            print("edit_ext: build summary")
            print(f"  edit_ext._C  {sources} sources, {jobs}, torch {torch.__version__}")
            print("  CPU part     scalar, AVX2 and AVX-512 on x86-64 (chosen at run time)")
            print("  CUDA part    not built: this version has a CPU part only")

    return BuildExt


# The ninja of an environment that is not activated is not on PATH, and torch looks only there.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
os.environ.setdefault("MAX_JOBS", "2")
check_switches()
check_setuptools()
found_torch = import_torch()
setuptools.setup(
    ext_modules=[extension(found_torch)],
    cmdclass={"build_ext": build_command(found_torch)},
)
