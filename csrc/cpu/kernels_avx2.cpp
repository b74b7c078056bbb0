// Standard headers come before the pragma: their inline functions must stay runnable everywhere.
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#include "kernels_impl.h"
#include "vec_avx2.h"

namespace edit_ext::cpu {

const Kernels* avx2_kernels() { return Table<VecAvx2>::make("avx2"); }

}  // namespace edit_ext::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "kernels.h"

namespace edit_ext::cpu {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace edit_ext::cpu
#endif
