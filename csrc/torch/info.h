// What this build is and which code path it takes on this machine.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include "../cpu/kernels.h"

namespace edit_ext {

inline pybind11::dict build_info() {
  namespace py = pybind11;
  py::list paths;
  for (const cpu::Kernels* const* k = cpu::runnable_kernels(); *k; ++k) paths.append((*k)->name);
  py::dict info;
  info["simd"] = cpu::kernels().name;
  info["simd_paths"] = paths;
  info["compiler"] = __VERSION__;
  info["torch"] = TORCH_VERSION;
  info["cuda"] = false;
  info["cuda_reason"] = "this version has a CPU part only";
  return info;
}

}  // namespace edit_ext
