"""Builds `edit_ext._C` against the torch that is installed. Everything else is in pyproject.toml.

Environment: MAX_JOBS (compilers at a time, default 2), EDIT_EXT_WERROR=0 (warnings of a compiler
that we have not seen are no longer errors), EDIT_EXT_CUDA (0 or 1; else: built if torch is a CUDA
build and a toolkit of its major version is found), CUDA_HOME, TORCH_CUDA_ARCH_LIST. No GPU is
needed to build. EDIT_EXT_CUDA=emulated is for tests: the CUDA part runs on the CPU's memory.
"""

from __future__ import annotations

import os
import re
import shutil
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
    "csrc/comm/nccl_library.cpp",
    "csrc/comm/nccl_life.cpp",
    "csrc/comm/nccl.cpp",
]
CUDA_SOURCES = [
    "csrc/cuda/passes.cu",
    "csrc/cuda/device.cu",
    "csrc/cuda/stacked.cu",
    "csrc/cuda/on_chip.cu",
]
TORCH_SOURCES = [
    "csrc/torch/emulated.cpp",
    "csrc/torch/policy.cpp",
    "csrc/torch/ops.cpp",
    "csrc/torch/stacked.cpp",
    "csrc/torch/c10d_comm.cpp",
    "csrc/torch/checksum.cpp",
    "csrc/torch/lane.cpp",
    "csrc/torch/staged.cpp",
    "csrc/torch/nccl_door.cpp",
    "csrc/torch/flight.cpp",
    "csrc/torch/offload.cpp",
    "csrc/torch/layer.cpp",
    "csrc/torch/mean.cpp",
    "csrc/torch/module.cpp",
]

# No contraction: scalar code, AVX2, AVX-512 and CUDA must round alike. No -m flags: the two SIMD
# files set their own target, so that nothing else is compiled for a machine that may not be there.
# No -std: torch's build adds the one that its headers need (C++17, from 2.14 on C++20). Our sources
# are C++17, which CMake holds them to.
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"]
CXX_WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# The CPU's bits need separate multiply and add here too.
NVCC_FLAGS = ["-O3", "-fmad=false", "-Xcompiler=-fvisibility=hidden"]
ARCHITECTURES = "8.0;9.0;10.0+PTX"  # A100, H100 and H200, B200 and what comes after

# at::parallel_for is inline and runs on one thread, without a word, where OpenMP is off.
# csrc/torch/policy.cpp refuses to compile then.
OPENMP = "-fopenmp"


def stop(sentence: str) -> None:
    """Ends the build with one line, without a traceback."""
    sys.exit(f"edit_ext: {sentence}")


def check_switches() -> None:
    for name, known in (
        ("EDIT_EXT_CUDA", ("", "0", "1", "emulated")),
        ("EDIT_EXT_WERROR", ("0", "1")),
    ):
        value = os.environ.get(name, known[-1] if name == "EDIT_EXT_WERROR" else "")
        if value not in known:
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
        # Of an isolated `python -m build` only the active environment is known.
        sys.path.append(sysconfig.get_path("purelib"))
        if "VIRTUAL_ENV" in os.environ:
            python = f"python{sys.version_info.major}.{sys.version_info.minor}"
            sys.path.append(str(Path(os.environ["VIRTUAL_ENV"], "lib", python, "site-packages")))
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


