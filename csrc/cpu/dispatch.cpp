#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace edit_ext::cpu {
namespace {

bool runs(const Kernels* table) {
  if (table == nullptr) return false;
#if defined(__x86_64__)
  if (table == avx2_kernels()) return __builtin_cpu_supports("avx2") != 0;
  if (table == avx512_kernels()) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return true;
}

const Kernels* choose() {
  const char* wanted = std::getenv("EDIT_EXT_SIMD");
  const Kernels* best = nullptr;
  std::string known;
  for (const Kernels* const* k = runnable_kernels(); *k; ++k) {
    known += std::string(known.empty() ? "" : ", ") + (*k)->name;
    if (!wanted || std::strcmp(wanted, (*k)->name) == 0) best = *k;
  }
  if (best == nullptr) {
    throw std::runtime_error("EDIT_EXT_SIMD=" + std::string(wanted) +
                             ": this machine and build run " + known);
  }
  return best;
}

}  // namespace

const Kernels* const* runnable_kernels() {
  static const Kernels* table[4] = {};
  static const bool filled = [] {
    int n = 0;
    for (const Kernels* k : {scalar_kernels(), avx2_kernels(), avx512_kernels()}) {
      if (runs(k)) table[n++] = k;
    }
    return true;
  }();
  (void)filled;
  return table;
}

const Kernels& kernels() {
  static const Kernels* chosen = choose();
  return *chosen;
}

}  // namespace edit_ext::cpu
