// What this build is and which code path it takes on this machine.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <mutex>
#include <set>
#include <thread>

#include "../cpu/kernels.h"
#include "policy.h"

namespace edit_ext {

// Threads that one pass over memory runs on, counted by running one.
inline size_t kernel_threads() {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  const int64_t plenty = 16 * static_cast<int64_t>(std::thread::hardware_concurrency() + 1);
  cpu_device().for_each(plenty, [&](int64_t) {
    const std::lock_guard<std::mutex> lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  return seen.size();
}

inline pybind11::dict build_info() {
  namespace py = pybind11;
  py::list paths;
  for (const cpu::Kernels* const* k = cpu::runnable_kernels(); *k; ++k) paths.append((*k)->name);
  py::dict info;
  info["simd"] = cpu::kernels().name;
  info["simd_paths"] = paths;
  info["compiler"] = __VERSION__;
  info["torch"] = TORCH_VERSION;
#if defined(EDIT_EXT_CUDA)
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["cuda_reason"] = EDIT_EXT_CUDA_REASON;
  return info;
}

}  // namespace edit_ext