def toolkit_release(home: Path) -> str:
    """Version of the CUDA toolkit in a folder, such as "13.0"; empty if there is none."""
    if not (home / "include" / "cuda_runtime.h").is_file():
        return ""
    try:
        text = subprocess.run(
            [str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else ""


def find_cuda(torch) -> tuple[Path | None, str]:
    """The toolkit to build the CUDA part with, and a sentence on why there is one or none."""
    switch, wanted = os.environ.get("EDIT_EXT_CUDA", ""), torch.version.cuda
    if switch == "0":
        return None, "not built: EDIT_EXT_CUDA=0"
    if switch == "emulated":
        return None, "CUDA under the emulator of the tests, no GPU"
    reason = f"not built: torch {torch.__version__} is a CPU build"
    if wanted is not None:
        nvcc = shutil.which("nvcc")
        named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        major = wanted.split(".")[0]
        folders = [Path(named)] if named else []
        folders += [Path(nvcc).resolve().parent.parent] if nvcc else []
        folders += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob(f"cuda-{major}*"))]
        releases = {home: toolkit_release(home) for home in folders}
        for home, release in releases.items():
            if release.split(".")[0] == major:
                return home, f"CUDA {release} in {home}, for torch with CUDA {wanted}"
        others = ", ".join(release for release in releases.values() if release) or "none"
        reason = f"not built: needs a CUDA toolkit of version {major}.x, found {others}"
    if switch == "1":
        stop(
            f"EDIT_EXT_CUDA=1, but the CUDA part is {reason}. Install a CUDA build of torch and "
            "the toolkit of the same major version (CUDA_HOME names its folder), or unset "
            "EDIT_EXT_CUDA."
        )
    return None, reason


def compiler_version() -> str:
    """What the compiler says of itself; empty when it cannot be run (the build then says more)."""
    from torch.utils.cpp_extension import get_cxx_compiler

    try:
        return subprocess.run(
            [*get_cxx_compiler().split(), "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def extension(torch, cuda: Path | None, why: str) -> setuptools.Extension:
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
    flags.append(f'-DEDIT_EXT_CUDA_REASON="{why}"')
    if os.environ.get("EDIT_EXT_CUDA") == "emulated":
        flags += ["-DEDIT_EXT_CUDA", '-DEDIT_EXT_EMULATED="../tests/emu.h"', "-Wno-unknown-pragmas"]
    sources, libraries = CPU_SOURCES + COMM_SOURCES + TORCH_SOURCES, ["c10", "torch", "torch_cpu"]
    folders = library_paths()
    if cuda:
        # Neither the driver nor NCCL is linked: the extension imports on a machine without them.
        sources, libraries = sources + CUDA_SOURCES, [*libraries, "c10_cuda", "cudart"]
        flags += ["-DEDIT_EXT_CUDA", "-isystem", str(cuda / "include")]
        folders.append(str(cuda / "lib64"))
    return setuptools.Extension(
        "edit_ext._C",
        sources=sources,
        depends=sorted(str(header) for header in Path("csrc").glob("*/*.*h")),
        library_dirs=folders,
        libraries=[*libraries, "torch_python", "dl"],
        extra_compile_args={"cxx": flags, "nvcc": NVCC_FLAGS} if cuda else flags,
        extra_link_args=[OPENMP] if clang else [],
        language="c++",
    )


def build_command(torch, cuda: Path | None, why: str) -> type:
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        """torch's build_ext with a lasting folder for objects, and a summary at the end."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # pip hands in a temporary folder, which would compile all of it anew each time.
            tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            if "emulator" in why:
                tag += "-emulated"
            self.build_temp = str(Path("build") / f"ext-{tag}-torch{torch.__version__}")

        def run(self) -> None:
            super().run()
            sources = sum(len(ext.sources) for ext in self.extensions)
            jobs = f"ninja, {os.environ['MAX_JOBS']} jobs" if self.use_ninja else "without ninja"
            print("edit_ext: build summary")
            print(f"  edit_ext._C  {sources} sources, {jobs}, torch {torch.__version__}")
            print("  CPU part     scalar, AVX2 and AVX-512 on x86-64 (chosen at run time)")
            print(f"  CUDA part    {why}")
            if cuda:
                print(f"  for GPUs     {os.environ['TORCH_CUDA_ARCH_LIST']}")

    return BuildExt


# The ninja of an environment that is not activated is not on PATH, and torch looks only there.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
os.environ.setdefault("MAX_JOBS", "2")
check_switches()
check_setuptools()
found_torch = import_torch()
cuda_home, cuda_reason = find_cuda(found_torch)
if cuda_home:
    os.environ["CUDA_HOME"] = str(cuda_home)  # torch reads it when cpp_extension is imported
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
setuptools.setup(
    ext_modules=[extension(found_torch, cuda_home, cuda_reason)],
    cmdclass={"build_ext": build_command(found_torch, cuda_home, cuda_reason)},
)
