// Standard headers come before the pragma: their inline functions must stay runnable everywhere.
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), \
                             apply_to = function)
#else
// GCC 12 reports its own headers (PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")
#endif
#include "kernels_impl.h"
#include "vec_avx512.h"

namespace edit_ext::cpu {

const Kernels* avx512_kernels() { return Table<VecAvx512>::make("avx512"); }

}  // namespace edit_ext::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "kernels.h"

namespace edit_ext::cpu {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace edit_ext::cpu
#endif
